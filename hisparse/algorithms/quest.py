"""Quest: bound a page's logits by its channel-wise key range. https://arxiv.org/abs/2406.10774"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.page_score import RankedPagesAlgorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import page_score, page_summary
from hisparse.types import KVSpec


@register_algorithm("quest")
@dataclass(frozen=True, kw_only=True)
class Quest(RankedPagesAlgorithm):
    """Keeps the pages with the highest upper bound of q.k (section 3.3 of the paper).

    Attributes:
        ranges: key ranges of a page, each over consecutive tokens. A page's bound is the largest
            bound of its ranges, which is closer than that of the paper's single range. Reduced to
            the greatest common divisor with ``page_size``.
        summary_dtype: dtype of the ranges. Narrow dtypes are rounded outward, so that the bound
            holds; float8_e4m3fn stores a power of two as scale for each range and head. None:
            float8_e4m3fn, or bfloat16 on GPUs without fp8 (before compute capability 8.9).
    """

    store_version: ClassVar[int | None] = 1
    recordable: ClassVar[bool] = True
    captured_launches: ClassVar[int] = 8
    kernels: ClassVar[tuple[str, ...]] = ("page_score", "page_summary")

    ranges: int = 4
    summary_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] | None = None

    def __post_init__(self) -> None:
        if self.ranges < 1:
            raise ValueError(f"ranges: got {self.ranges}, expected at least 1")

    @property
    def _dtype(self) -> torch.dtype:
        if self.summary_dtype is not None:
            dtype: torch.dtype = getattr(torch, self.summary_dtype)
            return dtype
        lacks_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
        return torch.bfloat16 if lacks_fp8 else torch.float8_e4m3fn

    def summary_shape(self, kv: KVSpec) -> tuple[int, int, int]:
        """``[ranges, Hkv, 2 D]`` of one page: maxima of the keys in each channel, then minima."""
        return (math.gcd(self.ranges, kv.page_size), kv.num_kv_heads, 2 * kv.head_dim)

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        shape = self.summary_shape(policy.kv)
        kinds = {"summary": Representation(shape, self._dtype)}
        if self._dtype == torch.float8_e4m3fn:
            kinds["scale"] = Representation(shape[:2], torch.float32)
        return kinds

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        """Write the key ranges of complete pages.

        ``keys [P, S, Hkv, D]``, model's dtype; ``host_pages [P]``, int32 or int64.
        """
        stored = step.representations
        scales = stored["scale"][layer_id] if "scale" in stored else None
        page_summary(keys, stored["summary"][layer_id], host_pages, scales=scales)

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """The bound sum_d max(q_d * high_d, q_d * low_d), maximised over a page's ranges.

        ``query [B, Hq, D]``, model's dtype -> ``[B, Hq, P] float32``; higher is kept.
        """
        stored = step.representations
        table = step.host_page_table[:, : step.max_pages]
        scales = stored["scale"][layer_id] if "scale" in stored else None
        summaries = stored["summary"][layer_id]
        scale = step.policy.scale
        return page_score(query, summaries, table, step.num_pages, scales=scales, scale=scale)
