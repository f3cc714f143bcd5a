"""docs/models.md from the result of ``scripts/model_table.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["make_page", "outcome"]

_OWN = "hisparse: error: "

_INTRO = """\
# Models

After this page you know which model families hisparse serves from SGLang, and what it says of the others. `make test-all
PART=models` serves them all; the page is generated from its result, so do not edit it.

Each family of the table is a tiny model with random weights, in float32 on a CPU. SGLang's `torch_native` and hisparse
answer the same three prompts at once, with a budget beyond their lengths. The prompts are prefilled in chunks and share a prefix
that hisparse has in the radix cache. *Equal* counts the prompts for which all tokens are the same. Then hisparse answers three
prompts of {long} tokens with a budget of {budget}; *sparse* says whether every log-probability was finite. A random model shows that the
code serves a family, not how well sparse attention suits its real weights: [quality.md](quality.md) has that.

`{served}` of {count} families are served, {refused} are refused with one line before their weights load, and SGLang itself does not start
{broken} on a CPU."""

_END = """\
## What decides

hisparse serves models with causal MHA, GQA or MLA in every layer, with the same number and width of heads in all layers. It reads
that from the layers that SGLang has built, so a model that is not in the table is served if its layers are. Models that SGLang has no
code for run with the code of transformers (`--model-impl transformers`, or by themselves); the table marks them *fallback*.

Refused are {refusals}. [troubleshooting.md](troubleshooting.md) lists the messages.

## Equal in which dtype

In float32 and float16 hisparse gives the tokens of `torch_native` wherever attention is dense. In bfloat16 it does not: both round
sums in their own order, and after some tokens a near tie falls to the other side. [how-it-works.md](how-it-works.md#bfloat16) has
measured figures.

## Add a family

A family is one line of `scripts/model_families.py`: its name, the class of its configuration in transformers, and what differs from
the common shape.

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


def make_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The whole page, as Markdown."""
    served = [row for row in rows if row["hisparse"] == "served"]
    refused = [row for row in rows if outcome(row).startswith("refused")]
    head = _INTRO.format(
        long=800,
        budget=384,
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
    equal = f"{row['equal']} of 3" if "equal" in row else "`torch_native` does not serve it"
    return _line(row["name"], name, "served", equal, "finite" if row["finite"] else "not finite")


def _text(row: Mapping[str, Any]) -> str:
    """Why a family is not served."""
    found, dense = row["hisparse"], row["torch_native"]
    if found.startswith(_OWN):
        return f"refused: {found.removeprefix(_OWN)}"
    return f"SGLang: `{dense if dense != 'served' else found}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
