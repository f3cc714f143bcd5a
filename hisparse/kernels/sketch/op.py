"""Sketches and outlines of pages, a few bytes that approximate all keys of a page, and scores."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg, Result, check_divides
from hisparse.kernels.operation import Implementation, Operation, new_tensors
from hisparse.kernels.quantize.op import STORED, check_scales
from hisparse.kernels.sketch.layout import SketchLayout, outline_bytes
from hisparse.kernels.transfer.op import NewTokens, append_tokens
from hisparse.types import UNSCALED, AttentionRule, StoredKV

__all__ = [
    "SketchLayout",
    "TailPages",
    "outline_bytes",
    "outline_score",
    "page_sketch",
    "scores_new_tokens",
    "sketch_score",
]

_I32, _I64 = torch.int32, torch.int64
#: The most query heads of a KV head whose tail page one block of a GPU scores.
_BLOCK_QUERIES = 16


class TailPages(NamedTuple):
    """Tail pages in the device pool, one a row.

    Attributes:
        kv: ``[N, Hr, S, D]`` pages, see :class:`hisparse.types.StoredKV`.
        pages: ``[R] int32``, the page of each row. The rows of a request lie side by side: one with
            the keys of all heads (Hr = Hkv), or one or more for each KV head (Hr = 1).
        lens: ``[R] int32``, tokens of each page.
        new: the requests' last tokens, if they are not in the pools yet; ``lens`` counts them. The
            operation that gets them writes them.
    """

    kv: StoredKV
    pages: Tensor
    lens: Tensor
    new: NewTokens | None = None

    def appended(self) -> TailPages:
        """The same pages, with the new tokens in them."""
        if self.new is None:
            return self
        k, v, host, host_slots, tail_slots = self.new
        append_tokens(k, v, host, host_slots, self.kv, tail_slots)
        return self._replace(new=None)


#: What there is beside the keys of tail pages, and beside those of new tokens.
_WITH_TAILS = frozenset({
    "tail.pages", "tail.lens", "tail.new.v", "tail.new.host.k", "tail.new.host.v",
    "tail.new.host_slots", "tail.new.tail_slots",
})  # fmt: skip


@functools.cache
def _sizes(layout: SketchLayout) -> tuple[int, ...]:
    """The values of an operation's check."""
    channels, dim = layout.num_channels, layout.dim
    if not 0 <= channels <= dim:
        raise KernelError(f"layout: got {channels} detailed channels, expected 0 to {dim}")
    if layout.bits != 2 and (layout.bits != 4 or layout.numbered or channels != dim):
        raise KernelError(
            f"layout: got codes of {layout.bits} bits, expected 2, or 4 on a CPU for all channels"
        )
    return dim, layout.page_size, layout.num_bytes


def _sketches_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    kv_heads = sizes["Hkv"]
    check_divides("sketches", kv_heads, sizes["Hq"])
    k, scales = tensors["tail.kv.k"], tensors["tail.kv.scales"]
    if k is None:
        return
    for name, tensor in tensors.items():
        beside = "tail.new.k" if name.startswith("tail.new.") else "tail.kv.k"
        if tensor is None and tensors[beside] is not None and name in _WITH_TAILS:
            raise KernelError(f"{name}: got None, expected a tensor, as {beside} is one")
    check_scales("tail.kv.scales", k, scales)
    rows, batch, pool_heads = sizes["R"], sizes["B"], k.shape[1]
    heads = rows // batch if batch else 1
    one_row = heads == 1 and pool_heads == kv_heads
    row_a_head = heads % kv_heads == 0 and pool_heads == 1
    if rows != heads * batch or not (one_row or row_a_head):
        raise KernelError(
            f"tail.pages: got {rows} pages of {pool_heads} heads, expected {batch} pages of "
            f"{kv_heads} heads, or a multiple of {batch * kv_heads} pages of one head"
        )


def _outlines_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    num_bytes = outline_bytes(sizes["D"])
    if sizes["bytes"] != num_bytes:
        got = list(tensors["outlines"].shape)
        raise KernelError(f"outlines: got shape {got}, expected [any, any, {num_bytes}]")
    check_divides("outlines", sizes["Hkv"], sizes["Hq"])


