"""Prefix traces: which blocks of tokens each request shares with earlier ones.

The format is Mooncake's: one JSON object a line with ``timestamp`` (ms), ``input_length``,
``output_length`` and ``hash_ids``, a number for each block of the prompt that stands for the block
and all tokens before it. A block has 512 tokens. Our files begin with a line that names the block
size and says where the trace is from, and may have ``cached_length``: tokens that a server found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypedDict

import numpy as np

from hisparse.errors import ConfigError, quoted
from hisparse.options import check_fields, check_type, matches, parse_object, read_text
from hisparse.private_files import open_private

FORMAT: Final = "hisparse prefix 1"
#: Tokens of a block in Mooncake's traces.
_MOONCAKE_BLOCK: Final = 512
_EXAMPLE: Final = '{"timestamp": 0, "input_length": 512, "output_length": 8, "hash_ids": [0]}'
_MOST: Final = 1 << 53
#: Of a made-up trace: documents, and conversations at once.
_DOCUMENTS, _SESSIONS = 100, 16


class _About(TypedDict):
    source: Literal["recorded", "made up"]
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
        source: "recorded" from a server, "made up", or "as given" for a file without our first
            line.
        note: text about the source.
        block_size: tokens.
        requests: the requests.
    """

    source: str
    note: str
    block_size: int
    requests: Sequence[PrefixRequest]


def is_prefix_trace(path: Path) -> bool:
    """Whether a file looks like JSON; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except (OSError, ValueError):
        return False


def read_prefix(path: Path) -> PrefixTrace:
    """Read a prefix trace, ours or Mooncake's.

    Raises:
        ConfigError: the file cannot be read, or a line is no request.
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
        ConfigError: a file cannot be read, or a line is no request.
    """
    numbers: dict[bytes, int] = {}
    requests = []
    for path in files:
        for number, line in enumerate(read_text(path, "--exported").split("\n"), 1):
            if line.strip():
                where = f"{str(path)!r} line {number}"
                found = parse_object(line, where, '{"request_parameters": "{...}", ...}')
                ids = _token_ids(found, where, tokenize)
                requests.append(_converted(found, where, ids, block_size, numbers))
    if not requests:
        raise ConfigError("--exported: got no request, expected what a server exported")
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


def make_up_sessions(
    *, requests: int, turns: int, zipf: float, context: int, seed: int
) -> PrefixTrace:
    """Conversations that begin with one of 100 documents, drawn by a Zipf distribution.

    Each turn repeats the conversation and adds two blocks. A second passes between requests, and
    the turns of 16 conversations are mixed.

    Args:
        requests: number of requests.
        turns: of each conversation.
        zipf: exponent.
        context: tokens of each document, in whole blocks of 512.
        seed: of the generator.
    """
    rng = np.random.default_rng(seed)
    blocks = max(1, context // _MOONCAKE_BLOCK)
    weights = (1.0 + np.arange(_DOCUMENTS)) ** -zipf
    sessions: list[list[int]] = []
    found: list[PrefixRequest] = []
    unused = _DOCUMENTS * blocks
    while len(found) < requests:
        while len(sessions) < _SESSIONS:
            document = int(rng.choice(_DOCUMENTS, p=weights / weights.sum()))
            sessions.append(list(range(document * blocks, (document + 1) * blocks)))
        at = int(rng.integers(len(sessions)))
        session = sessions[at]
        session += [unused, unused + 1]
        unused += 2
        length = _MOONCAKE_BLOCK * len(session)
        found.append(PrefixRequest(1000.0 * len(found), length, 128, tuple(session)))
        if len(session) >= blocks + 2 * turns:
            sessions.pop(at)
    note = f"{turns} turns, {_DOCUMENTS} documents of {blocks} blocks, zipf {zipf:g}, seed {seed}"
    return PrefixTrace(source="made up", note=note, block_size=_MOONCAKE_BLOCK, requests=found)
