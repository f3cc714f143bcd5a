"""Prefix traces: which blocks of tokens each request shares with earlier ones.

The format is Mooncake's: one JSON object a line with ``timestamp`` (ms), ``input_length``,
``output_length`` and ``hash_ids``, a number for each block of the prompt that stands for the block
and all tokens before it. A block has 512 tokens. Our files begin with a line that names the block
size and says where the trace is from, and may have ``cached_length``: tokens that a server found.
``hisparse kvcm replay`` replays both.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

from hisparse.errors import ConfigError, quoted
from hisparse.options import check_fields, check_type, matches, parse_object
from hisparse.private_files import open_private

FORMAT: Final = "hisparse prefix 1"
#: Tokens of a block in Mooncake's traces.
_MOONCAKE_BLOCK: Final = 512
_EXAMPLE: Final = '{"timestamp": 0, "input_length": 512, "output_length": 8, "hash_ids": [0]}'
_MOST: Final = 1 << 53
_KEYS: Final = 1 << 63
#: Numbers of a line.
_FIELDS: Final = {"timestamp": float, "input_length": int, "output_length": int}
_NEEDED: Final = _FIELDS.keys() | {"hash_ids"}


class _About(TypedDict):
    source: str
    note: str
    block_size: int


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


def read_lines(path: Path, example: str = _EXAMPLE) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file with one in each line, and their places for messages.

    Args:
        path: the file; empty lines are left out.
        example: such a line, for messages.

    Raises:
        ConfigError: the file cannot be read, or a line is no object.
    """
    name = repr(str(path))
    try:
        with open(path.expanduser(), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{name} line {number}"
                    yield where, _read_line(line, where, example)
        return
    except ConfigError:
        raise
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no such user.
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"FILE: cannot read {name}: {reason}; expected a text file")


def _read_line(line: str, where: str, example: str) -> dict[str, Any]:
    # A tenth of the time of :func:`parse_object`, which finds what is wrong.
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else parse_object(line, where, example)


def read_keys(found: dict[str, Any], where: str, name: str) -> list[int]:
    """The field of a line that is a list of numbers of 64 bits, of which a trace has millions.

    Raises:
        ConfigError: it is none.
    """
    keys: Any = found.get(name)
    # All types at once: ``check_type`` takes 10 times as long, and finds what is wrong.
    if type(keys) is not list or not {int}.issuperset(map(type, keys)):
        check_type(f"{where}: {name}", keys, list[int])
    if keys and not -_KEYS <= min(keys) <= max(keys) < _KEYS:
        raise ConfigError(f"{where}: {name}: got {quoted(keys)}, expected numbers of 64 bits")
    result: list[int] = keys
    return result


def read_prefix(path: Path) -> PrefixTrace:
    """Read a prefix trace, ours or Mooncake's.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request.
    """
    about: dict[str, Any] = {"source": "as given", "note": "", "block_size": _MOONCAKE_BLOCK}
    requests = []
    for i, (where, found) in enumerate(read_lines(path)):
        if not i and "format" in found:
            about = _read_about(found, where)
        else:
            requests.append(_read_request(found, where))
    if not requests:
        raise ConfigError(f"{str(path)!r}: got no request, expected lines such as {_EXAMPLE}")
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
    if absent := sorted(_NEEDED - found.keys()):
        raise ConfigError(f"{where}: got no {', '.join(absent)}, expected an object that has them")
    for name, kind in _FIELDS.items():
        check_type(f"{where}: {name}", found[name], kind)
    if (cached := found.get("cached_length")) is not None:
        check_type(f"{where}: cached_length", cached, int)
    blocks = tuple(read_keys(found, where, "hash_ids"))
    time, prompt, answer = (found[name] for name in _FIELDS)
    request = PrefixRequest(time, prompt, answer, blocks, cached)
    if not all(0 <= x < _MOST for x in (time, prompt, answer, cached or 0)):
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
        for where, found in read_lines(path, '{"request_parameters": "{...}", ...}'):
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
