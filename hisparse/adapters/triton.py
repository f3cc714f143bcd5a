"""The project's own Triton kernel. On a GPU, the adapter ``torch`` may use the kernel as well.

The kernel is tested in Triton's interpreter and compiled for sm_80, sm_90 and sm_100; not yet run
on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended
from hisparse.adapters.torch import TorchAdapter
from hisparse.types import AttentionRule, PagedKV


@ADAPTERS.register("triton")
class TritonAdapter(TorchAdapter):
    """Decodes with the Triton version of :func:`hisparse.kernels.paged_attention`.

    The kernel takes queries, page tables, strides and lengths unchanged, entries of -1 included.
    All calls on a device have to run on one stream.
    """

    device_types = ("cuda",)
    impl = "triton"

    @classmethod
    def missing(cls) -> str | None:
        return None if find_spec("triton") else "Triton is not installed"

    def attend_chosen(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, chosen: Tensor
    ) -> Attended:
        # Each query is a row of a step, and each key a page of one token.
        table, lengths = _packed(chosen, k.shape[0])
        kv = PagedKV(k[:, :, None], v[:, :, None])
        return self.attend(q, kv, table, lengths, replace(rule, window=0))


def _packed(chosen: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """``[T, K] int32``, key indices without the padding between them, and how many, ``[T]``."""
    there = (chosen >= 0) & (chosen < num_keys)
    count = chosen.shape[1]
    # In place: of a long prompt these are the largest tensors beside the outputs.
    place = there.cumsum(-1).sub_(1).masked_fill_(~there, count)
    table = chosen.new_full((len(chosen), count + 1), -1).scatter_(1, place, chosen)
    return table[:, :count], there.sum(-1, dtype=torch.int32)
