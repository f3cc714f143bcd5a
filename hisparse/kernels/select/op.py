"""Choosing pages by their scores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg, Result
from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.operation import Operation
from hisparse.types import Selection

__all__ = ["SelectRule", "select"]

_I32 = torch.int32


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectRule:
    """How :func:`hisparse.kernels.select` chooses pages.

    Attributes:
        heads: H, heads of the selection; the scores' heads are a multiple of H or divide it.
        max_pages: K, pages of a selection at most, 0 or more.
        within: distance to the head's best score, in units of attention logits, 0 or more; pages
            within it in some head of the group are selected (DIPR,
            https://arxiv.org/abs/2504.10326).
        invalid_scores: ``[1] int64``, on the device of the scores; selections that a NaN or +inf
            may have changed are added to it. None: they are not counted.
        drop_last: the last of a request's pages is ranked with the others and then left out: a
            selection that has it is one page shorter. For scores of all tokens, the last of which
            is attended in any case (DSA).

    Raises:
        KernelError: a value is out of range.
    """

    heads: int
    max_pages: int
    within: float | None = None
    invalid_scores: Tensor | None = field(default=None, compare=False, repr=False)
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise KernelError(f"heads: got {self.heads}, expected 1 or more")
        if self.max_pages < 0:
            raise KernelError(f"max_pages: got {self.max_pages}, expected 0 or more")
        if self.within is not None and not self.within >= 0:
            raise KernelError(f"within: got {self.within}, expected at least 0")


def _heads_agree(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    given, heads = sizes["Hs"], sizes["H"]
    if given == 0 or (given % heads and heads % given):
        raise KernelError(f"scores: got {given} heads, expected a multiple or a divisor of {heads}")


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _on_cuda(call: Callable[..., Any], *arguments: Any) -> Any:
    *tensors, rule = arguments
    scores, num_pages = tensors[:2]
    within = -1.0 if rule.within is None else rule.within
    words = call_cuda("select_scratch_words", scores, within, rule.heads)
    scratch = num_pages.new_empty((scores.shape[0], rule.heads, words))
    return call(*tensors, scratch, within, rule.drop_last, rule.heads, rule.max_pages)


SELECT = Operation(
    __name__,
    "select",
    Arg("scores", "B Hs P", *FLOATS, layout="any"),
    Arg("num_pages", "B", _I32),
    Arg("forced", "B P", torch.bool, optional=True, layout="any"),
    Arg("rest", "B Hs", torch.float32, optional=True, layout="any"),
    Arg("invalid_scores", "1", torch.int64, optional=True, written=True, layout="any"),
    results=(Result(_I32, "B H K"), Result(_I32, "B H")),
    values=("H",),
    cpu=lambda call, scores, num_pages, forced, rest, invalid_scores, rule: call(
        scores.float().contiguous(),
        num_pages,
        _dense(forced),
        _dense(rest),
        invalid_scores,
        -1.0 if rule.within is None else rule.within,
        rule.drop_last,
        rule.heads,
        rule.max_pages,
    ),
    cuda=_on_cuda,
    sizes=("H", "K"),
    also=_heads_agree,
)


def select(
    scores: Tensor,
    num_pages: Tensor,
    rule: SelectRule,
    *,
    forced: Tensor | None = None,
    rest: Tensor | None = None,
    impl: str = "auto",
) -> Selection:
    """The forced pages and the best of the others, at most ``rule.max_pages``.

    Heads that share a selection agree on one score per page. Each head's scores become a softmax
    over its pages, and the group's shares are added. So a head with one peak counts as much as a
    head with many high logits; raw sums or maxima do not give that (measured: about a third less
    divergence from dense attention).

    Args:
        scores: ``[B, heads', P]`` in float32, bfloat16 or float16, of any strides, in units of
            attention logits; higher is kept, of equal scores the first. -inf is allowed. NaN and
            +inf are faults, which ``rule.invalid_scores`` counts; they are taken as -inf and as the
            largest number. Entries without a page are ignored.
        num_pages: ``[B] int32``, 0 to P.
        rule: how many pages are kept.
        forced: ``[B, P] bool``, pages that are selected whatever their score, such as
            :attr:`hisparse.algorithms.DecodeStep.forced_pages`. None: there are none.
        rest: ``[B, heads'] float32``, score of the tokens that are attended in any case and are no
            page here, such as the tail page's. They take part in the softmax and in the best
            score. None: there are no such tokens.

    Returns:
        ``[B, H, K] int32`` pages in ascending order, padded with -1. So host reads are sequential,
        and the order of the sum in attention does not depend on the scores.
    """
    tensors = (scores, num_pages, forced, rest, rule.invalid_scores)
    return Selection(*SELECT(impl, *tensors, values=(rule.heads,))(*tensors, rule))
