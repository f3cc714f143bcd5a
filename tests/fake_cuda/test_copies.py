"""Between replays, and while requests begin, grow, verify and end, no copy waits for a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hisparse.types import SelectionScope
from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.engine import FakeEngine, model
from tests.fake_cuda.test_launches import algorithm_of

CONTEXT = 8192
READS = "a prefix is read"
CASES = [
    ("sketch", "GQA", "kv_head"),
    ("quest", "GQA", "layer"),
    ("snapkv", "GQA", "kv_head"),
    ("dsa", "MLA", "layer"),
]


def waits(name: str, kind: str, scope: SelectionScope) -> Iterator[tuple[str, list[str]]]:
    """What happens to requests, and the copies that waited meanwhile."""
    algorithm = algorithm_of(name)
    sizes = algorithm.page_sizes
    # Servers that verify drafts have none.
    extensions = {"tail_estimate": True} if name == "sketch" else {}
    with fake_cuda() as launches:
        engine = FakeEngine(
            launches,
            algorithm,
            model(kind, sizes and sizes[0]),
            scope,
            context=CONTEXT,
            settings={"extensions": extensions},
        )
        coordinator = engine.coordinator
        shareable, _ = coordinator.share_pages()

        def happened(what: str, *launched: str) -> tuple[str, list[str]]:
            assert {x.name for x in launches.all} >= set(launched), what
            found, launches.waits = launches.waits, []
            return what, found

        launches.waits.clear()
        engine.prefill(start=0)
        # SnapKV reads the keys of a prompt once more.
        what = READS if algorithm.query_window else "a request begins"
        yield happened(what, "reset_rows", "rebalance")
        engine.prefill()
        yield happened(READS)
        engine.decode(1025)
        for length in (6000, CONTEXT - 16):
            assert engine.replay(length)
            yield happened("requests grow", "rebalance")
        coordinator.on_pages_replaced(1)
        shareable.set_exact(torch.arange(3))
        assert engine.replay(CONTEXT - 8)
        yield happened("pages are replaced")
        if not extensions:
            engine.verify(CONTEXT - 12, 4, accepted=[0, 1, 2, 3])
            yield happened("drafts are verified")
        coordinator.on_request_end(engine.batch)
        assert engine.replay(CONTEXT - 4, engine.batch - 1)
        yield happened("a request ends", "rebalance")


@pytest.mark.parametrize(("name", "kind", "scope"), CASES)
def test_no_copy_waits(name: str, kind: str, scope: SelectionScope) -> None:
    """But one for each chunk with a prefix: the copy engine takes page numbers in host memory."""
    for what, found in waits(name, kind, scope):
        assert len(found) == (what == READS), (what, found)
