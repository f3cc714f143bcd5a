"""Events of a server's prefix cache: which blocks it inserted, evicted and cleared, and when.

SGLang publishes them (``--kv-events-config``). A file of ours has one JSON object a line. The first
has ``format``, ``source`` and ``note``; each other one has ``timestamp`` (ms), ``event`` and
``hash_ids``, a number for each block that stands for the block and all tokens before it. An
insertion has ``block_size``, in tokens. No token is kept.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TextIO, TypedDict

from hisparse.errors import ConfigError, quoted
from hisparse.options import check_fields, check_type, parse_object, read_text
from hisparse.private_files import open_private

_FORMAT: Final = "hisparse cache events 1"
_EXAMPLE: Final = '{"timestamp": 0, "event": "evict", "hash_ids": [0]}'
_MOST: Final = 1 << 53
_POLL_MS: Final = 200
#: Types of SGLang's events.
_KINDS: Final = {"BlockStored": "insert", "BlockRemoved": "evict", "AllBlocksCleared": "clear"}


class _About(TypedDict):
    source: Literal["recorded"]
    note: str


class _Line(TypedDict):
    timestamp: float
    event: Literal["insert", "evict", "clear", "lost"]
    hash_ids: list[int]


class CacheEvent(NamedTuple):
    """An event.

    Attributes:
        timestamp: ms.
        event: "insert", "evict", "clear" for all blocks, or "lost" where messages are missing.
        hash_ids: blocks.
        block_size: tokens of an inserted block; None for other events.
    """

    timestamp: float
    event: str
    hash_ids: tuple[int, ...]
    block_size: int | None = None


def is_event_file(path: Path) -> bool:
    """Whether the first line names our format; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return b'"hisparse cache events' in file.read(64)
    except (OSError, ValueError):
        return False


