"""docs/models.md from the result of ``scripts/model_table.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

_OWN = "hisparse: error: "

_INTRO = """\
# Models

Of {count} of SGLang's model families, hisparse serves {served} and refuses {refused} with one line;
{broken} do not start on a CPU even without it. `scripts/model_table.py` makes this page.

Each is a tiny random model, in float32 on a CPU. SGLang's `torch_native` and hisparse answer three
prompts within the budget; *equal* counts equal answers. Then hisparse
answers three of {long_prompts} tokens with a budget of {budget}. That shows nothing of
[quality](quality.md).

`torch_native` does not compute latents (MLA), sinks, caps of logits and EXAONE 4; such families are
*not compared*. Tests compare all of these but DeepSeek-V3 with Hugging Face."""

_END = """\
## What decides

hisparse serves models whose layers attend causally with MHA, GQA or MLA, over all tokens or a
window, with heads of one number and width.
*Fallback* marks models that SGLang runs with transformers' code (`--model-impl transformers`).

## Models that select by themselves

Models that were trained to attend what they select are served with that selection alone. Bytes are
of a token and layer, in bfloat16; launches of a captured layer:

| model | algorithm | host | device | launches |
| --- | --- | --- | --- | --- |
| DeepSeek-V3.2, GLM-5 (DSA) | `dsa` ([deepseek.md](deepseek.md)) | 1,152 | 132 | 8 |
| GLM-5's layers with a shared selection | | 1,152 | 0 | 5 |
| Qwen4-Exp (QSA) | `qsa` | 2,048 | 64, and 1,120 for a request and layer | 16, and the model's |
| MiniMax-M3 | `msa` | 2,048 | 256 | 10 |
| MiniCPM (InfLLM-V2) | `infllm` | 1,024 | 64 | 28 |

`hisparse plan` prints the settings of a model's training. The server refuses other pages, dense
layers and means, and warns of other sizes.

For 8 prompts of 4 to 8 times the budget, tokens are those of transformers, in float32 with random
weights; prefixes, aborts, retractions and two ranks included. DSA and MSA were also tested with
drafts, a store, prefill and decode servers and, but for GLM-5, fp8 and a pipeline; MiniCPM refuses
all but fp8, which did not run, and Lightning layers. Its reference is a Llama that selects by
SGLang's code. Unlike there, each query compares itself with `dense_len`, a softmax is over the
means themselves, and `--qsa-indexer-dtype fp8_e4m3` gives keys a scale and rounds no queries.
Trained weights, images, a GPU and MiniMax-M3's experts, which need one, have not run.
`HiSparseCache` refuses them.

Refused before they load: GLM-5-Next, Qwen2.5-1M, Hunyuan V4, LongCat, and these, which would take

- DeepSeek-V4: a window and compressed K and V, one of 4 or 128 tokens, attended together; a pool
  for each; states of unfinished blocks.
- Qwen3-Next-DSA: a model in SGLang (0.5.23 has none) and a feature.

## Hybrids

Hybrids mix attention with linear attention, convolution or state space models (Mamba), whose states
SGLang keeps on the device: `--max-mamba-cache-size` or `--mamba-full-memory-ratio` sets the size.
`dense_layers` and the label `layer` number layers as the model does.

Qwen3-Next, Kimi Linear and LFM2 give the tokens of transformers. On a CPU their other layers run in
PyTorch (`cpu_standins/`). Some models, such as LFM2, need `--disable-radix-cache`.

Hybrids are not served with `storage`, speculative decoding, prefill and decode servers, `--pp-size`
or `--attn-dp-size`; only Qwen4-Exp was tested with several ranks. `HiSparseCache` refuses them.
`hisparse plan` counts states of Qwen3-Next and Qwen4-Exp.

## Add a family

A family is one entry of `scripts/model_families.py`.
`python -m scripts.model_table build/models.json "My family"` serves it.
"""


def outcome(row: Mapping[str, Any]) -> str:
    """What a family did, in a few words that do not change from run to run."""
    found, dense = row["hisparse"], row["torch_native"]
    if found == "served":
        equal = f"{row['equal']} of 3 equal" if "equal" in row else "no dense answers"
        return f"served, {equal}, sparse {'finite' if row['finite'] else 'not finite'}"
    if found.startswith(_OWN):
        return f"refused: {found.removeprefix(_OWN)}"
    return "SGLang's error" if dense != "served" else f"fails: {found}"


def make_page(result: Mapping[str, Any]) -> str:
    """The whole page, as Markdown, from what ``scripts/model_table.py`` has written."""
    rows = result["families"]
    served = [row for row in rows if row["hisparse"] == "served"]
    refused = [row for row in rows if outcome(row).startswith("refused")]
    head = _INTRO.format(
        **result["params"],
        served=len(served),
        count=len(rows),
        refused=len(refused),
        broken=len(rows) - len(served) - len(refused),
    )
    families: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["hisparse"] != "served"):
        families[_text(row)].append(row["name"].removesuffix(", fallback"))
    table = [
        _line("outcome", "families"),
        _line(*["---"] * 2),
        *(_line(text, ", ".join(names)) for text, names in families.items()),
    ]
    return "\n\n".join([head, "\n".join(table), _END])


def _text(row: Mapping[str, Any]) -> str:
    """What became of a family, in words that families share."""
    found, dense = row["hisparse"], row["torch_native"]
    if found == "served":
        equal = f"{row['equal']} of 3 equal" if "equal" in row else "not compared"
        text = f"served, {equal}" if row["finite"] else f"served, {equal}, sparse not finite"
        return f"{text}, fallback" if "transformers" in row["flags"] else text
    if found.startswith(_OWN):
        return f"refused: {found.removeprefix(_OWN)}"
    return f"SGLang: `{dense if dense != 'served' else found}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
