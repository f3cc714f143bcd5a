"""The adapters of hisparse's own kernels: ``torch`` (the fastest that can run) and ``triton``."""

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended, BackendAdapter, DeviceLimits
from hisparse.kernels import chunk_attention, operation, paged_attention
from hisparse.types import AttentionRule, KVSpec, PagedKV, Pages, SelectionScope
from hisparse.units import format_bytes


@ADAPTERS.register("torch")
class TorchAdapter(BackendAdapter):
    """Prefills and decodes with the project's kernels, or PyTorch where there are none."""

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

    def attend_chosen(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, chosen: Tensor
    ) -> Attended:
        if self.impl == "auto" and (not q.is_cuda or operation.why_no_triton()):
            return super().attend_chosen(q, k, v, rule, chosen)
        kv, table, lengths = as_rows(k, v, chosen)
        # Not a subclass's attention over pages: a library may refuse pages of one token.
        return TorchAdapter.attend(self, q, kv, table, lengths, replace(rule, window=0))


@ADAPTERS.register("triton")
class TritonAdapter(TorchAdapter):
    """Decodes with the Triton version of :func:`hisparse.kernels.paged_attention`.

    The kernel takes queries, page tables, strides and lengths unchanged, entries of -1 included.
    All calls on a device have to run on one stream. ``torch`` may use the kernel on a GPU as well.
    """

    device_types = ("cuda",)
    impl = "triton"

    @classmethod
    def missing(cls) -> str | None:
        return None if find_spec("triton") else "Triton is not installed"


def as_rows(k: Tensor, v: Tensor, chosen: Tensor) -> tuple[PagedKV, Tensor, Tensor]:
    """Each query as a row of a step, and each key as a page of one token.

    Args:
        k, v, chosen: as for :meth:`BackendAdapter.attend_chosen`.

    Returns:
        pages ``[Tk, Hkv, 1, D]``, views; key indices without the padding between them ``[T, K]``;
        and how many, ``[T] int32``.
    """
    there = (chosen >= 0) & (chosen < len(k))
    # In place: of a long prompt these are the largest tensors beside the outputs. Padding goes to
    # a column before the first.
    place = there.cumsum(-1).mul_(there)
    table = chosen.new_full((len(chosen), chosen.shape[1] + 1), -1).scatter_(1, place, chosen)
    lengths = there.sum(-1, dtype=torch.int32)
    return PagedKV(k[:, :, None], v[:, :, None]), table[:, 1:], lengths


def attention_shared_bytes(kv: KVSpec) -> int:
    """Shared memory of a block of Triton's attention, as compiled for a GPU that has little.

    The largest of heads up to 256 wide, or that of latents of 512 and 64; decode and prefill.
    """
    float32 = kv.dtype == torch.float32
    if kv.attention == "MLA":
        return 112_768 if float32 else 75_776
    return 51_328 if float32 else 74_752
