"""Damaged files at random: each is read, or refused with one line.

``make test-all PART=hostile`` tries 10,000 of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.hostile.mutations import damaged, mutated_object
from tests.hostile.readers import Reader, readers
from tests.sizes import PART

COUNT = 10_000 if PART == "hostile" else 200


def variant(reader: Reader, seed: int) -> bytes:
    """A file that differs from what the reader expects."""
    rng = random.Random(f"{reader.name} {seed}")
    if reader.content[:1] == b"{" and rng.random() < 0.6:
        lines = reader.content.splitlines()
        chosen = rng.randrange(len(lines))
        lines[chosen] = json.dumps(mutated_object(rng, json.loads(lines[chosen]))).encode()
        return b"\n".join(lines) + b"\n"
    return damaged(rng, reader.content)


def test_damaged_files_are_read_or_refused_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, counted = tmp_path / "given", Counter()
    folder.mkdir()
    path = folder / "records.jsonl"  # This reader takes no other name; the others take any.
    all_of_them = readers(tmp_path, capsys)
    total = sum(reader.weight for reader in all_of_them)
    for reader in all_of_them:
        path.write_bytes(reader.content)
        assert reader.line_for(path) is None, f"{reader.name}: the undamaged file is refused"
        for seed in range(COUNT * reader.weight // total + 1):
            content = variant(reader, seed)
            path.write_bytes(content)
            try:
                line = reader.line_for(path)
            except Exception as error:
                pytest.fail(f"{reader.name}, variant {seed}: raises {error!r}")
            assert line is None or ("\n" not in line and len(line) < 1_500), (seed, line)
            counted[f"{reader.name} {'read' if line is None else 'refused'}"] += 1
    with capsys.disabled():
        print(f"\n{counted.total()} damaged files: {dict(counted)}")
