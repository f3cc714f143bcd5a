"""docs/models.md from the result of ``scripts/model_table.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

_OWN = "hisparse: error: "

_INTRO = """\
# Models

After this page you know which model families hisparse serves from SGLang, and why it does not serve
others: {served} of {count} are served, {refused} are refused with one line, and {broken} do not
start on a CPU even without hisparse. `make test-all PART=models` serves them, and
`scripts/model_table.py` makes this page; do not edit it.

Each family is a tiny model with random weights, in float32 on a CPU. SGLang's `torch_native` and
hisparse answer the same three prompts, with a budget beyond their lengths; *equal* counts the
prompts with the same tokens. Then hisparse answers three prompts of {long_prompts} tokens with a
budget of {budget}; the table says if log-probabilities were not finite. That shows that the code
serves a family, not how well sparse attention suits its real weights ([quality.md](quality.md)).

`torch_native` has no latent attention (MLA) and no sinks, ignores caps of logits, and does not run
EXAONE 4; such families are *not compared*. Tests compare DeepSeek-V2, DeepSeek-V3.2, EXAONE 4,
Gemma 2, GLM-4.7 Flash, GLM-5, gpt-oss, Kimi Linear and Qwen4-Exp with Hugging Face instead."""

_END = """\
## What decides

hisparse serves models whose layers attend causally with MHA, GQA or MLA, over all tokens or a
window, with heads of the same number and width in all layers. It reads that from the layers that
SGLang has built, so a model that is not in the table is served if its layers are. *Fallback*
marks models that SGLang runs with the code of transformers (`--model-impl transformers`). In
bfloat16, tokens differ from those of `torch_native` after a while
([how-it-works.md](how-it-works.md)).

## Models that select by themselves

A model that was trained to attend what it selects is not served with another selection. hisparse
serves two indexers. Bytes are of a token and layer, in bfloat16:

| model | algorithm | host | device |
| --- | --- | --- | --- |
| DeepSeek-V3.2, GLM-5 (DSA) | `dsa` ([deepseek.md](deepseek.md)) | 1,152 | 132 |
| Qwen4-Exp (QSA) | `qsa` | 2,048 | 64, and 1,120 for a request and layer |

For Qwen4-Exp set `page_size` to 4, its `indexer_compress_ratio`, `budget` to its `indexer_budget`,
and `num_sink_pages` and `num_recent_pages` to 0. For prompts of 4 to 8 times the budget, tokens are
those of transformers, in float32 with random weights, retracted requests and two ranks included;
trained weights, images and a GPU have not run. A captured layer launches 16 kernels, and those of a
block's norm and rotation. MTP and `--qsa-indexer-dtype fp8_e4m3` are refused.

hisparse refuses other such models before they load: MiniMax-M3, MiniCPM (InfLLM-V2), DeepSeek-V4,
GLM-5-Next, Qwen2.5-1M, Hunyuan V4 and LongCat. Fields of the configuration tell. `HiSparseCache`
refuses Qwen4-Exp too.

## Hybrids

A hybrid mixes attention with linear attention, convolution or a state space model (Mamba). Only the
layers that attend have K and V in host memory, representations and device pages. SGLang keeps the
states of the other layers on the device: `--max-mamba-cache-size` or `--mamba-full-memory-ratio`
sets the size. `dense_layers` and the label `layer` number layers as the model does.

Qwen3-Next, Kimi Linear and LFM2 give the tokens of transformers. Their other layers run in PyTorch
(`cpu_standins/`): SGLang has them for GPUs and Intel's AMX. Some models, such as LFM2, need
`--disable-radix-cache`.

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
