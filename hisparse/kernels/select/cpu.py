"""Choosing pages in C++."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.select.op import SELECT, SelectRule

__all__ = ["select"]


def select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    invalid_scores: Tensor | None,
    rule: SelectRule,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.select`."""
    mass = -1.0 if rule.mass is None else rule.mass
    within = -1.0 if rule.within is None else rule.within
    return SELECT.on_cpu(
        scores.float().contiguous(),
        num_pages,
        None if forced is None else forced.contiguous(),
        None if rest is None else rest.contiguous(),
        invalid_scores,
        more=(mass, within, rule.drop_last),
        H=rule.heads,
        K=rule.max_pages,
    )
