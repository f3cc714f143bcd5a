"""Prefix traces: Mooncake's format is read, SGLang's export converted, wrong lines are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hisparse.errors import ConfigError
from hisparse.trace.prefix import (
    PrefixRequest,
    PrefixTrace,
    convert_sglang,
    read_prefix,
    write_prefix,
)
from tests.command import Command


def trace(*blocks: tuple[int, ...], step_ms: float = 1000) -> PrefixTrace:
    """Requests a step apart, of whole blocks of 10 tokens."""
    requests = [PrefixRequest(step_ms * i, 10 * len(b), 1, b) for i, b in enumerate(blocks)]
    return PrefixTrace(source="recorded", note="", block_size=10, requests=requests)


def test_the_format_of_mooncake_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 700, "output_length": 8, "hash_ids": [46, 47]},
        {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [46, 1, 2]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_prefix(path)
    assert (found.source, found.block_size) == ("as given", 512)
    assert [x.timestamp for x in found.requests] == [0, 3000]
    assert found.requests[1].hash_ids == (46, 47)


def test_ours_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = trace((1, 2, 3), (1, 2), (4,))
    write_prefix(tmp_path / "a.jsonl", made)
    assert read_prefix(tmp_path / "a.jsonl") == made
    assert (tmp_path / "a.jsonl").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot create .*File exists"):
        write_prefix(tmp_path / "a.jsonl", made)


def exported(ids: list[int] | None, text: str | None, time: float) -> str:
    parameters = {"input_ids": ids, "text": text}
    given = {k: v for k, v in parameters.items() if v is not None}
    found = {"completion_tokens": 5, "cached_tokens": 4, "request_received_ts": time}
    return json.dumps({"request_parameters": json.dumps(given)} | found)


def test_what_sglang_exports_becomes_blocks(tmp_path: Path, command: Command) -> None:
    """Equal beginnings get equal numbers, and the text is gone."""
    path = tmp_path / "sglang.log"
    a, b = list(range(9)), [*range(5), 99, *range(6, 9)]
    path.write_text("\n".join([exported(b, None, 12.0), exported(a, None, 10.5)]) + "\n")
    out = str(tmp_path / "a.jsonl")
    assert command("trace", "convert", str(path), "--block-size", "4", "--out", out) == f"{out}\n"
    found = convert_sglang([path], 4, None)
    assert read_prefix(Path(out)) == found
    first, second = found.requests
    assert first == PrefixRequest(0.0, 9, 5, first.hash_ids, 4)
    assert second.timestamp == 1500
    assert len(first.hash_ids) == 2
    assert first.hash_ids[0] == second.hash_ids[0]
    assert first.hash_ids[1] != second.hash_ids[1]
    path.write_text(exported(None, "a b c d e", 1.0))
    assert convert_sglang([path], 2, lambda text: [1] * len(text.split())).requests[0][1] == 5
    with pytest.raises(ConfigError, match="got a text, expected --model"):
        convert_sglang([path], 2, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1: got no hash_ids, input_length"),
        ("[]", "got \\[\\] \\(list\\), expected an object"),
        ('{"format": "other"}', "got format 'other', expected 'hisparse prefix 1'"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "a time and"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}', "a list of"),
        ("", "got no request"),
    ],
)
def test_wrong_lines_are_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_prefix(path)
