"""Scores of tokens by a model's own indexer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hisparse.kernels.arguments import FLOATS, Arg
from hisparse.kernels.operation import Operation
from hisparse.kernels.quantize.op import check_scales
from hisparse.types import IndexerInputs

__all__ = ["chunk_index_score", "index_score", "store_index_keys"]

_KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def _scales_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    check_scales("scales", tensors["keys"], tensors["scales"])


#: What scores take: T new tokens, of one prompt or each of another request, and stored keys.
_SCORED = (
    Arg("new.queries", "T Hi Di", *FLOATS),
    Arg("new.keys", "T Di", *FLOATS),
    Arg("new.weights", "T Hi", *FLOATS),
    Arg("keys", "pages! Di", *_KEY_DTYPES),
)
_SCALES = Arg("scales", "pages", torch.float32, optional=True)
INDEX_SCORE = Operation(
    __name__,
    "index_score",
    *_SCORED,
    Arg("host_page_table", "T P", torch.int32),
    Arg("num_pages", "T", torch.int32),
    _SCALES,
    also=_scales_fit,
)
CHUNK_INDEX_SCORE = Operation(
    __name__,
    "chunk_index_score",
    *_SCORED,
    Arg("host_page_table", "P", torch.int32),
    Arg("num_tokens", "T", torch.int32),
    _SCALES,
    also=_scales_fit,
)
STORE_INDEX_KEYS = Operation(
    __name__,
    "store_index_keys",
    Arg("new", "T Di", *FLOATS),
    Arg("keys", "pages Di", *_KEY_DTYPES, written=True),
    Arg("host_pages", "T", torch.int32, torch.int64),
    Arg("scales", "pages", torch.float32, optional=True, written=True, layout="all"),
    also=_scales_fit,
)


def index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    scales: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """DeepSeek-V3.2's index scores of all tokens, ``sum_h weights_h * relu(queries_h . key)``.

    https://arxiv.org/abs/2512.02556, equation 1. Pages have one token. The last token is the new
    one, whose key is not stored yet.

    Args:
        new: inputs of one new token for each of B requests: ``queries [B, Hi, Di]``,
            ``keys [B, Di]`` and ``weights [B, Hi]``, float32, bfloat16 or float16.
        keys: ``[host pages, Di]`` float32, bfloat16 or float8_e4m3fn, from
            :func:`store_index_keys`.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, tokens of each request before the new one; less than P.
        scales: ``[host pages] float32``, factors of the keys. float8_e4m3fn needs them, the other
            dtypes have none.

    Returns:
        ``[B, 1, P] float32``, higher is kept; the new token's score at ``num_pages``; the
        scores after it mean nothing.
    """
    run = INDEX_SCORE(impl, *new, keys, host_page_table, num_pages, scales)
    scores: Tensor = run(new, keys, host_page_table, num_pages, scales)
    return scores


def chunk_index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_tokens: Tensor,
    *,
    scales: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """The scores of :func:`index_score` for tokens of one prompt, whose keys are stored already.

    Args:
        new: inputs of T tokens: ``queries [T, Hi, Di]``, ``keys [T, Di]``, which are not read, and
            ``weights [T, Hi]``, float32, bfloat16 or float16.
        keys: ``[host pages, Di]`` float32, bfloat16 or float8_e4m3fn.
        host_page_table: ``[P] int32``, of all tokens of the prompt.
        num_tokens: ``[T] int32``, tokens that each of the T attends, at most P.
        scales: ``[host pages] float32``, as for :func:`index_score`.

    Returns:
        ``[T, 1, P] float32``, higher is kept; scores from ``num_tokens`` on mean nothing.
    """
    run = CHUNK_INDEX_SCORE(impl, *new, keys, host_page_table, num_tokens, scales)
    scores: Tensor = run(new, keys, host_page_table, num_tokens, scales)
    return scores


def store_index_keys(
    new: Tensor,
    keys: Tensor,
    host_pages: Tensor,
    *,
    scales: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Store keys of a model's own indexer; in eight bits, each has a power of two as scale.

    Args:
        new: ``[T, Di]`` float32, bfloat16 or float16.
        keys: ``[host pages, Di]`` float32, bfloat16 or float8_e4m3fn. Written to.
        host_pages: ``[T]`` int32 or int64, entry of ``keys`` for each token; -1 is skipped, and a
            GPU skips 0 too, the padding page. If an entry stands twice, either token may win.
        scales: ``[host pages] float32``, contiguous, factors of the keys. Written to.
            float8_e4m3fn needs them, the other dtypes have none.
    """
    run = STORE_INDEX_KEYS(impl, new, keys, host_pages, scales)
    run(new, keys, host_pages, scales)
