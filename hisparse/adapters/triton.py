"""The project's own Triton kernel, by name; ``torch`` takes it too where it fits best.

The kernel is tested in Triton's interpreter and compiled for sm_80, sm_90 and sm_100; it has not
yet been run on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended
from hisparse.adapters.torch import TorchAdapter
from hisparse.kernels import paged_attention
from hisparse.types import PagedKV, StoredKV

__all__ = ["TritonAdapter"]


@ADAPTERS.register("triton")
class TritonAdapter(TorchAdapter):
    """Decodes with :func:`hisparse.kernels.paged_attention` in Triton, which reads page tables.

    Nothing has to be mapped: the kernel takes rows, strides and lengths as they are, -1 included.
    """

    device_types = ("cuda",)

    @classmethod
    def missing(cls) -> str | None:
        return None if find_spec("triton") else "Triton is not installed"

    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        query = q.float() * scale
        return Attended(*paged_attention(query, kv, page_table, seq_lens, impl="triton"))

    def attend_fp8(
        self, q: Tensor, kv: StoredKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        query = q.float() * scale
        return Attended(*paged_attention(query, kv, page_table, seq_lens, impl="triton"))
