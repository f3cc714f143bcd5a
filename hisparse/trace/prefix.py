"""Prefix traces: which blocks of tokens each request shares with earlier ones, and their replay.

The format is Mooncake's: one JSON object a line with ``timestamp`` (ms), ``input_length``,
``output_length`` and ``hash_ids``, a number for each block of the prompt that stands for the block
and all tokens before it. A block has 512 tokens. Our files begin with a line that names the block
size and says where the trace is from, and may have ``cached_length``: tokens that a server found.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

from hisparse.errors import ConfigError, quoted
from hisparse.options import check_fields, check_type, matches, parse_object, read_text
from hisparse.private_files import open_private

FORMAT: Final = "hisparse prefix 1"
#: Tokens of a block in Mooncake's traces.
_MOONCAKE_BLOCK: Final = 512
_EXAMPLE: Final = '{"timestamp": 0, "input_length": 512, "output_length": 8, "hash_ids": [0]}'
_MOST: Final = 1 << 53


class _About(TypedDict):
    source: str
    note: str
    block_size: int


class _Line(TypedDict):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class PrefixRequest(NamedTuple):
    """A request.

    Attributes:
        timestamp: ms.
        input_length, output_length: tokens.
        hash_ids: blocks of the prompt.
        cached_length: tokens that a server found; None: not known.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    cached_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class PrefixTrace:
    """Requests in the order of time.

    Attributes:
        source: "recorded" from a server, or "as given" for a file without our first line.
        note: text about the source.
        block_size: tokens.
        requests: the requests.
    """

    source: str
    note: str
    block_size: int
    requests: Sequence[PrefixRequest]


def read_prefix(path: Path) -> PrefixTrace:
    """Read a prefix trace, ours or Mooncake's.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request.
    """
    name = repr(str(path))
    lines = read_text(path, "trace").split("\n")
    objects = [
        (number, parse_object(line, f"{name} line {number}", _EXAMPLE))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    about: dict[str, Any] = {"source": "as given", "note": "", "block_size": _MOONCAKE_BLOCK}
    if objects and "format" in objects[0][1]:
        number, first = objects.pop(0)
        about = _read_about(first, f"{name} line {number}")
    requests = [_read_request(found, f"{name} line {number}") for number, found in objects]
    if not requests:
        raise ConfigError(f"{name}: got no request, expected lines such as {_EXAMPLE}")
    requests.sort(key=lambda request: request.timestamp)
    return PrefixTrace(requests=requests, **about)


def _read_about(found: dict[str, Any], where: str) -> dict[str, Any]:
    if found["format"] != FORMAT:
        raise ConfigError(f"{where}: got format {quoted(found['format'])}, expected {FORMAT!r}")
    check_fields(where, found, _About)
    if not 0 < found["block_size"] < 2**31:
        got = quoted(found["block_size"])
        raise ConfigError(f"{where}: block_size: got {got}, expected a number of tokens")
    return {name: found[name] for name in ("source", "note", "block_size")}


def _read_request(found: dict[str, Any], where: str) -> PrefixRequest:
    check_fields(where, found, _Line)
    check_type(f"{where}: cached_length", found.get("cached_length"), int | None)
    request = PrefixRequest(
        found["timestamp"],
        found["input_length"],
        found["output_length"],
        tuple(found["hash_ids"]),
        found.get("cached_length"),
    )
    if not all(0 <= x < _MOST for x in (*request[:3], request.cached_length or 0)):
        got = quoted(request[:3])
        raise ConfigError(f"{where}: got {got}, expected a time and lengths from 0 to 2**53")
    return request


def write_prefix(path: Path, trace: PrefixTrace) -> None:
    """Write a prefix trace.

    Raises:
        ConfigError: the file exists or cannot be created.
    """
    about = {k: v for k, v in asdict(trace).items() if k != "requests"}
    try:
        with open(path, "x", encoding="utf-8", opener=open_private) as file:
            file.write(json.dumps({"format": FORMAT} | about) + "\n")
            for request in trace.requests:
                line = {k: v for k, v in request._asdict().items() if v is not None}
                file.write(json.dumps(line) + "\n")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--out: cannot create {str(path)!r}: {getattr(error, 'strerror', None) or error}; "
            "expected a new file in a folder that exists"
        ) from None


def convert_sglang(
    files: Iterable[Path], block_size: int, tokenize: Callable[[str], list[int]] | None
) -> PrefixTrace:
    """Make a prefix trace of what a server wrote with ``--export-metrics-to-file``.

    Tokens are replaced by numbers of blocks, and no text is kept.

    Args:
        files: the server's files.
        block_size: tokens.
        tokenize: turns the text of requests without token ids into token ids; None: there are none.

    Raises:
        ConfigError: a file cannot be read, or a line is not a request.
    """
    numbers: dict[bytes, int] = {}
    requests = []
    for path in files:
        for number, line in enumerate(read_text(path, "FILE").split("\n"), 1):
            if line.strip():
                where = f"{str(path)!r} line {number}"
                found = parse_object(line, where, '{"request_parameters": "{...}", ...}')
                ids = _token_ids(found, where, tokenize)
                requests.append(_converted(found, where, ids, block_size, numbers))
    if not requests:
        raise ConfigError("FILE: got no request, expected what a server exported")
    requests.sort(key=lambda request: request.timestamp)
    first = requests[0].timestamp
    note = f"SGLang, {len(requests)} requests"
    shifted = [request._replace(timestamp=request.timestamp - first) for request in requests]
    return PrefixTrace(source="recorded", note=note, block_size=block_size, requests=shifted)


