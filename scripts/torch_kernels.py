"""A plug-in for SGLang: functions for a CPU that SGLang has only in Triton.

Layers beside attention need them: convolutions of LFM2, linear attention of Kimi Linear, gates of
Qwen3-Next and Qwen2 MoE. The radix cache of hybrids needs copies of states.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_CONVOLUTION = "sglang.srt.layers.attention.mamba.causal_conv1d"
_TRITON_CONVOLUTION = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_QSA = "sglang.srt.layers.attention.qsa"
_KIMI = "sglang.srt.layers.attention.linear.kernels.kda_triton.TritonKDAKernel"


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-6,
    **_: Any,
) -> Tensor:
    """RMS norm over the last dimension, times the gate ``g``, which has the shape of ``x``."""
    gate = g.float().sigmoid() * (1 if activation == "sigmoid" else g.float())
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return ((normed if bias is None else normed + bias) * gate).to(x.dtype)


def _rms_norm_gated(*, x: Tensor, z: Tensor, **options: Any) -> Tensor:
    """:func:`rms_norm_gated` of SGLang's other name, with a gate of the elements of ``x``."""
    return rms_norm_gated(x, z.reshape(x.shape), **options)


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Add the shared expert's output ``[T, D]``, times a gate for each token."""
    gate = (hidden_states @ gate_weight).sigmoid()
    final_hidden_states.add_(gate[:, None] * shared_output)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    **states: Any,
) -> Tensor:
    """Convolve prompts: ``x [D, T]``."""
    from sgl_kernel.mamba import causal_conv1d_fn_cpu

    return causal_conv1d_fn_cpu(
        x, weight, bias, activation=activation, **{"seq_lens_cpu": []} | states
    )


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **states: Any,
) -> Tensor:
    """Convolve one token of each request: ``x [B, D]``."""
    from sgl_kernel.mamba import causal_conv1d_update_cpu

    return causal_conv1d_update_cpu(x, conv_state, weight, bias, activation, **states)


def _delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Linear attention with a decay for each channel: ``q, k, v [1, T, H, K]`` -> as ``v``.

    ``gate`` and ``write`` are raw, with the elements of ``k`` and of its heads. The second result
    is the state before each chunk of 64 tokens.
    """
    from sgl_kernel.mamba import chunk_gated_delta_rule_cpu

    raw = gate.reshape(k.shape).float() + dt_bias.reshape(k.shape[2:])
    out, _, before_chunks = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        -A_log.float().exp().reshape(-1, 1) * torch.nn.functional.softplus(raw),
        write.reshape(k.shape[:3]).float().sigmoid(),
        initial_state=ssm_states,
        cu_seqlens=query_start_loc,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=cache_indices,
    )
    return out, before_chunks


def _kimi_extend(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    return_intermediate_states: bool = False,
    **states: Any,
) -> Any:
    out, before_chunks = _delta_attention(q, k, v, g, beta, **states)
    if track_state is not None and track_chunk_idx is not None:
        chunks = -(-states["query_start_loc"].diff() // 64)
        firsts = chunks.cumsum(0) - chunks
        kept = track_chunk_idx >= 0
        track_state[kept] = before_chunks[0, (firsts + track_chunk_idx)[kept]]
    return (out, before_chunks) if return_intermediate_states else out


def _kimi_decode(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **states: Any
) -> Tensor:
    return _delta_attention(q, k, v, a, b, **states)[0]


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Copy the states of some requests, for the radix cache: pools ``[layers, slots, ...]``."""
    source, target = (x[mamba_track_mask].long() for x in (cache_indices, mamba_track_indices))
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]


def _gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps)
    return (normed * (1 + weight.float())).to(x.dtype)


def _fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def _fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> list[Tensor]:
    heads = ((q, q_weight), (k, k_weight))
    return [_gemma_rms_norm(x.reshape(-1, head_dim), weight, eps) for x, weight in heads]


def _fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> list[Tensor]:
    """``q_gate [T, heads * 2 * D]``: each head's query, then its gate."""
    q, gate = q_gate.unflatten(-1, (num_heads, 2 * head_dim)).chunk(2, dim=-1)
    return [*_fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.flatten(1)]


def _fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> list[Tensor]:
    """Queries, keys and values side by side, gates ``[T, heads, Dv]``, and halves of ``ba``."""
    qkv, z = qkvz.split([2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return [qkv.contiguous(), z.unflatten(-1, (v_heads, v_dim)), b.contiguous(), a.contiguous()]


def _qsa_native(indexer: Any, *args: Any, **options: Any) -> Any:
    """What ``QSAIndexer`` does on every device; SGLang names it for GPUs only."""
    return indexer._forward_impl(*args, **options)


def _gather_qsa_compressed_keys(
    compressed: Tensor,
    token_slot_table: Tensor,
    cu_blocks: Tensor,
    total_blocks: int,
    max_blocks: int,
    compress_ratio: int,
) -> Tensor:
    """Keys of all blocks of all requests, one after the other; see SGLang's function."""
    first = [
        table[: int(count) * compress_ratio : compress_ratio]
        for table, count in zip(token_slot_table, cu_blocks.diff(), strict=True)
    ]
    return compressed[torch.cat(first).long() // compress_ratio]


def _in_dtype_of_model(original: Any, module: Any, config: Any, *args: Any, **options: Any) -> None:
    """Make hyper-connections in the dtype of the model, which is bfloat16 on a GPU."""
    from msgspec.structs import replace

    config = replace(config, params_dtype=torch.get_default_dtype())
    original(module, config, *args, **options)


def register() -> None:
    """Replace SGLang's functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        # SGLang pins tensors of the radix cache of hybrids, which needs an accelerator.
        setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010
    for function in (
        _fused_sigmoid_mul_cpu,
        _fused_qk_gemma_rmsnorm_cpu,
        _fused_qk_gemma_rmsnorm_with_gate_cpu,
        _fused_qkvzba_split_reshape_cat_contiguous_cpu,
    ):
        setattr(torch.ops.sgl_kernel, function.__name__[1:], function)
    HookRegistry.register(
        "sglang.srt.layers.hyperconnection.GatedResidual.__init__",
        _in_dtype_of_model,
        HookType.AROUND,
    )
    # QSA's top-k for a GPU takes 512 or 2,048 blocks; PyTorch's takes any number.
    setattr(import_module(f"{_QSA}.config"), "_COMPRESSED_BLOCK_TOPK", range(1, 2049))  # noqa: B010
    for target, function in (
        ("sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated", rms_norm_gated),
        ("sglang.kernels.ops.attention.fla.layernorm_gated.rms_norm_gated", _rms_norm_gated),
        (
            "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
            fused_gate_sigmoid_mul_add,
        ),
        (f"{_CONVOLUTION}.causal_conv1d_fn", causal_conv1d_fn),
        (f"{_CONVOLUTION}.causal_conv1d_update", causal_conv1d_update),
        (f"{_TRITON_CONVOLUTION}.causal_conv1d_fn", causal_conv1d_fn),
        (
            "sglang.kernels.ops.mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
            track_mamba_states_all_layers,
        ),
        (
            "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
            lambda: True,
        ),
        (f"{_QSA}.qsa_indexer.QSAIndexer._validate_config", lambda config: None),
        (f"{_QSA}.qsa_indexer.QSAIndexer.forward_native", _qsa_native),
        (f"{_QSA}.kernel.gather_qsa_compressed_keys", _gather_qsa_compressed_keys),
        (f"{_KIMI}.extend", _kimi_extend),
        (f"{_KIMI}.decode", _kimi_decode),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)
