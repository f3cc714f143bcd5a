"""Compare the selections and the representations of two runs."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import shorten
from hisparse.testing.case import Run
from hisparse.testing.recorder import Trace
from hisparse.testing.simulator import Request
from hisparse.testing.violation import Violation

#: Fraction of the pages that may differ. A different order of summation rounds differently and may
#: swap two pages with nearly equal scores.
_NEAR_TIES = 0.01

#: Fraction of the values of a page that may differ. Rounding may also change a quantised value.
_ROUNDED_CODES = 0.05


def require_same_trace(got: Trace, expected: Trace, when: str, reference: str) -> None:
    """Require the same pages at the same context lengths, near ties aside.

    Raises:
        Violation: too many pages differ; the message shows the first difference.
    """
    if not expected or got.keys() != expected.keys():
        raise Violation(
            f"{when}: got selections at {len(got)} (step, layer) pairs, expected {len(expected)} "
            f"as {reference}, and at least one"
        )
    total = differing = 0
    first = ""
    for where, heads in expected.items():
        for head, (mine, other) in enumerate(zip(got[where], heads, strict=True)):
            total += len(other)
            if mine != other:
                differing += len(set(mine) ^ set(other)) or 1
                first = first or (
                    f"layer {where[1]}, {where[0]} tokens, head {head}: got pages {shorten(mine)}, "
                    f"expected {shorten(other)}"
                )
    if differing > _NEAR_TIES * total:
        raise Violation(f"{when}: {first}, as {reference}")


def page_representations(run: Run, request: Request, num_pages: int) -> dict[str, Tensor]:
    """Page representations of a request's first pages, ``[L, num_pages, *shape]`` by name."""
    pages = torch.tensor(request.host_pages[:num_pages])
    kinds = run.recorder.algorithm.representations(run.sim.policy)
    tensors = run.sim.representations.tensors
    return {name: tensors[name][:, pages] for name, kind in kinds.items() if kind.per == "page"}


def require_same_pages(
    got: dict[str, Tensor], expected: dict[str, Tensor], when: str, reference: str
) -> None:
    """Require the same page representations up to rounding.

    Raises:
        Violation: names the first layer and page that differ.
    """
    for name, other in expected.items():
        differs = ~_close(got[name], other).reshape(*other.shape[:2], -1)
        wrong = differs.float().mean(-1) > _ROUNDED_CODES
        if wrong.any():
            layer, page = wrong.nonzero()[0].tolist()
            raise Violation(
                f"{when}: representation {name!r} of page {page} in layer {layer}: got "
                f"{_head(got[name][layer, page])}, expected {_head(other[layer, page])}, as "
                f"{reference}"
            )


def _close(got: Tensor, expected: Tensor) -> Tensor:
    if not got.dtype.is_floating_point:
        return got == expected
    rtol = max(4 * torch.finfo(got.dtype).eps, 1e-4)
    return torch.isclose(got.float(), expected.float(), rtol=rtol, atol=1e-4)


def _head(entry: Tensor) -> str:
    values = entry.flatten()[:4].tolist()
    shown = ", ".join(f"{x:.4g}" for x in values)
    return f"[{shown}{', ...' if entry.numel() > 4 else ''}]"