def _token_ids(
    found: dict[str, Any], where: str, tokenize: Callable[[str], list[int]] | None
) -> list[int]:
    text = found.get("request_parameters")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: got no request_parameters, expected what a server exported")
    given = parse_object(text, f"{where}: request_parameters", '{"input_ids": [1]}')
    if matches(given.get("input_ids"), list[int]):
        ids: list[int] = given["input_ids"]
        return ids
    if isinstance(given.get("text"), str):
        if tokenize is None:
            raise ConfigError(f"{where}: got a text, expected --model to turn it into tokens")
        return tokenize(given["text"])
    raise ConfigError(f"{where}: got neither input_ids nor text, expected one of the two")


def _converted(
    found: dict[str, Any], where: str, ids: list[int], size: int, numbers: dict[bytes, int]
) -> PrefixRequest:
    blocks, digest = [], hashlib.blake2b(digest_size=16)
    for start in range(0, len(ids) - size + 1, size):
        digest.update(json.dumps(ids[start : start + size]).encode())
        blocks.append(numbers.setdefault(digest.digest(), len(numbers)))
    counts: list[Any] = [found.get(name, 0) for name in ("completion_tokens", "cached_tokens")]
    seconds: Any = found.get("request_received_ts")
    if not all(matches(x, int) and 0 <= x < _MOST for x in counts):
        raise ConfigError(f"{where}: got {quoted(counts)}, expected numbers of tokens")
    if not matches(seconds, float) or not 0 <= seconds < _MOST:
        raise ConfigError(
            f"{where}: request_received_ts: got {quoted(seconds)}, expected seconds; a server "
            "exports them with --enable-metrics"
        )
    return PrefixRequest(1000 * seconds, len(ids), counts[0], tuple(blocks), counts[1])


class PrefixHits(NamedTuple):
    """The result of a replay through one cache.

    Attributes:
        hit_ratio: prompt tokens that the cache held, of all prompt tokens.
        peak_tokens: the most tokens that it held.
    """

    hit_ratio: float
    peak_tokens: int


def replay_prefix(trace: PrefixTrace, capacity: int | None, ttl_s: float | None) -> PrefixHits:
    """Replay a trace through an LRU cache.

    A request hits the blocks at its beginning that the cache holds, up to the first that it does
    not hold. Then all blocks of its prompt are used, the last one first: of a prefix, the end
    leaves the cache before the beginning.

    Args:
        trace: the trace.
        capacity: tokens; None: unlimited.
        ttl_s: seconds that a block stays after its last use; None: no limit.
    """
    size = trace.block_size
    most = float("inf") if capacity is None else capacity // size
    ttl_ms = float("inf") if ttl_s is None else 1000 * ttl_s
    #: Last use of each block that the cache holds, the least recent first.
    used: OrderedDict[int, float] = OrderedDict()
    found = total = peak = 0
    for request in trace.requests:
        while used and request.timestamp - next(iter(used.values())) > ttl_ms:
            used.popitem(last=False)
        hits = 0
        while hits < len(request.hash_ids) and request.hash_ids[hits] in used:
            hits += 1
        found += min(hits * size, request.input_length)
        total += request.input_length
        for block in reversed(request.hash_ids):
            used[block] = request.timestamp
            used.move_to_end(block)
            if len(used) > most:
                used.popitem(last=False)
            peak = max(peak, len(used))
    return PrefixHits(found / max(1, total), peak * size)


def describe_prefix(file: Path, trace: PrefixTrace) -> dict[str, Any]:
    """What a prefix trace holds."""
    requests = trace.requests
    inputs = sum(x.input_length for x in requests)
    known = [(x.cached_length, x.input_length) for x in requests if x.cached_length is not None]
    cached, asked = (sum(column) for column in zip(*known, strict=True)) if known else (0, 0)
    return {
        "file": str(file),
        "source": trace.source,
        "note": trace.note,
        "block_size": trace.block_size,
        "requests": len(requests),
        "seconds": (requests[-1].timestamp - requests[0].timestamp) / 1000,
        "input_tokens": inputs,
        "output_tokens": sum(x.output_length for x in requests),
        "blocks": len({b for x in requests for b in x.hash_ids}),
        "found_by_server": cached / max(1, asked) if known else None,
        "unlimited_hit_ratio": replay_prefix(trace, None, None).hit_ratio,
    }


def replay_all(
    file: Path, capacities: Sequence[int] | None, ttls: Sequence[float | None]
) -> dict[str, Any]:
    """Replay a prefix trace through each capacity and lifetime.

    Raises:
        ConfigError: the file is damaged.
    """
    trace = read_prefix(file)
    about = describe_prefix(file, trace)
    if capacities is None:
        whole = max(1, about["blocks"])
        capacities = [max(1, whole >> i) * trace.block_size for i in range(6, -1, -1)]
    points = [
        {"capacity": capacity, "ttl_s": ttl, **replay_prefix(trace, capacity, ttl)._asdict()}
        for ttl in ttls
        for capacity in dict.fromkeys(capacities)
    ]
    return about | {"points": points}
