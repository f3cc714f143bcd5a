"""docs/models.md from the result of ``scripts/model_table.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["make_page", "outcome"]

_OWN = "hisparse: error: "

_INTRO = """\
# Models

After this page you know which model families hisparse serves from SGLang, and what it says of the
others. `make test-all PART=models` serves all of them. The page is made from the newest result of
`scripts/model_table.py` in `bench/results/`; do not edit it.

Each family is a tiny model with random weights, in float32 on a CPU. SGLang's `torch_native` and
hisparse answer the same three prompts at once, with a budget beyond their lengths. hisparse
prefills them in chunks and, except of hybrids, has their common prefix in the radix cache. *Equal*
counts the prompts with the same tokens. Then hisparse answers three prompts of {long_prompts}
tokens with a budget of {budget}; *sparse* says whether all log-probabilities were finite. A random
model shows that the code serves a family, not how well sparse attention suits its real weights:
[quality.md](quality.md) has that for a few models.

{served} of {count} families are served, {refused} are refused with one line, and {broken} do not
start on a CPU with SGLang alone. `torch_native` does not serve latent attention (MLA) and sinks,
ignores caps of logits, and is not accepted for EXAONE 4. Of such models, tests compare DeepSeek-V2,
DeepSeek-V3.2, EXAONE 4, Gemma 2, GLM-4.7 Flash, GLM-5, gpt-oss and Kimi Linear with Hugging Face
(`tests/server/`); the others are served and not compared."""

_END = """\
## What decides

hisparse serves models whose layers attend causally with MHA, GQA or MLA, over all tokens or a
window, with heads of the same number and width in all layers. It reads that from the layers that
SGLang has built, so a model that is not in the table is served if its layers are. Models for which
SGLang has no code of its own run with the code of transformers (`--model-impl transformers`); the
table marks them *fallback*.
[troubleshooting.md](troubleshooting.md) explains each message.

## Hybrids

A hybrid mixes attention with linear attention, convolution or a state space model (Mamba). The
layers that attend get hisparse: only they have K and V in host memory, representations and device
pages, and sizing counts them alone. SGLang keeps the states of the other layers on the device, in
its own pool: `--max-mamba-cache-size` or `--mamba-full-memory-ratio` sets its size.
`dense_layers` and the label `layer` of the metrics number layers as the model does.

Qwen3-Next, Kimi Linear and LFM2 are served, and give the tokens of transformers. A CPU runs their
other layers, and the gate of Qwen2 MoE's shared expert, with functions in PyTorch (`cpu_standins/`,
`scripts/torch_kernels.py`), because SGLang has them for GPUs and Intel's AMX. With these functions
Qwen3-Next and Kimi Linear also ran with the radix cache, which SGLang offers to hybrids on a GPU;
of some models, such as LFM2, it keeps states only with pages of one token, so they need
`--disable-radix-cache`. Falcon H1 and Granite 4 have not run: their Mamba layers need a GPU.

Hybrids are not served together with `storage`, speculative decoding, prefill and decode servers,
`--pp-size` and `--attn-dp-size`. They were not tested with several ranks. `hisparse plan` and
`HiSparseCache` refuse them.

## Equal in which dtype

In float32 hisparse gives the tokens of `torch_native` wherever attention is dense; float16 was not
compared. In bfloat16 the two part after some tokens:
[how-it-works.md](how-it-works.md#tokens-in-bfloat16) has the figures.

## Add a family

A family is one entry of `scripts/model_families.py`: its name, the class of its configuration in
transformers, and what differs from the common shape.

```bash
python -m scripts.model_table build/models.json "My family"
```
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
    table = [
        _line("family", "class in SGLang", "hisparse", "equal", "sparse"),
        _line(*["---"] * 5),
        *(_row(row) for row in rows),
    ]
    return "\n\n".join([head, "\n".join(table), _END])


def _row(row: Mapping[str, Any]) -> str:
    name = f"`{row['architecture']}`"
    if "transformers" in row["flags"]:
        name += ", fallback"
    if row["hisparse"] != "served":
        return _line(row["name"], name, _text(row), "", "")
    equal = f"{row['equal']} of 3" if "equal" in row else "not compared"
    return _line(row["name"], name, "served", equal, "finite" if row["finite"] else "not finite")


def _text(row: Mapping[str, Any]) -> str:
    """Why a family is not served."""
    found, dense = row["hisparse"], row["torch_native"]
    if found.startswith(_OWN):
        return f"refused: {found.removeprefix(_OWN)}"
    return f"SGLang: `{dense if dense != 'served' else found}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
