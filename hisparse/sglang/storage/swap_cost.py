"""Whether reading a retracted request's pages back is faster than computing them again."""

from __future__ import annotations

import logging
import math
import secrets
import time
from dataclasses import dataclass
from typing import Final, Literal

import torch

from hisparse.cache.page_format import PageFormat
from hisparse.sglang.storage.page_storage import PageStorage, Staging
from hisparse.sglang.storage.prefill_rate import LEAST_TOKENS, PrefillRate

__all__ = ["SwapCost", "SwapThreshold", "measure_swap"]

logger = logging.getLogger("hisparse")

#: Of so many measurements the shortest counts; the one before them makes files and memory warm.
_ROUNDS: Final = 3
#: Bytes that each of them moves, or two pages if that is more: the store gives space back late.
_BYTES: Final = 2 * 2**20


@dataclass(frozen=True)
class SwapCost:
    """Seconds that a swap takes: out of the KV pool to the store, and back.

    Attributes:
        request_s: of each request.
        page_s: of each page of SGLang besides.
    """

    request_s: float
    page_s: float

    def min_tokens(self, page_tokens: int, prefill_tokens_per_s: float) -> int | None:
        """The fewest tokens that are swapped faster than computed; None: computing is faster.

        Args:
            page_tokens: tokens of a page of SGLang.
            prefill_tokens_per_s: rate at which they would be computed.
        """
        saved_s = page_tokens / prefill_tokens_per_s - self.page_s
        if saved_s <= 0:
            return None
        return max(1, math.ceil(self.request_s / saved_s)) * page_tokens


def measure_swap(
    storage: PageStorage, page_format: PageFormat, staging: Staging
) -> SwapCost | None:
    """Time the swap of one page, and of some. Nothing of them stays in the store.

    Args:
        storage: the store; calls take as long as it takes.
        page_format: reads the KV pool, whatever is in it.
        staging: memory for the pages.

    Returns:
        None if the store did not take the pages, or not give them back.
    """
    block = staging.take(0)
    assert block is not None, "nothing else has begun yet"
    some = max(2, _BYTES // page_format.record_bytes)
    count = min(some, staging.block_rows, page_format.num_records)

    def shortest(count: int) -> float:
        rows = staging.rows(block, count)
        return min(_swap(storage, page_format, staging, rows) for _ in range(_ROUNDS))

    try:
        _swap(storage, page_format, staging, staging.rows(block, count))
        one_s, all_s = shortest(1), shortest(count)
    finally:
        staging.give(block)
    if not math.isfinite(one_s + all_s):
        return None
    page_s = one_s if count == 1 else max(0.0, all_s - one_s) / (count - 1)
    return SwapCost(max(0.0, one_s - page_s), page_s)


def _swap(storage: PageStorage, page_format: PageFormat, staging: Staging, rows: range) -> float:
    """Seconds in which the first pages of the KV pool are written, and read back; or infinity."""
    pages = torch.arange(len(rows) * page_format.pages_per_record)
    keys = storage.keys([secrets.token_hex(16) for _ in rows])
    began = time.perf_counter()
    page_format.read(pages, staging.data[rows.start : rows.stop, : page_format.record_bytes])
    moved = time.perf_counter()
    try:
        done = storage.put(keys, rows) and all(storage.get(keys, rows))
        ended = time.perf_counter()
    finally:
        storage.remove(keys)
    if not done:
        return math.inf
    # Moving pages into the pool takes as long as out of it, and would overwrite them.
    return ended - began + (moved - began)


class SwapThreshold:
    """The number of tokens from which a retracted request is swapped.

    Args:
        setting: that number, or "auto": from the cost and the rate of prefill.
        cost: of a swap; None: not measured, so that "auto" swaps nothing.
        rate: of prefill.
        page_tokens: tokens of a page of SGLang.
    """

    def __init__(
        self,
        setting: Literal["auto"] | int,
        cost: SwapCost | None,
        rate: PrefillRate,
        page_tokens: int,
    ) -> None:
        self._setting = setting
        self._cost = cost
        self._rate = rate
        self._page_tokens = page_tokens
        self._logged = cost is None or setting != "auto"
        if setting != "auto":
            logger.info(
                "hisparse: storage: retracted requests are swapped from %d tokens on "
                "(swap_min_tokens)",
                setting,
            )
        elif cost is None:
            logger.warning(
                "hisparse: storage: the time of a swap was not measured; retracted requests are "
                "computed"
            )
        else:
            logger.info(
                "hisparse: storage: a swap of a retracted request takes %.2f ms, and %.2f ms for "
                "each page; such requests are computed until a prompt of %d tokens tells the rate "
                "of prefill",
                1000 * cost.request_s,
                1000 * cost.page_s,
                LEAST_TOKENS,
            )

    def reached_by(self, num_tokens: int) -> bool:
        """Whether a retracted request with so many tokens to swap is swapped."""
        if self._setting != "auto":
            return num_tokens >= self._setting
        rate = self._rate.tokens_per_s
        if self._cost is None or rate is None:
            return False
        threshold = self._cost.min_tokens(self._page_tokens, rate)
        return threshold is not None and num_tokens >= threshold

    def log_once(self) -> None:
        """Log the measured threshold as soon as the rate of prefill is known."""
        if self._logged or self._cost is None or (rate := self._rate.tokens_per_s) is None:
            return
        self._logged = True
        threshold = self._cost.min_tokens(self._page_tokens, rate)
        logger.info(
            "hisparse: storage: prefill computes %.0f tokens/s; %s",
            rate,
            "that is faster than a swap, so retracted requests are computed"
            if threshold is None
            else f"retracted requests are swapped from {threshold} tokens on",
        )
