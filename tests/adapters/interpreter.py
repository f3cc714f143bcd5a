"""CPU versions of the attention libraries' functions, after the libraries' documentation.

Each function replaces a library's function of the same name. It computes one row and one token at a
time in float32, only from the arguments that the adapter passes, and records the tokens that every
row reads. A row without tokens gets output NaN and lse inf, the worst that a library returns.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Interpreter:
    """Makes the libraries' modules.

    Attributes:
        read: ``page * S + offset`` of the tokens that each row read in the last call, in order.
        num_plans: number of calls of FlashInfer's ``plan``.
    """

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.num_plans = 0

    def modules(self) -> dict[str, Any]:
        """Modules by import name."""
        wrapper = type("Wrapper", (_FlashInferWrapper,), {"interpreter": self})
        return {
            "sgl_kernel.flash_attn": SimpleNamespace(
                flash_attn_with_kvcache=self.flash_attn_with_kvcache
            ),
            "sgl_kernel.flash_mla": SimpleNamespace(
                flashmla_ops=None, flash_mla_sparse_fwd=self.flash_mla_sparse_fwd
            ),
            "flashinfer": SimpleNamespace(
                BatchDecodeWithPagedKVCacheWrapper=wrapper,
                single_prefill_with_kv_cache=single_prefill_with_kv_cache,
            ),
        }

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        qv: Tensor | None = None,
        page_table: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        return_softmax_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """``q [B, T, Q, D]``; the lse is natural, ``[B, Q, T]``."""
        assert return_softmax_lse
        assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
        assert q.dtype == k_cache.dtype == v_cache.dtype
        if page_table is None:
            assert not causal or window_size[1] in (0, -1)
            out, lse = dense(
                q[0], k_cache[0], v_cache[0], softmax_scale, causal, window_size, softcap
            )
            return out[None].to(q.dtype), lse.T[None]
        assert cache_seqlens is not None
        assert page_table.dtype == cache_seqlens.dtype == torch.int32
        assert page_table.stride(-1) == 1
        assert q.shape[1] == 1
        assert not causal
        if qv is not None:
            assert q.shape[-1] <= 64
            q, k_cache = torch.cat([q, qv], -1), torch.cat([k_cache, v_cache], -1)
        size = k_cache.shape[1]
        left, right = window_size
        assert right == (-1 if left < 0 else 0)
        self.read = [
            [
                int(row[token // size]) * size + token % size
                for token in range(max(0, length - 1 - left) if left >= 0 else 0, length)
            ]
            for row, length in zip(page_table, cache_seqlens.tolist(), strict=True)
        ]
        k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        out, lse = attend(q[:, 0], k, v, softmax_scale, self.read, softcap)
        return out[:, None].to(q.dtype), lse[..., None]

    def flash_mla_sparse_fwd(
        self, q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``q [T, Q, 576]``; output, largest logits and lse, both to base 2."""
        assert q.shape[1] in (64, 128)
        assert (q.shape[-1], kv.shape[1:], d_v) == (576, (1, 576), 512)
        assert q.dtype == kv.dtype == torch.bfloat16
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == (q.shape[0], 1)
        assert indices.shape[-1] % 128 == 0
        self.read = [[i for i in row if 0 <= i < len(kv)] for row in indices[:, 0].tolist()]
        out, lse = attend(q, kv, kv[..., :d_v], sm_scale, self.read)
        return out.to(q.dtype), lse.new_full(lse.shape, torch.nan), lse / math.log(2)


