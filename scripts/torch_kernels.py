"""A plug-in of SGLang's: functions that it has in Triton alone, for a CPU.

Layers beside attention need them: convolutions of LFM2, gates of Qwen3-Next and Qwen2 MoE. Attention
does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["register"]

_CONVOLUTION = "sglang.srt.layers.attention.mamba.causal_conv1d"


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


def register() -> None:
    """Replace SGLang's functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module, function in (
        ("sglang.kernels.ops.attention.fla.fused_norm_gate", rms_norm_gated),
        ("sglang.kernels.ops.elementwise.elementwise", fused_gate_sigmoid_mul_add),
        (_CONVOLUTION, causal_conv1d_fn),
        (_CONVOLUTION, causal_conv1d_update),
    ):
        HookRegistry.register(f"{module}.{function.__name__}", function, HookType.REPLACE)
