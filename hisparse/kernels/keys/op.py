"""Exact logits of keys where they lie in host memory."""

from typing import Literal

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg, Result, check_divides
from hisparse.kernels.operation import Operation

__all__ = ["key_score"]


KEY_SCORE = Operation(
    __name__,
    "key_score",
    Arg("query", torch.float32, "B Hq D", on=("cpu",), layout="all"),
    Arg("keys", FLOATS, "_ Hkv _ D", layout="any"),
    Arg("host_page_table", torch.int32, "B P"),
    Arg("num_pages", torch.int32, "B", layout="all"),
    results=(Result(torch.float32, "B Hq P"),),
    cpu=lambda call, query, keys, host_page_table, num_pages, reduce, logit_cap: call(
        query, keys, host_page_table, num_pages, reduce == "lse", logit_cap
    ),
    also=lambda tensors, sizes: check_divides("keys", sizes["Hkv"], sizes["Hq"]),
)


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    reduce: Literal["max", "lse"] = "max",
    logit_cap: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Score pages by their exact q.k, from keys where they lie in host memory.

    A page's score depends on nothing but its keys and the query. CPU only.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        keys: ``[host pages, Hkv, S, D]``, float32, bfloat16 or float16; any strides, but D dense.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        reduce: how a page's S products become its score: "max", the largest, or "lse",
            log-sum-exp.
        logit_cap: the products are capped at first, as in attention with this cap; 0: none.

    Returns:
        ``[B, Hq, P] float32``, -inf beyond a request's pages.

    Raises:
        KernelError: a page is not in the pool.
    """
    if reduce not in ("max", "lse"):
        raise KernelError(f"reduce: got {reduce!r}, expected max or lse")
    tensors = (query, keys, host_page_table, num_pages)
    scores: Tensor = KEY_SCORE(impl, *tensors)(*tensors, reduce, logit_cap)
    return scores