def _tensors_of(tail: TailPages | None) -> tuple[Tensor | None, ...]:
    """As ``SKETCH_SCORE`` declares them."""
    if tail is None:
        return (None,) * 11
    new: tuple[Tensor | None, ...] = (None,) * 6
    if tail.new is not None:
        new = (*tail.new[:2], *tail.new.host.kv, *tail.new[3:])
    return (*tail.kv, tail.pages, tail.lens, *new)


def _score(call: Callable[..., Any], query: Tensor, *more: Any) -> Any:
    """Tail pages in the same call. A GPU rounds q times a detailed channel's scale to 11 bits."""
    *tensors, tail, layout, scale = more
    lse = None
    if tail is not None:
        (lse,) = new_tensors("tail_lse", [(query.shape[:2], torch.float32)], query.device)
    return call(query, *tensors, *_tensors_of(tail), lse, *map(int, layout), scale), lse


def _score_on_cpu(call: Callable[..., Any], *more: Any) -> Any:
    *tensors, tail, layout, scale = more
    if layout.numbered:
        return _for_gpus(SKETCH_SCORE)(*more)
    return _score(call, *tensors, None if tail is None else tail.appended(), layout, scale)


def _sketch_on_cpu(
    call: Callable[..., Any], keys: Tensor, sketches: Tensor, pages: Tensor, layout: SketchLayout
) -> Any:
    if layout.numbered:
        return _for_gpus(PAGE_SKETCH)(keys, sketches, pages, layout)
    return call(keys, sketches, pages, *map(int, layout[2:]))


def _for_gpus(operation: Operation) -> Implementation:
    """What tests of GPUs have on a CPU: C++ reads sketches without numbers alone."""
    reference = operation.lookup("reference")
    assert reference is not None
    return reference


PAGE_SKETCH = Operation(
    __name__,
    "page_sketch",
    Arg("keys", "N S! Hkv D", *FLOATS),
    Arg("sketches", "_ Hkv bytes", torch.uint8, written=True),
    Arg("host_pages", "N", _I32, torch.int64),
    values=("D", "S", "bytes"),
    cpu=_sketch_on_cpu,
)
SKETCH_SCORE = Operation(
    __name__,
    "sketch_score",
    Arg("query", "B Hq D", *FLOATS, layout="all"),
    Arg("sketches", "_! Hkv bytes", torch.uint8, layout="any"),
    Arg("host_page_table", "B P", _I32),
    Arg("num_pages", "B", _I32, layout="all"),
    Arg("tail.kv.k", "N! Hr tail! D", *STORED, optional=True, written=True, layout="any"),
    Arg("tail.kv.v", "N Hr tail Dv", like="tail.kv.k", optional=True, written=True, layout="any"),
    Arg("tail.kv.scales", "N Hr tail 2", torch.uint8, optional=True, layout="any"),
    Arg("tail.pages", "R", _I32, optional=True),
    Arg("tail.lens", "R", _I32, optional=True),
    Arg("tail.new.k", "B Hkv D", like="tail.kv.k", optional=True, layout="any"),
    Arg("tail.new.v", "B Hkv Dv", like="tail.kv.v", optional=True, layout="any"),
    Arg(
        "tail.new.host.k",
        "Ph! Hkv tail D",
        like="tail.kv.k",
        on=(),
        optional=True,
        written=True,
        layout="any",
    ),
    Arg(
        "tail.new.host.v",
        "Ph Hkv tail Dv",
        like="tail.kv.v",
        on=("tail.new.host.k",),
        optional=True,
        written=True,
        layout="any",
    ),
    Arg("tail.new.host_slots", "B", _I64, optional=True),
    Arg("tail.new.tail_slots", "R", _I64, optional=True),
    results=(Result(torch.float32, "B Hq P"),),
    values=("D", "S", "bytes"),
    cpu=_score_on_cpu,
    cuda=_score,
    also=_sketches_fit,
)
OUTLINE_SCORE = Operation(
    __name__,
    "outline_score",
    Arg("query", "B Hq D", torch.float32, layout="all"),
    Arg("outlines", "_! Hkv bytes", torch.uint8, layout="all"),
    Arg("host_page_table", "B P", _I32),
    Arg("num_pages", "B", _I32, layout="all"),
    results=(Result(torch.float32, "B Hq P"),),
    cpu=True,
    also=_outlines_fit,
)


