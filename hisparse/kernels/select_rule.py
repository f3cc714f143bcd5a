"""How many pages a selection keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hisparse.errors import KernelError

__all__ = ["SelectRule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectRule:
    """How :func:`hisparse.kernels.select` chooses pages; ``mass`` or ``within``, or neither.

    Attributes:
        heads: H, heads of the selection; the scores' heads are a multiple of H or divide it.
        max_pages: K, pages of a selection at most.
        mass: part of each group's softmax to keep, in (0, 1]; the fewest pages that reach it are
            selected (Twilight, https://arxiv.org/abs/2502.02770).
        within: distance to the head's best score, in units of attention logits, 0 or more; pages
            within it in some head of the group are selected (DIPR,
            https://arxiv.org/abs/2504.10326).
        invalid_scores: ``[1] int64``, on the device of the scores; selections that a NaN or +inf
            may have changed are added to it. None: they are not counted.
        drop_last: the last of a request's pages is ranked with the others and then left out: a
            selection that has it is one page shorter. For scores of all tokens, the last of which
            is attended in any case (DSA).

    Raises:
        KernelError: both ``mass`` and ``within`` are given, or a value is out of range.
    """

    heads: int
    max_pages: int
    mass: float | None = None
    within: float | None = None
    invalid_scores: Tensor | None = field(default=None, compare=False, repr=False)
    drop_last: bool = False

    def __post_init__(self) -> None:
        mass, within = self.mass, self.within
        if self.heads < 1:
            raise KernelError(f"heads: got {self.heads}, expected 1 or more")
        if mass is not None and within is not None:
            raise KernelError(f"got mass {mass} and within {within}, expected one of the two")
        if mass is not None and not 0 < mass <= 1:
            raise KernelError(f"mass: got {mass}, expected more than 0 and at most 1")
        if within is not None and not within >= 0:
            raise KernelError(f"within: got {within}, expected at least 0")
