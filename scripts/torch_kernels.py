"""A plug-in for SGLang: functions for a CPU that SGLang has only in Triton.

Layers beside attention need them: convolutions of LFM2, linear attention of Kimi Linear, gates of
Qwen3-Next and Qwen2 MoE. The radix cache of hybrids needs copies of states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CONVOLUTION = "sglang.srt.layers.attention.mamba.causal_conv1d"
_TRITON_CONVOLUTION = "sglang.kernels.ops.mamba.causal_conv1d_triton"
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


def register() -> None:
    """Replace SGLang's functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        # SGLang pins tensors of the radix cache of hybrids, which needs an accelerator.
        setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010
    for target, function in (
        ("sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated", rms_norm_gated),
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
        (f"{_KIMI}.extend", _kimi_extend),
        (f"{_KIMI}.decode", _kimi_decode),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)
