"""Which pages every selection has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hisparse.testing.simulator import Simulator


@pytest.mark.parametrize(("sinks", "recents"), [(0, 0), (1, 2), (3, 0), (2, 9)])
def test_sinks_and_recents_are_the_first_and_the_last_full_pages(sinks: int, recents: int) -> None:
    policy = replace(Simulator().policy, num_sink_pages=sinks, num_recent_pages=recents)
    counts = [0, 1, 4, 7, 8]
    forced = policy.forced_pages(torch.tensor(counts, dtype=torch.int32), 8)
    for row, count in zip(forced.tolist(), counts, strict=True):
        pages = list(range(count))
        expected = {*pages[:sinks], *pages[max(0, count - recents) :]}
        assert {page for page, is_forced in enumerate(row) if is_forced} == expected
