"""Exact logits of keys where they lie in host memory."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import Arg, Result, check_divides
from hisparse.kernels.operation import Operation
from hisparse.kernels.quantize.op import STORED, LatentRow, check_scales

__all__ = ["HostKeys", "key_score"]


class HostKeys(NamedTuple):
    """Keys as they are stored.

    Attributes:
        k: ``[host pages, Hkv, S, D]``, float32, bfloat16 or float16, or with scales float8_e4m3fn
            or int8; or ``[host pages, 1, S, bytes] uint8``, latents in eight bits. Any strides,
            but D dense.
        scales: ``[host pages, Hkv, S, 2] uint8``, a key's first; None: there are none.
        row: the order of a latent's bytes; None: keys are no such latents.
    """

    k: Tensor
    scales: Tensor | None = None
    row: LatentRow | None = None


def _keys_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    k, row, dim, width = tensors["keys.k"], sizes["row"], sizes["D"], sizes["width"]
    if (k.dtype == torch.uint8) != (row is not None):
        expected = "one" if row is None else "None"
        raise KernelError(f"keys.row: got {row}, expected {expected} for {k.dtype}")
    if row is not None and row.width != dim:
        raise KernelError(f"query: got width {dim}, expected {row.width}, that of the latents")
    if width != (needed := dim if row is None else row.num_bytes):
        raise KernelError(f"keys.k: got width {width}, expected {needed}")
    check_scales("keys.scales", k, tensors["keys.scales"])
    check_divides("keys.k", sizes["Hkv"], sizes["Hq"])


def _score_on_cpu(
    call: Callable[..., Any],
    query: Tensor,
    keys: HostKeys,
    host_page_table: Tensor,
    num_pages: Tensor,
    reduce: str,
    logit_cap: float,
) -> Tensor:
    places = (0, 0, 0, 0) if keys.row is None else keys.row.places
    tensors = (query, keys.k, keys.scales, host_page_table, num_pages)
    scores: Tensor = call(*tensors, reduce == "lse", logit_cap, *places)
    return scores


KEY_SCORE = Operation(
    __name__,
    "key_score",
    Arg("query", "B Hq D", torch.float32, on=("cpu",), layout="all"),
    Arg("keys.k", "N! Hkv S! width", *STORED, torch.uint8, layout="any"),
    Arg("keys.scales", "N Hkv S 2", torch.uint8, optional=True, layout="any"),
    Arg("host_page_table", "B P", torch.int32),
    Arg("num_pages", "B", torch.int32, layout="all"),
    results=(Result(torch.float32, "B Hq P"),),
    values=("row",),
    cpu=_score_on_cpu,
    also=_keys_fit,
)


def key_score(
    query: Tensor,
    keys: HostKeys,
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
        keys: those of the host pool.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        reduce: how a page's S products become its score: "max", the largest, or "lse",
            log-sum-exp.
        logit_cap: the products are capped at first, as in attention with this cap; 0: none.

    Returns:
        ``[B, Hq, P] float32``, higher is kept; -inf beyond a request's pages.
    """
    if reduce not in ("max", "lse"):
        raise KernelError(f"reduce: got {reduce!r}, expected max or lse")
    k, scales, row = keys
    run = KEY_SCORE(impl, query, k, scales, host_page_table, num_pages, values=(row,))
    scores: Tensor = run(query, keys, host_page_table, num_pages, reduce, logit_cap)
    return scores
