"""From how many tokens on a retracted request is swapped: measured, logged, or set."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend
from test_page_format import fill, make_pool
from test_swap import RemovingBackend

from hisparse.cache.page_format import PageFormat
from hisparse.sglang.storage.page_storage import CHECKSUM_BYTES, PageStorage, Staging
from hisparse.sglang.storage.prefill_rate import LEAST_TOKENS, PrefillRate
from hisparse.sglang.storage.swap_cost import SwapCost, SwapThreshold, measure_swap
from hisparse.storage import Namespace

pytestmark = pytest.mark.filterwarnings("ignore")


class Rate(PrefillRate):
    """A rate of prefill that a test sets."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        super().__init__("cpu")
        self.rate = tokens_per_s

    @property
    def tokens_per_s(self) -> float | None:
        return self.rate


#: 40 ms, and 1 ms for a page of 16 tokens.
COST = SwapCost(0.040, 0.001)


@pytest.mark.parametrize(
    ("rate", "tokens"),
    [
        # A page takes 3.2 ms to compute, which saves 2.2 ms: 19 pages save 40 ms.
        (5000.0, 304),
        (10.0, 16),
        # 16 tokens in 1 ms: as fast as reading.
        (16000.0, None),
        (1e6, None),
    ],
)
def test_a_swap_pays_when_it_saves_more_than_it_costs(rate: float, tokens: int | None) -> None:
    assert COST.min_tokens(16, rate) == tokens


def make_storage(backend: FakeBackend) -> tuple[PageStorage, PageFormat, Staging]:
    pool = make_pool("page_head")
    fill(pool, seed=0)
    form = PageFormat(pool, 8, {})
    staging = Staging(2, 5, form.record_bytes + CHECKSUM_BYTES)
    storage = PageStorage(backend, staging, checksums=True)
    storage.use(
        Namespace(
            model="model",
            kv_dtype=form.describe(),
            page_size=8,
            rank=0,
            num_ranks=1,
            part_bytes=form.part_bytes,
        )
    )
    return storage, form, staging


class SlowBackend(RemovingBackend):
    """2 ms for each record that is read."""

    def get(self, *args: Any, **options: Any) -> Any:
        time.sleep(0.002)
        return super().get(*args, **options)


def test_the_store_is_measured_and_left_empty() -> None:
    backend = SlowBackend()
    storage, form, staging = make_storage(backend)
    cost = measure_swap(storage, form, staging)
    assert cost is not None
    assert cost.request_s + cost.page_s >= 0.002
    assert not backend.records
    assert [staging.take(0) is not None for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("fault", ["refuse", "absent", "flip"])
def test_a_store_that_does_not_work_is_not_measured(fault: str) -> None:
    backend = RemovingBackend()
    backend.fault = fault
    assert measure_swap(*make_storage(backend)) is None


def test_a_set_threshold_needs_no_measurement(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="hisparse"):
        threshold = SwapThreshold(100, None, Rate(), 16)
        threshold.log_once()
    assert [threshold.reached_by(n) for n in (99, 100)] == [False, True]
    assert caplog.messages == [
        "hisparse: storage: retracted requests are swapped from 100 tokens on (swap_min_tokens)"
    ]


def test_the_measured_threshold_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rate = Rate()
    with caplog.at_level("INFO", logger="hisparse"):
        threshold = SwapThreshold("auto", COST, rate, 16)
        threshold.log_once()
        assert not threshold.reached_by(10**6), "the rate of prefill is not known"
        assert len(caplog.messages) == 1
        assert "40.00 ms, and 1.00 ms for each page" in caplog.text
        rate.rate = 5000.0
        threshold.log_once()
        rate.rate = 5001.0
        threshold.log_once()
    assert [threshold.reached_by(n) for n in (303, 304)] == [False, True]
    assert len(caplog.messages) == 2
    assert "5000 tokens/s; retracted requests are swapped from 304 tokens on" in caplog.text
    rate.rate = 1e6
    assert not threshold.reached_by(10**6)


def test_what_was_not_measured_swaps_nothing() -> None:
    assert not SwapThreshold("auto", None, Rate(5000.0), 16).reached_by(10**6)


def test_the_rate_is_that_of_long_prefills() -> None:
    rate = PrefillRate("cpu")
    assert rate.tokens_per_s is None
    rate.begin(LEAST_TOKENS - 1)
    rate.end()
    rate.begin(0)
    rate.end()
    assert rate.tokens_per_s is None
    for _ in range(3):
        rate.begin(LEAST_TOKENS)
        time.sleep(0.01)
        rate.end()
    assert rate.tokens_per_s is not None
    assert 0 < rate.tokens_per_s <= LEAST_TOKENS / 0.01


def test_a_prefill_that_fails_is_not_counted() -> None:
    rate = PrefillRate("cpu")
    rate.begin(LEAST_TOKENS)
    rate.begin(0)
    rate.end()
    assert rate.tokens_per_s is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_by_events() -> None:
    rate = PrefillRate("cuda")
    rate.begin(LEAST_TOKENS)
    torch.cuda._sleep(10_000_000)
    rate.end()
    torch.cuda.synchronize()
    assert rate.tokens_per_s is not None and rate.tokens_per_s > 0
