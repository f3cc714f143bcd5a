"""Attention over pages, and of a chunk of queries over contiguous keys."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg, Result, check_divides
from hisparse.kernels.build.cpu import cpu_library
from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.operation import Operation
from hisparse.kernels.quantize.op import STORED, check_scales
from hisparse.types import UNSCALED, AttentionRule, PagedKV, StoredKV

__all__ = ["HostAttentionCalls", "chunk_attention", "merge_attention", "paged_attention"]


def _pages_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    check_scales("kv.scales", tensors["kv.k"], tensors["kv.scales"])
    rows = sizes["heads"]
    if rows == 1:
        check_divides("kv.k", sizes["Hs"], sizes["Q"])
    elif rows < 1 or sizes["R"] % rows or not sizes["Hs"] or rows % sizes["Hs"]:
        raise KernelError(
            f"heads: got {rows}, expected 1, or a multiple of the {sizes['Hs']} heads of kv.k that "
            f"divides the {sizes['R']} rows"
        )
    elif tensors["query"].device.type != "cpu" or sizes["impl"] == "triton":
        raise KernelError(
            f"heads: got {rows} on {tensors['query'].device} with impl {sizes['impl']!r}, expected "
            "1, because only a CPU attends rows of one head over pages of all, and not by Triton"
        )


def _keys_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    check_divides("k", sizes["Hkv"], sizes["Hq"])
    tokens, keys, first_key = sizes["T"], sizes["Tk"], sizes["first_key"]
    if sizes["causal"] and tokens != keys + first_key:
        raise KernelError(
            f"k: got {keys} keys, expected one for each of {tokens} queries and of {-first_key} "
            "tokens before them"
        )


def _parts_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    if (tensors["other_out"] is None) != (tensors["other_lse"] is None):
        raise KernelError("other_lse: got one of other_out and other_lse, expected both or none")


PAGED_ATTENTION = Operation(
    __name__,
    "paged_attention",
    Arg("query", "R Q Dk", *FLOATS, layout="all"),
    Arg("kv.k", "N! Hs S! Dk", *STORED, layout="any"),
    Arg("kv.v", "N Hs S Dv", like="kv.k", layout="any"),
    Arg("kv.scales", "N Hs S 2", torch.uint8, optional=True, layout="any"),
    Arg("page_table", "R P", torch.int32, layout="any"),
    Arg("seq_lens", "R", torch.int32, layout="any"),
    results=(Result(torch.float32, "R Q Dv"), Result(torch.float32, "R Q")),
    values=("heads", "impl"),
    cpu=lambda call, query, kv, table, seq_lens, rule, heads=1: call(
        query, *kv, table, seq_lens, rule.scale, rule.logit_cap, rule.window, heads
    ),
    also=_pages_fit,
)
CHUNK_ATTENTION = Operation(
    __name__,
    "chunk_attention",
    Arg("query", "T Hq Dk", *FLOATS, layout="all"),
    Arg("k", "Tk Hkv Dk", *FLOATS, layout="any"),
    Arg("v", "Tk Hkv Dv", like="k", layout="any"),
    results=(Result(torch.float32, "T Hq Dv"), Result(torch.float32, "T Hq")),
    values=("causal", "first_key"),
    cpu=lambda call, query, k, v, causal, rule, first_key: call(
        query, k, v, causal, rule.scale, rule.logit_cap, rule.window, first_key
    ),
    also=_keys_fit,
)
MERGE_ATTENTION = Operation(
    __name__,
    "merge_attention",
    Arg("out", "R Q Dv", *FLOATS, layout="any"),
    Arg("lse", "R Q", torch.float32, layout="any"),
    Arg("other_out", "R Q Dv", *FLOATS, optional=True, layout="any"),
    Arg("other_lse", "R Q", torch.float32, optional=True, layout="any"),
    Arg("sinks", "Q", optional=True, layout="any"),
    also=_parts_fit,
)


def paged_attention(
    query: Tensor,
    kv: PagedKV | StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    rule: AttentionRule = UNSCALED,
    heads: int = 1,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend one query token per row over the pages of that row.

    Args:
        query: ``[R, Q, Dk]`` float32, bfloat16 or float16; Q is a multiple of Hs, query heads of
            one KV head side by side.
        kv: ``[N, Hs, S, D]`` pages; float8_e4m3fn or int8 if there are scales, else float32,
            bfloat16 or float16.
        page_table: ``[R, P] int32``, page ids; entries beyond ``seq_lens`` or before the window
            are not read.
        seq_lens: ``[R] int32``, tokens to attend, at most P * S; every page but the last is full.
        rule: scale and cap, which are applied to the logits in float32, and window: a row attends
            only the last ``window`` of its tokens.
        heads: rows of a request. If more than 1, row r attends only head ``r % heads * Hs //
            heads`` of its pages, and Q is any number. On a CPU, not by Triton.

    Returns:
        out ``[R, Q, Dv]``, float32 or, on a GPU, in the query's dtype; and the natural log of the
        sum of exponentials of the logits ``[R, Q] float32``, -inf for a row without tokens. A
        float32 query is attended in float32 throughout.
    """
    stored = StoredKV(*kv)
    run = PAGED_ATTENTION(impl, query, *stored, page_table, seq_lens, values=(heads, impl))
    # Triton's kernel has no such argument.
    more = () if heads == 1 else (heads,)
    out, lse = run(query, stored, page_table, seq_lens, rule, *more)
    return out, lse


