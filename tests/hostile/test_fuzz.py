"""What the fuzzer counts as a finding, and that its files get past checksums."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.errors import ConfigError
from hisparse.trace import SelectionTrace, adjacent_overlap
from tests.hostile.fuzz import changed, read_checked
from tests.hostile.mutations import damaged
from tests.hostile.readers import Reader
from tests.trace.made import write_trace


def _refuse(line: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        raise ConfigError(line)

    return read


def _key(path: Path) -> object:
    return json.loads(path.read_text())["budget"]


@pytest.mark.parametrize(
    ("read", "finding"),
    [
        (_key, KeyError),
        (_refuse("two\nlines"), AssertionError),
        (_refuse("x" * 2000), AssertionError),
    ],
)
def test_a_finding(
    read: Callable[[Path], object], finding: type[Exception], tmp_path: Path
) -> None:
    reader = Reader(name="test", content=b"{}", read=read)
    with pytest.raises(finding):
        read_checked(reader, tmp_path / "file", b"{ }", io.StringIO())


def test_a_refusal_is_no_finding(tmp_path: Path) -> None:
    reader = Reader(name="test", content=b"{}", read=_refuse("one line"))
    read_checked(reader, tmp_path / "file", b"{ }", io.StringIO())


def test_changed_traces_get_past_their_checksums(tmp_path: Path) -> None:
    """Chunks whose checksums fit reach the code that decodes pages; none breaks it."""
    content, refusals = write_trace(tmp_path / "made").read_bytes(), []

    def read(path: Path) -> None:
        try:
            with SelectionTrace(path) as trace:
                adjacent_overlap(trace)
        except ConfigError as error:
            refusals.append(str(error))
            raise

    reader = Reader(name="test", content=content, read=read)
    for seed in range(300):
        rng = random.Random(seed)
        variant = changed(rng, content, lambda data, rng=rng: damaged(rng, data))
        read_checked(reader, tmp_path / "file", variant, io.StringIO())
    behind = [line for line in refusals if "checksum" not in line]
    # Of the header, the sections, the visits, the lengths and the pages.
    for text in ("header", "section", "range", "length", "does not have"):
        assert any(text in line for line in behind), text