def read_events(path: Path) -> tuple[str, list[CacheEvent]]:
    """The note and the events of a file.

    Raises:
        ConfigError: the file cannot be read, or a line is no event.
    """
    name = repr(str(path))
    lines = [
        (f"{name} line {number}", line)
        for number, line in enumerate(read_text(path, "trace").split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise ConfigError(f"{name}: got no line, expected cache events")
    (where, line), *rest = lines
    about = parse_object(line, where, f'{{"format": "{_FORMAT}", ...}}')
    if about.get("format") != _FORMAT:
        got = quoted(about.get("format"))
        raise ConfigError(f"{where}: got format {got}, expected {_FORMAT!r}")
    check_fields(where, about, _About)
    events = [_read_event(parse_object(line, where, _EXAMPLE), where) for where, line in rest]
    return about["note"], events


def _read_event(found: dict[str, Any], where: str) -> CacheEvent:
    check_fields(where, found, _Line)
    size = found.get("block_size")
    check_type(f"{where}: block_size", size, int if found["event"] == "insert" else type(None))
    if not 0 <= found["timestamp"] < _MOST or not (size is None or 0 < size < 2**31):
        got = quoted([found["timestamp"], size])
        raise ConfigError(f"{where}: got {got}, expected a time from 0 and tokens of a block")
    return CacheEvent(found["timestamp"], found["event"], tuple(found["hash_ids"]), size)


def summarize(events: Sequence[CacheEvent]) -> dict[str, Any]:
    """Counts of blocks, the most tokens held at once, and how long evicted blocks were held."""
    held: dict[int, tuple[float, int]] = {}
    evicted: set[int] = set()
    counts = {"inserted": 0, "evicted": 0, "cleared": 0, "inserted_again": 0, "lost_messages": 0}
    ages, tokens, most = [], 0, 0
    for at, kind, blocks, size in events:
        if kind == "insert" and size is not None:
            for block in blocks:
                counts["inserted"] += 1
                counts["inserted_again"] += block in evicted
                evicted.discard(block)
                if block not in held:
                    tokens += size
                    held[block] = (at, size)
            most = max(most, tokens)
        elif kind == "lost":
            counts["lost_messages"] += 1
        else:
            gone = blocks if kind == "evict" else tuple(held)
            counts["evicted" if kind == "evict" else "cleared"] += len(gone)
            for block in gone:
                if kind == "evict":
                    evicted.add(block)
                if block in held:
                    since, taken = held.pop(block)
                    tokens -= taken
                    if kind == "evict":
                        ages.append((at - since) / 1000)
    seconds = (events[-1].timestamp - events[0].timestamp) / 1000 if events else 0.0
    age = statistics.median(ages) if ages else None
    return counts | {"seconds": seconds, "most_tokens": most, "median_age_s": age}


def record_events(
    endpoint: str,
    path: Path,
    *,
    seconds: float | None = None,
    progress: Callable[[int], None] = lambda _count: None,
) -> int:
    """Write what a server publishes until ``seconds`` have passed or the user interrupts.

    Args:
        endpoint: where the server publishes, such as "tcp://127.0.0.1:5557".
        path: the file, which must be new. Each event is written when it comes.
        seconds: None: no end.
        progress: called with the number of events so far.

    Returns:
        The number of events.

    Raises:
        ConfigError: the address or the file cannot be used, or a message is no batch of events. The
            file then has the events before it, and is removed if there is none.
    """
    try:
        import zmq
    except ImportError:
        raise ConfigError("--kv-events needs pyzmq and msgspec, which SGLang installs") from None

    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--kv-events: got {quoted(endpoint)}: {error}; expected an address such as "
                "tcp://127.0.0.1:5557"
            ) from None
        try:
            fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            file = os.fdopen(fd, "w", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--out: cannot create {str(path)!r}: {getattr(error, 'strerror', None) or error}; "
                "expected a new file in a folder that exists"
            ) from None
        with file:
            about = {"format": _FORMAT, "source": "recorded", "note": f"SGLang, {endpoint}"}
            file.write(json.dumps(about) + "\n")
            writer = _Writer(file)
            end = float("inf") if seconds is None else time.monotonic() + seconds
            try:
                while time.monotonic() < end:
                    if socket.poll(_POLL_MS):
                        writer.write(socket.recv_multipart())
                        progress(writer.count)
            except KeyboardInterrupt:
                pass
            except ConfigError as error:
                if not writer.count:
                    path.unlink()
                    raise
                raise ConfigError(f"{error}; {str(path)!r} has what came before") from None
            return writer.count


class _Writer:
    """Turns SGLang's messages into lines.

    Attributes:
        count: events so far.
    """

    def __init__(self, file: TextIO) -> None:
        self.count = 0
        self._file = file
        self._numbers: dict[int, int] = {}
        self._next: int | None = None
        self._start: float | None = None

    def write(self, frames: Sequence[bytes]) -> None:
        """Write one message: topic, number of the message, and its events.

        Raises:
            ConfigError: it is something else.
        """
        import msgspec

        try:
            _, sequence, payload = frames
            number = int.from_bytes(sequence, "big")
            seconds, events, *_ = msgspec.msgpack.decode(payload)
            if self._start is None:
                self._start = seconds
            at = max(0.0, 1000 * (seconds - self._start))
            if self._next not in (None, number):
                self._line({"timestamp": at, "event": "lost", "hash_ids": []})
            self._next = number + 1
            for event in events:
                self._line({"timestamp": at} | self._converted(event))
        except (ValueError, TypeError, KeyError, AttributeError, msgspec.MsgspecError):
            raise ConfigError(
                "--kv-events: got a message that is no batch of SGLang's KV events; expected the "
                "endpoint of a server's --kv-events-config"
            ) from None
        self._file.flush()

    def _converted(self, event: dict[str, Any]) -> dict[str, Any]:
        hashes = event.get("block_hashes", [])
        blocks = [self._numbers.setdefault(x, len(self._numbers)) for x in hashes]
        found = {"event": _KINDS[event["type"]], "hash_ids": blocks}
        return found | ({"block_size": event["block_size"]} if "block_size" in event else {})

    def _line(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self.count += 1


def describe_events(file: Path) -> dict[str, Any]:
    """What a file of cache events holds."""
    note, events = read_events(file)
    return {"file": str(file), "source": "recorded", "note": note} | summarize(events)