class HostAttentionCalls:
    """Makes calls of :func:`paged_attention` on the CPU at places in the order of a CUDA stream.

    A thread of CUDA's driver makes a call, in C++ only: it takes no lock of Python's. If the call
    fails, no row attends anything, and :meth:`raise_error` raises the error. This object and the
    tensors have to outlive the stream's work, and graphs.

    Args:
        heads: as :func:`paged_attention` takes them.
        threads: of a call. Those that PyTorch may start are no measure: SGLang leaves it one.

    Raises:
        KernelError: there are no C++ kernels.
    """

    def __init__(self, heads: int, threads: int) -> None:
        library: Any = cpu_library()
        if library is None:
            raise KernelError("attention in host memory: got no C++ kernels, expected them")
        self._library, self._heads = library, heads
        self._calls = library.make_host_calls(threads)
        finalizer = weakref.finalize(self, library.drop_host_calls, self._calls)
        finalizer.atexit = False  # A stream may still make calls as the process ends.

    def launch(
        self,
        on: Tensor,
        layer_id: int,
        query: Tensor,
        kv: StoredKV,
        page_table: Tensor,
        results: tuple[Tensor, Tensor],
        rule: AttentionRule,
    ) -> None:
        """Put a call into the current stream of a tensor's device, or into a capture there.

        A captured call is kept as long as this object: a graph makes it again. Others are gone
        when they have been made.

        Args:
            on: a tensor of the device.
            layer_id: for the message of an error.
            query, kv, rule: as :func:`paged_attention` takes them, in host memory.
            page_table: ``[R, P] int32``; a row attends the pages before its first -1, which are
                full.
            results: out ``[R, Q, Dv]`` and lse ``[R, Q]``, float32, dense; written to.

        Raises:
            KernelError: a tensor is refused.
        """
        lens, heads = torch.empty(len(page_table), dtype=torch.int32), self._heads
        PAGED_ATTENTION("cpu", query, *kv, page_table, lens, values=(heads, "cpu"))
        keeps = on.is_cuda and torch.cuda.is_current_stream_capturing()
        call = self._library.prepare_attention(
            self._calls, keeps, layer_id, query, *kv, page_table, *results,
            rule.scale, rule.logit_cap, rule.window, heads,
        )  # fmt: skip
        call_cuda("launch_host_call", on, self._library.host_function(keeps), call)

    def raise_error(self) -> None:
        """Raise what went wrong in calls since the last time, if anything did.

        Raises:
            KernelError: one line about the first error, which names the layer.
        """
        if message := str(self._library.take_host_error(self._calls)):
            raise KernelError(message)


def chunk_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    rule: AttentionRule = UNSCALED,
    first_key: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend many query tokens over contiguous keys.

    A prefill calls it once for the chunk itself and once for each tile of the prefix, and merges
    the parts by their log-sum-exp.

    Args:
        query: ``[T, Hq, Dk]`` float32, bfloat16 or float16; Hq is a multiple of Hkv, query heads
            of one KV head side by side.
        k: ``[Tk, Hkv, Dk]`` float32, bfloat16 or float16; any strides, but Dk dense.
        v: ``[Tk, Hkv, Dv]``, dtype and strides as for ``k``.
        causal: query t attends key j only if ``first_key + j <= t``, and the last query is the last
            key's; if False, every query attends all.
        rule: scale and cap, which are applied to the logits in float32, and window: query t attends
            key j only if ``first_key + j > t - window``.
        first_key: position of key 0 less the position of query 0; if ``causal``, T - Tk.

    Returns:
        out ``[T, Hq, Dv]``, float32 or, on a GPU, in the query's dtype; and the natural log of the
        sum of exponentials of the logits ``[T, Hq] float32``, -inf for a query without keys. A
        float32 query is attended in float32 throughout. Weights of bfloat16 queries and keys may
        be rounded to bfloat16, by GPUs and by CPUs with AMX; their sum is not.
    """
    run = CHUNK_ATTENTION(impl, query, k, v, values=(causal, first_key if causal else 0))
    if rule.window and first_key > query.shape[0] - 1 - rule.window:
        # The last query attends key 0: the window hides nothing.
        rule = AttentionRule(rule.scale, rule.logit_cap)
    out, lse = run(query, k, v, causal, rule, first_key)
    return out, lse


def merge_attention(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor | None = None,
    other_lse: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint parts of the keys, by log-sum-exp, and add sinks.

    Args:
        out, other_out: ``[R, Q, Dv]``, float32, bfloat16 or float16, what each part attended; any
            strides. None: there is one part.
        lse, other_lse: ``[R, Q] float32``, natural log-sum-exp of a part's logits; -inf without
            keys.
        sinks: ``[Q]``, any float dtype, a logit without a value for each query head; None: there
            are none.
        dtype: of the merged output, which is computed in float32.

    Returns:
        out ``[R, Q, Dv]``, scaled by the keys' share if there are sinks, 0 without keys; and lse
        ``[R, Q] float32`` of the keys, -inf without any.
    """
    tensors = out, lse, other_out, other_lse, sinks
    merged, total = MERGE_ATTENTION(impl, *tensors)(*tensors, dtype)
    return merged, total