class _FlashInferWrapper:
    """``BatchDecodeWithPagedKVCacheWrapper``: planned on the host, run from its buffers."""

    interpreter: Interpreter

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        assert options.pop("use_cuda_graph")
        assert options.pop("use_tensor_cores")
        assert options.pop("backend") == "fa2"
        self._indptr: Tensor = options.pop("paged_kv_indptr_buffer")
        self._indices: Tensor = options.pop("paged_kv_indices_buffer")
        self._last: Tensor = options.pop("paged_kv_last_page_len_buffer")
        assert not options
        # Sizes of flashinfer-python 0.7.2, which also allocates page-locked memory for the plan.
        self._workspace = workspace
        self._plan = torch.empty(8 << 20, dtype=torch.uint8)
        self._queries_indptr = torch.arange(len(self._indptr), dtype=torch.int32)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        *shape: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        logits_soft_cap: float | None,
        window_left: int,
        disable_split_kv: bool,
    ) -> None:
        # With a split the plan would hold only for these lengths.
        assert disable_split_kv
        assert len(indices) <= len(self._indices)
        assert q_data_type == kv_data_type
        self._indptr.copy_(indptr)
        self._indices[: len(indices)] = indices
        self._last.copy_(last_page_len)
        self._shape, self._scale = shape, sm_scale
        self._cap, self._left = logits_soft_cap or 0.0, window_left
        self.interpreter.num_plans += 1

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """Out ``[R, Q, D]`` and lse ``[R, Q]``, to base 2."""
        k, v = paged_kv_cache
        size = k.shape[1]
        assert return_lse
        assert self._shape == (q.shape[1], k.shape[2], q.shape[2], size)
        assert k.stride() == v.stride()
        assert len(q) == len(self._last)
        assert int(self._last.min()) >= 1
        assert int(self._last.max()) <= size
        assert int(self._indptr[0]) == 0
        assert bool((self._indptr.diff() >= 0).all())
        read = []
        for row in range(len(q)):
            pages = self._indices[self._indptr[row] : self._indptr[row + 1]].tolist()
            length = (len(pages) - 1) * size + int(self._last[row]) if pages else 0
            oldest = max(0, length - 1 - self._left) if self._left >= 0 else 0
            read.append([pages[t // size] * size + t % size for t in range(oldest, length)])
        self.interpreter.read = read
        out, lse = attend(q, k.flatten(0, 1), v.flatten(0, 1), self._scale, read, self._cap)
        return out.to(q.dtype), lse / math.log(2)


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    logits_soft_cap: float | None,
    window_left: int,
    backend: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """``q [T, Hq, D]``; the lse is to base 2."""
    assert return_lse
    assert backend == "fa2"
    window, cap = (window_left, -1), logits_soft_cap or 0.0
    out, lse = dense(q, k, v, sm_scale, causal, window, cap)
    return out.to(q.dtype), lse / math.log(2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, read: list[list[int]], cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``q [R, Q, Dk]`` over the tokens ``read`` of ``k, v [tokens, H, D]``."""
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan)
    lse = torch.full(q.shape[:2], torch.inf)
    for row, tokens in enumerate(read):
        if not tokens:
            continue
        assert min(tokens) >= 0
        each = (x[tokens].float() for x in (k, v))
        found = dense(q[row : row + 1], *each, scale, False, cap=cap)
        out[row], lse[row] = (x[0] for x in found)
    return out, lse


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``q [T, Q, Dk]`` over ``k, v [Tk, H, D]``; the lse is natural.

    The last query is the last key's own; ``window``: keys before and after a query's own, -1 for
    all. A library's result for a query without keys is not defined, so here it is an error.
    """
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("tqd,sqd->tqs", q.float(), k) * scale
    logits = cap * (logits / cap).tanh() if cap else logits
    own = torch.arange(len(q))[:, None] + len(k) - len(q)
    left, right = (len(k) + len(q) if side < 0 else side for side in window)
    right = min(right, 0) if causal else right
    distance = torch.arange(len(k)) - own
    hidden = (distance < -left) | (distance > right)
    assert not hidden.all(-1).any()
    logits.masked_fill_(hidden[:, None], -torch.inf)
    return torch.einsum("tqs,sqd->tqd", logits.softmax(-1), v), logits.logsumexp(-1)
