"""Quest: bound a page's logits by its channel-wise key range. https://arxiv.org/abs/2406.10774"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.page_score import RankedPagesAlgorithm
from hisparse.algorithms.step import DecodeStep, SelectionPolicy
from hisparse.kernels import page_score, page_summary, round_outward
from hisparse.types import KVSpec

__all__ = ["Quest"]

_FP8_MAX = 448.0
_FP8_LEAST_NORMAL = 2.0**-6


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
        self, keys: Tensor, layer_id: int, host_pages: Tensor, stored: Mapping[str, Tensor]
    ) -> None:
        """Write the key ranges of complete pages."""
        ranges = stored["summary"].shape[2]
        # The kernels treat each range as a separate page.
        summaries, rows = stored["summary"][layer_id].flatten(0, 1), _split(host_pages, ranges)
        keys = keys.unflatten(1, (ranges, -1))
        if "scale" not in stored:
            page_summary(keys.flatten(0, 1), summaries, rows)
            return
        keys = keys.float()
        high, low = keys.amax(2).flatten(0, 1), keys.amin(2).flatten(0, 1)
        largest = torch.maximum(high.abs(), low.abs()).amax(-1, keepdim=True)
        # Scaling by a power of two is exact.
        scale = torch.exp2((largest / _FP8_MAX).log2().ceil().clamp(-100, 100))
        high, low = high / scale, low / scale
        high, low = _outside_subnormals(high, low), -_outside_subnormals(-low, -high)
        high = round_outward(high, summaries.dtype, up=True)
        low = round_outward(low, summaries.dtype, up=False)
        summaries[rows.long()] = torch.cat([high, low], -1)
        stored["scale"][layer_id].flatten(0, 1)[rows.long()] = scale[..., 0]

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """The bound sum_d max(q_d * high_d, q_d * low_d), maximised over a page's ranges."""
        stored = step.representations
        table = step.host_page_table[:, : step.max_pages]
        scales = stored["scale"][layer_id] if "scale" in stored else None
        summaries = stored["summary"][layer_id]
        return page_score(query.float(), summaries, table, step.num_pages, scales=scales)


def _split(host_pages: Tensor, ranges: int) -> Tensor:
    """``[..., P]`` -> ``[..., P * ranges]``: indices of the ranges of host pages."""
    if ranges == 1:
        return host_pages
    index = torch.arange(ranges, dtype=host_pages.dtype, device=host_pages.device)
    return torch.add(index, host_pages[..., None], alpha=ranges).flatten(-2)


def _outside_subnormals(high: Tensor, low: Tensor) -> Tensor:
    """Raise maxima that are subnormal in float8_e4m3fn to its least normal number, or to zero.

    Processors multiply subnormal numbers a hundred times slower. Where the minimum is subnormal as
    well, the maximum stays: that channel's range is tiny, and would grow too much.
    """
    raised = (high.abs() < _FP8_LEAST_NORMAL) & (low.abs() >= _FP8_LEAST_NORMAL)
    return torch.where(raised, _FP8_LEAST_NORMAL * (high > 0), high)
