"""Which calls to a store count as late, and which as errors."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hisparse.sglang.features.storage.calls import StorageCounters, StorageHealth, Workers


@pytest.mark.parametrize(
    ("task", "counted"),
    [("raise", "storage_errors"), ("hang", "storage_late_calls")],
)
def test_a_time_limit_of_the_backends_own_is_an_error_of_its(
    task: str, counted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The line in the log must not blame timeout_s for it."""
    counters, workers = StorageCounters(), Workers(1, "test")

    def run() -> Any:
        if task == "raise":
            raise TimeoutError("no answer of 10.0.0.1")
        time.sleep(2)

    assert StorageHealth(counters, 20.0 if task == "raise" else 0.1).call(workers, run) is None
    totals = {name: total for name, total in counters.totals().items() if total}
    assert totals == {counted: 1}
    assert ("10.0.0.1" in caplog.text) == (task == "raise")
    workers.close()
