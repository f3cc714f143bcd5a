"""Stand-in for sgl_kernel.mamba on a CPU-only machine: linear attention of hybrids.

Gated delta rule (https://arxiv.org/abs/2412.06464) and causal convolution, token by token. Letters:
T tokens of all requests, H heads of queries and keys, HV heads of values, K and V their widths, D
channels, W width of a convolution, slots of states. A request continues its slot of the states,
which every function changes in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu, softplus

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]

#: Tokens between two states that SGLang's radix cache may keep.
_CHUNK = 64


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
) -> Tensor:
    """Convolve prompts: ``x [D, T]``, ``weight [D, W]``, ``conv_states [slots, D, W - 1]``."""
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    continues = has_initial_state.tolist()
    for request, slot in enumerate(cache_indices.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        state = conv_states[slot] if continues[request] else torch.zeros_like(conv_states[slot])
        window = torch.cat([state.to(x.dtype), x[:, tokens]], dim=1)
        windows = window.unfold(1, weight.shape[1], 1)
        out[:, tokens] = _activate((windows * weight[:, None]).sum(-1), bias, activation)
        conv_states[slot] = window[:, window.shape[1] - state.shape[1] :]
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one token of each request: ``x [B, D]``."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], dim=-1)
    conv_states[slots] = window[..., 1:].to(conv_states.dtype)
    return _activate((window * weight).sum(-1).T, bias, activation).T


def _activate(x: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    x = x if bias is None else x + bias[:, None]
    return silu(x) if activation in ("silu", "swish") else x


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, None, Tensor]:
    """Linear attention of all tokens: ``q, k [1, T, H, K]``, ``v [1, T, HV, V]`` -> as ``v``.

    ``g, beta [1, T, HV]``: logarithm of the decay, and how much of a value is written. ``g`` may
    have a decay for each channel: ``[1, T, HV, K]``, as in Kimi Linear.
    ``initial_state [slots, HV, V, K]``. The last result ``[1, chunks, HV, V, K]`` is the state
    before each chunk of 64 tokens of each request.
    """
    group = v.shape[2] // q.shape[2]
    queries, keys = (_unit(x[0].float()).repeat_interleave(group, dim=1) for x in (q, k))
    queries = queries * q.shape[-1] ** -0.5
    values, decays, writes = v[0].float(), g[0].float().exp(), beta[0].float()
    decays = decays[:, :, None] if g.ndim == 4 else decays[:, :, None, None]
    out = torch.empty_like(values)
    before_chunks = []
    starts = cu_seqlens.tolist()
    for request, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for t in range(starts[request], starts[request + 1]):
            if (t - starts[request]) % _CHUNK == 0:
                before_chunks.append(state)
            state = state * decays[t]
            missing = values[t] - (state @ keys[t, :, :, None])[..., 0]
            state = state + (missing * writes[t, :, None])[..., None] * keys[t, :, None]
            out[t] = (state @ queries[t, :, :, None])[..., 0]
        initial_state[slot] = state.to(initial_state.dtype)
    return out.to(v.dtype)[None], None, torch.stack(before_chunks)[None]


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Linear attention of one token of each request."""
    decay, write = _fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, _, _ = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        decay,
        write,
        initial_state=initial_state_source,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        initial_state_indices=initial_state_indices,
    )
    return out


# SGLang takes these two from here as it is imported.
for _function in (_fused_gdn_gating_cpu, _fused_sigmoid_gating_delta_rule_update_cpu):
    setattr(torch.ops.sgl_kernel, _function.__name__[1:], _function)
