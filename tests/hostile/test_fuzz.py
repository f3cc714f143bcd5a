"""Traces that are changed inside of the gzip, as the fuzzer makes them."""

from __future__ import annotations

import io
import random
from pathlib import Path

from hisparse.errors import ConfigError
from hisparse.trace import SelectionTrace, adjacent_overlap
from tests.hostile.fuzz import changed, read_checked
from tests.hostile.mutations import damaged
from tests.hostile.readers import Reader
from tests.trace.made import write_trace


def test_changed_traces_get_past_the_gzip(tmp_path: Path) -> None:
    """Changes reach the code that decodes pages; none breaks it."""
    content, refusals = write_trace(tmp_path / "made").read_bytes(), []

    def read(path: Path) -> None:
        try:
            trace = SelectionTrace(path)
            adjacent_overlap(trace)
        except ConfigError as error:
            refusals.append(str(error))
            raise

    reader = Reader(name="test", content=content, read=read)
    for seed in range(300):
        rng = random.Random(seed)
        variant = changed(rng, content, lambda data, rng=rng: damaged(rng, data))
        read_checked(reader, tmp_path / "file", variant, io.StringIO())
    # Of the header, the visits, the pages and the end.
    for text in ("header", "sequence lengths", "the request's", "end"):
        assert any(text in line for line in refusals), text
