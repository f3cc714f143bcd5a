"""The adapter that needs only PyTorch. It uses compiled kernels if they are available."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended, BackendAdapter, DeviceLimits
from hisparse.kernels import chunk_attention, paged_attention
from hisparse.types import AttentionRule, KVSpec, Pages, SelectionScope
from hisparse.units import format_bytes


@ADAPTERS.register("torch")
class TorchAdapter(BackendAdapter):
    """Prefills and decodes with the project's kernels."""

    scaled = True
    logit_cap = True
    window = True
    scopes: tuple[SelectionScope, ...] = ("kv_head", "layer", "query_head")
    #: Implementation of :func:`hisparse.kernels.paged_attention`.
    impl: str = "auto"

    @classmethod
    def device_refused(cls, kv: KVSpec, device: DeviceLimits) -> str | None:
        needed = attention_shared_bytes(kv)
        # Without Triton, PyTorch's operators attend; they take little shared memory.
        if needed <= device.shared_bytes or find_spec("triton") is None:
            return None
        return (
            f"needs {format_bytes(needed)} of shared memory for {kv.attention} in "
            f"{str(kv.dtype).removeprefix('torch.')}, {device.name} has "
            f"{format_bytes(device.shared_bytes)}"
        )

    def attend(
        self, q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        return Attended(*paged_attention(q, kv, page_table, seq_lens, rule=rule, impl=self.impl))

    def attend_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        *,
        causal: bool,
        first_key: int = 0,
    ) -> Attended:
        return Attended(*chunk_attention(q, k, v, causal=causal, rule=rule, first_key=first_key))


def attention_shared_bytes(kv: KVSpec) -> int:
    """Shared memory of a block of Triton's attention, as compiled for a GPU that has little.

    The largest of heads up to 256 wide, or that of latents of 512 and 64; decode and prefill.
    """
    float32 = kv.dtype == torch.float32
    if kv.attention == "MLA":
        return 112_768 if float32 else 75_776
    return 51_328 if float32 else 74_752