def page_sketch(
    keys: Tensor,
    sketches: Tensor,
    host_pages: Tensor,
    layout: SketchLayout,
    *,
    impl: str = "auto",
) -> None:
    """Store the sketch of each page's keys, from which the page is scored.

    Every channel has one value for the page: the mean of its keys or, for the
    ``layout.num_channels`` channels that vary most, the middle of their range. Those channels
    also have two bits for each token, or all of them four. A page's sketch depends only on its
    keys, and all implementations give the same bytes.

    Args:
        keys: ``[P, S, Hkv, D]``, float32, bfloat16 or float16; any strides.
        sketches: ``[host pages, Hkv, bytes] uint8``, in ``layout``. Written to.
        host_pages: ``[P]`` int32 or int64, entry of ``sketches`` for each page; -1 is skipped,
            and a GPU skips 0 too, the padding page. If an entry stands twice, either page may win.
        layout: of the bytes.
    """
    run = PAGE_SKETCH(impl, keys, sketches, host_pages, values=_sizes(layout))
    run(keys, sketches, host_pages, layout)


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
    *,
    scale: float = 1.0,
    tail: TailPages | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The log of the sum of e^(q.k) over a page's tokens, with k read from the page's sketch.

    C++ rounds the query and the scales of the detailed channels to whole numbers of 8 bits. That
    changes scores by about a tenth of the sketch's own error.

    Args:
        query: ``[B, Hq, D]``, float32, bfloat16 or float16; any strides.
        sketches: ``[host pages, Hkv, bytes] uint8``, from :func:`page_sketch`.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        layout: of the bytes.
        scale: multiplies q.k, such as the softmax scale.
        tail: the requests' tail pages. None: their log-sum-exp is not wanted. New tokens are
            written first; a GPU takes them if :func:`scores_new_tokens` says so.

    Returns:
        scores ``[B, Hq, P] float32``, higher is more attention; those from ``num_pages`` on mean
        nothing. And the log-sum-exp of the logits of the tail page's tokens ``[B, Hq] float32``,
        whose keys are exact; None without ``tail``.
    """
    tensors = (query, sketches, host_page_table, num_pages)
    run = SKETCH_SCORE(impl, *tensors, *_tensors_of(tail), values=_sizes(layout))
    scores, lse = run(*tensors, tail, layout, scale)
    return scores, lse


def scores_new_tokens(query_heads: int, kv_heads: int) -> bool:
    """Whether :func:`sketch_score` writes new tokens of heads in its own launch on a GPU."""
    return query_heads <= _BLOCK_QUERIES * kv_heads


def outline_score(
    query: Tensor,
    outlines: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    impl: str = "auto",
) -> Tensor:
    """q.k of every page, with one k for all tokens of the page, read from its outline.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        outlines: ``[host pages, Hkv, bytes] uint8``, see :func:`outline_bytes`.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.

    Returns:
        ``[B, Hq, P] float32``, higher is kept; scores from ``num_pages`` on mean nothing.
    """
    tensors = (query, outlines, host_page_table, num_pages)
    scores: Tensor = OUTLINE_SCORE(impl, *tensors)(*tensors)
    return scores


def tail_lse(
    query: Tensor,
    tail: TailPages,
    attend: Callable[..., tuple[Tensor, ...]],
    rule: AttentionRule = UNSCALED,
) -> Tensor:
    """Log-sum-exp of the logits of tail pages, by an implementation of attention.

    Args:
        query: ``[B, Hq, D]`` float32, bfloat16 or float16; times the scale unless ``rule`` has it.
        tail: the requests' tail pages.
        attend: an implementation of :func:`hisparse.kernels.paged_attention`.
        rule: scale and cap of the logits.

    Returns:
        ``[B, Hq] float32``, natural logarithm; -inf for an empty page.
    """
    # Attention over a table of one page. Its output is not wanted, but costs little.
    rows = query.reshape(tail.pages.shape[0], -1, query.shape[-1])
    lse = attend(rows, tail.kv, tail.pages[:, None], tail.lens, rule=rule)[1]
    return lse.view(query.shape[:2])
