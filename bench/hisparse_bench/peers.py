"""Other implementations of the same work, timed in the same run where they can run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.adapters.libraries import import_function
from hisparse.errors import one_line
from hisparse.types import PagedKV


def reason_to_leave_out(check: Callable[[], bool]) -> str:
    """Why a peer is left out of a benchmark; "" if it runs and agrees.

    Args:
        check: runs the peer once and compares its results.
    """
    try:
        return "" if check() else "its results differ"
    except ImportError:
        return "not installed"
    except Exception as error:  # A peer that fails must not stop the benchmark of the others.
        return one_line(error)


_WORKSPACE_BYTES = 256 << 20
#: Tokens of a page of FlashMLA.
_FLASH_MLA_PAGE = 64


def as_pages(kv: PagedKV, page_size: int) -> PagedKV:
    """``[B, Hkv, S, D]`` as ``[B * P, page, Hkv, D]``: a request's pages one after the other."""
    kv_heads, width = kv.k.shape[1], kv.k.shape[3]
    shape = (-1, page_size, kv_heads, width)
    return PagedKV(*(x.transpose(1, 2).reshape(shape).contiguous() for x in kv))


def flashinfer_decode(
    pages: PagedKV, batch: int, q_heads: int, scale: float, *, tensor_cores: bool
) -> Callable[[Tensor], Tensor]:
    """A function ``q [B, Hq, D] -> [B, Hq, D]`` over whole contexts; CUDA only.

    The benchmark compares its output with SDPA's and leaves it out if they differ.

    Args:
        pages: ``[B * P, page, Hkv, D]``, from :func:`as_pages`.
        batch: B.
        q_heads: Hq.
        scale: softmax scale.
        tensor_cores: whether queries that share a KV head are multiplied as a matrix.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    count, page_size, kv_heads, width = pages.k.shape
    device, dtype = pages.k.device, pages.k.dtype
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * (count // batch)
    indices = torch.arange(count, dtype=torch.int32, device=device)
    full = torch.full((batch,), page_size, dtype=torch.int32, device=device)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        ends,
        indices,
        full,
        q_heads,
        kv_heads,
        width,
        page_size,
        sm_scale=scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    return lambda q: wrapper.run(q, tuple(pages))


def flash_attention_decode(kv: PagedKV, scale: float) -> Callable[[Tensor], Tensor]:
    """FlashAttention 3: a function ``q [B, Hq, D] -> [B, Hq, D]`` over whole contexts; CUDA only.

    It reads K and V that are contiguous, so it need not look pages up.

    Args:
        kv: ``[B, Hkv, S, D]``, bfloat16 or float16.
        scale: softmax scale.

    Raises:
        ImportError: FlashAttention 3 is not installed.
    """
    modules = ("sgl_kernel.flash_attn", "flash_attn_interface", "fa3_fwd_interface")
    found = import_function("flash_attn_with_kvcache", *modules)
    if isinstance(found, str):
        raise ImportError(found)
    keys, values = (x.transpose(1, 2) for x in kv)
    length = torch.full((len(keys),), keys.shape[1], dtype=torch.int32, device=keys.device)
    options = {"cache_seqlens": length, "softmax_scale": scale}
    return lambda q: found(q[:, None], keys, values, **options)[:, 0]


def flash_mla_decode(kv: PagedKV, scale: float) -> Callable[[Tensor], Tensor]:
    """FlashMLA's dense kernel: a function ``q [B, Hq, Dk] -> [B, Hq, Dv]`` over whole contexts.

    CUDA only.

    Args:
        kv: ``[B, 1, S, D]`` bfloat16; values are the first columns of the keys, S a multiple of 64.
        scale: softmax scale.

    Raises:
        ImportError: FlashMLA is not installed.
        ValueError: S is no multiple of 64.
    """
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    batch, _, length, width = kv.k.shape
    if length % _FLASH_MLA_PAGE:
        raise ValueError(f"got {length} tokens, expected a multiple of {_FLASH_MLA_PAGE}")
    pages = kv.k.view(-1, _FLASH_MLA_PAGE, 1, width)
    device, per_request = kv.k.device, length // _FLASH_MLA_PAGE
    table = torch.arange(len(pages), dtype=torch.int32, device=device).view(batch, per_request)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    plan = get_mla_metadata()[0]
    options = {"softmax_scale": scale, "use_legacy": True}

    def decode(q: Tensor) -> Tensor:
        given = (q[:, None], pages, table, lengths, kv.v.shape[-1], plan)
        out: Tensor = flash_mla_with_kvcache(*given, **options)[0]
        return out[:, 0]

    return decode


def fused_swap_in(
    host: Tensor, table: Tensor, width: int, slots: int
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from ``selection [R, K] int32`` to buffer rows ``[R, K]`` and the device buffer.

    SGLang's own HiSparse: one fused kernel for bookkeeping and copies; CUDA only. Written after
    SGLang 0.5.23's coordinator. The benchmark compares the pages that it loads with the host pool
    and leaves it out if they differ. Its first run on a GPU ended with an illegal instruction, of
    this kernel or of hisparse's.

    Args:
        host: ``[tokens, row bytes] uint8``, pinned.
        table: ``[R, P] int32``, host row of each token, on the device.
        width: K.
        slots: device slots of each request, without the one for the newest token.

    Raises:
        ImportError: SGLang is not installed, or has no such kernel.
    """
    from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_mla

    rows, context = table.shape
    device, row_bytes = table.device, host.shape[1]
    held = torch.full((rows, slots + 1), -1, dtype=torch.int32, device=device)
    places = torch.arange(rows * (slots + 1), dtype=torch.int32, device=device).view_as(held)
    order = torch.arange(slots, dtype=torch.int16, device=device).repeat(rows, 1)
    buffer = torch.zeros(rows * (slots + 1), row_bytes, dtype=torch.uint8, device=device)
    found = torch.full((rows, width), -1, dtype=torch.int32, device=device)
    host_rows, requests = table.long(), torch.arange(rows, device=device)
    # Longer than the buffer, and so long that no selected token is the newest.
    lengths = torch.full((rows,), max(context, slots) + 2, dtype=torch.int64, device=device)
    real = torch.full((1,), rows, dtype=torch.int32, device=device)

    def swap_in(selection: Tensor) -> tuple[Tensor, Tensor]:
        load_cache_to_device_buffer_mla(
            top_k_tokens=selection,
            device_buffer_tokens=held,
            host_cache_locs=host_rows,
            device_buffer_locs=places,
            host_cache=host,
            device_buffer=buffer,
            top_k_device_locs=found,
            req_pool_indices=requests,
            seq_lens=lengths,
            lru_slots=order,
            item_size_bytes=row_bytes,
            num_top_k=width,
            hot_buffer_size=slots,
            num_real_reqs=real,
        )
        return found, buffer

    return swap_in


def torch_native_decode(
    kv: PagedKV, seq_lens: Tensor, scale: float
) -> Callable[[Tensor], Tensor] | None:
    """A function ``q [B, Hq, D] -> [B, Hq, D]``; None if SGLang is not installed.

    Args:
        kv: ``[B, Hkv, S, D]``, S the longest context.
        seq_lens: ``[B] int64``, tokens of each context.
        scale: softmax scale.
    """
    try:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    except ImportError:
        return None
    # The method uses only its arguments, so the backend needs no server.
    backend = object.__new__(TorchNativeAttnBackend)
    batch, kv_heads, longest, _ = kv.k.shape
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in kv)
    req_to_token = torch.arange(batch * longest).view(batch, longest)
    requests = torch.arange(batch)

    def decode(q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        backend._run_sdpa_forward_decode(
            q,
            out,
            keys,
            values,
            req_to_token,
            requests,
            seq_lens,
            scaling=scale,
            enable_gqa=q.shape[1] != kv_heads,
        )
        return out

    return decode
