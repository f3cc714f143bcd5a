"""Events of a prefix cache are recorded as they are published, and summed up."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hisparse.errors import ConfigError
from hisparse.trace.cache_events import CacheEvent, read_events, record_events, summarize
from tests.command import Command

BATCHES: list[list[dict[str, Any]]] = [
    [{"type": "BlockStored", "block_hashes": [-7, 9], "block_size": 16, "token_ids": [1] * 32}],
    [
        {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"},
        {"type": "BlockStored", "block_hashes": [9], "block_size": 16, "token_ids": [1] * 16},
    ],
    [{"type": "AllBlocksCleared"}],
]


def record(path: Path, payloads: list[tuple[int, bytes]], count: int) -> int:
    """Publish messages to a recorder, which is interrupted after some events."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")

        def publish() -> None:
            publisher.recv()  # Somebody listens.
            for number, payload in payloads:
                publisher.send_multipart((b"", number.to_bytes(8, "big"), payload))

        def progress(so_far: int) -> None:
            if so_far >= count:
                raise KeyboardInterrupt

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            return record_events(f"tcp://127.0.0.1:{port}", path, seconds=60, progress=progress)
        finally:
            thread.join()


def test_what_a_server_publishes_is_recorded(tmp_path: Path, command: Command) -> None:
    """Message 3 is missing; no token of a prompt is kept."""
    path = tmp_path / "events.jsonl"
    numbered = zip((1, 2, 4), enumerate(BATCHES), strict=True)
    payloads = [(n, msgspec.msgpack.encode([10.0 + at, batch, 0])) for n, (at, batch) in numbered]
    assert record(path, payloads, 5) == 5
    _, events = read_events(path)
    assert events == [
        CacheEvent(0.0, "insert", (0, 1), 16),
        CacheEvent(1000.0, "evict", (1,)),
        CacheEvent(1000.0, "insert", (1,), 16),
        CacheEvent(2000.0, "lost", ()),
        CacheEvent(2000.0, "clear", ()),
    ]
    assert "token" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    (found,) = command.json("trace", "show", str(path))["traces"]
    counts = {"inserted": 3, "inserted_again": 1, "evicted": 1, "cleared": 2, "lost_messages": 1}
    assert counts.items() <= found.items()
    assert (found["most_tokens"], found["median_age_s"], found["seconds"]) == (32, 1.0, 2.0)
    said = " ".join(command("trace", "show", str(path)).split())
    assert "inserted 3 blocks, 1 of them after it had evicted them, evicted 1 and cleared 2" in said
    assert "Messages are missing in 1 places" in said


@pytest.mark.parametrize(
    "payload", [b"\xc1", b"\x00", msgspec.msgpack.encode([1.0, [{"type": "Other"}]])]
)
def test_messages_of_something_else_are_refused(payload: bytes, tmp_path: Path) -> None:
    path, good = tmp_path / "a", msgspec.msgpack.encode([1.0, BATCHES[0]])
    with pytest.raises(ConfigError, match="no batch of SGLang's KV events"):
        record(path, [(0, payload)], 1)
    assert not path.exists()
    with pytest.raises(ConfigError, match="/a' has what came before$"):
        record(path, [(0, good), (1, payload)], 2)
    assert [event.hash_ids for event in read_events(path)[1]] == [(0, 1)]


def test_blocks_that_are_not_known_count_as_evicted() -> None:
    """A recorder that starts late sees evictions of blocks that it did not see come."""
    found = summarize([CacheEvent(0, "evict", (3,)), CacheEvent(5, "insert", (3,), 16)])
    assert (found["evicted"], found["inserted_again"], found["most_tokens"]) == (1, 1, 16)
    assert found["median_age_s"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-events", "nowhere"], "--kv-events: got 'nowhere'"),
        (["--kv-events", "ipc:///nowhere/a", "--seconds", "1"], "--kv-events: got nothing from"),
        (["--seconds", "1"], "--seconds: expected --kv-events with it"),
        (["--kv-events", "ipc://a", "--budget", "512"], "--budget: got it with --kv-events"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], message: str, tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "a"
    assert message in command.refused("trace", "record", *words, "--out", str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"event": "insert", "hash_ids": [0]}, "timestamp"),
        ({"timestamp": -1, "event": "clear", "hash_ids": []}, "expected a time from 0"),
        ({"timestamp": 0, "event": "other", "hash_ids": []}, "event"),
        ({"timestamp": 0, "event": "insert", "hash_ids": [0]}, "block_size"),
        (
            {"timestamp": 0, "event": "insert", "hash_ids": [0], "block_size": 0},
            "tokens of a block",
        ),
    ],
)
def test_damaged_files_are_refused(line: dict[str, Any], message: str, tmp_path: Path) -> None:
    about = {"format": "hisparse cache events 1", "source": "recorded", "note": ""}
    path = tmp_path / "a"
    path.write_text(json.dumps(about) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_events(path)
