"""The project's own Triton kernel. On a GPU, the adapter ``torch`` may use the kernel as well.

The kernel is tested in Triton's interpreter and compiled for sm_80, sm_90 and sm_100; not yet run
on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec

from hisparse.adapters.base import ADAPTERS
from hisparse.adapters.torch import TorchAdapter


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
