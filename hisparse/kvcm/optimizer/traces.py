"""Traces of what requests look for in a cache and write to it.

==================== ===============================================================================
``mooncake``         Mooncake's, and those that ``hisparse trace convert`` records: a request a line
``qwen_bailian``     the same lines with ``chat_id``, in seconds; a key stands for a block alone
``publisher_log``    events of a manager: reads, starts and ends of writes (``trigger_time_us``)
``optimizer_schema`` requests, reads or writes, as Tair converts other formats (``timestamp_us``)
==================== ===============================================================================

The last three: https://github.com/alibaba/tair-kvcache, kv_cache_manager/optimizer/trace_converter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from hisparse.errors import ConfigError, quoted
from hisparse.options import check_type
from hisparse.trace.prefix import read_keys, read_lines, read_prefix

#: Tokens of a block where neither the trace nor the user says it, as in Tair's examples.
_USUAL_BLOCK: Final = 16
#: us after its start at which a write without an end counts as done, as Tair has it.
_UNFINISHED_US: Final = 100_000
#: Instance of formats that name none.
_INSTANCE: Final = "instance"
_MOST: Final = 1 << 53

_Lines = Iterator[tuple[str, dict[str, Any]]]


class Event(NamedTuple):
    """What one request does at one time.

    Attributes:
        time_us: us.
        instance: number of the instance.
        blocks: of the prompt and, if they are written, of its answer. A number stands for a block
            and all blocks before it, in one instance.
        asked: how many of them, from the first one on, are looked for; None: this is no read.
        writes: whether they are written, after the read.
        mask: which of them the engine has itself: the first so many, or true for each.
        tokens: of the prompt; None: whole blocks.
    """

    time_us: int
    instance: int
    blocks: Sequence[int]
    asked: int | None
    writes: bool = True
    mask: int | Sequence[bool] = 0
    tokens: int | None = None


@dataclass(kw_only=True)
class Trace:
    """Events in the order of time.

    Attributes:
        file: the file.
        format: one of the four.
        note: text about the source.
        block_size: tokens.
        instances: their numbers, by name.
        events: the events.
        skipped: how many lines hold nothing to replay, by what they hold.
        found_by_server: share of the prompt tokens that the server found; None: not known.
    """

    file: Path
    format: str
    note: str = ""
    block_size: int = _USUAL_BLOCK
    instances: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    found_by_server: float | None = None
    _numbers: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def num_blocks(self) -> int:
        """Different blocks."""
        return len(self._numbers)

    def add(
        self,
        where: str,
        instance: str,
        time_us: float,
        keys: Sequence[int],
        asked: int | None,
        **about: Any,
    ) -> None:
        """Add an event, and number its blocks by their key and the block before them.

        Raises:
            ConfigError: the time is none.
        """
        if not 0 <= time_us < _MOST:
            raise ConfigError(f"{where}: got time {quoted(time_us)} us, expected 0 to 2**53")
        owner = self.instances.setdefault(instance, len(self.instances))
        numbers, blocks = self._numbers, []
        block = -1 - owner
        for key in keys:
            # Half as long as with pairs, which the garbage collector has to look at.
            block = numbers.setdefault((block << 64) + key, len(numbers))
            blocks.append(block)
        self.events.append(Event(int(time_us), owner, blocks, asked, **about))


def read_trace(file: Path) -> Trace:
    """Read a trace; its first line shows which format it has.

    Raises:
        ConfigError: the file cannot be read, or a line is none of its format.
    """
    _, first = next(read_lines(file), ("", {}))
    if "trigger_time_us" in first:
        trace = Trace(file=file, format="publisher_log")
        _read_publisher_log(trace, read_lines(file))
    elif "timestamp_us" in first:
        trace = Trace(file=file, format="optimizer_schema")
        for where, found in read_lines(file):
            _add_schema(trace, where, found)
    else:
        trace = _read_requests(file, is_qwen="chat_id" in first)
    trace.events.sort(key=lambda event: event.time_us)
    if not any(event.asked for event in trace.events):
        raise ConfigError(f"{str(file)!r}: got no read of a block, expected at least one")
    return trace


def _read_requests(file: Path, is_qwen: bool) -> Trace:
    given = read_prefix(file)
    trace = Trace(file=file, format="mooncake", note=given.note, block_size=given.block_size)
    if is_qwen:
        trace.format, trace.block_size = "qwen_bailian", _USUAL_BLOCK
    unit_us, where = 1_000_000 if is_qwen else 1000, repr(str(file))
    for x in given.requests:
        time_us, asked = unit_us * x.timestamp, len(x.hash_ids)
        trace.add(where, _INSTANCE, time_us, x.hash_ids, asked, tokens=x.input_length)
    known = [x for x in given.requests if x.cached_length is not None]
    if known:
        cached = sum(x.cached_length or 0 for x in known)
        trace.found_by_server = cached / max(1, sum(x.input_length for x in known))
    return trace


def _read_publisher_log(trace: Trace, lines: _Lines) -> None:
    """A write happens at its end, of all its blocks: Tair too ignores which of them succeeded."""
    started: dict[str, tuple[str, int, Sequence[int], str]] = {}
    for where, found in lines:
        kind, source = (_get(found, where, name, str) for name in ("type", "source"))
        time_us = _get(found, where, "trigger_time_us", int)
        if kind == "GetCacheLocation":
            _add_read(trace, where, found, source, time_us)
        elif kind == "StartWriteCache":
            session = _get(found, where, "write_session_id", str)
            started[session] = source, time_us, read_keys(found, where, "keys"), where
        elif kind == "FinishWriteCache":
            session = _get(found, where, "write_session_id", str)
            if session not in started:
                trace.skipped["ends of writes without a start"] += 1
                continue
            owner, _, keys, _ = started.pop(session)
            if owner != source:
                raise ConfigError(
                    f"{where}: source: got {quoted(source)}, expected {quoted(owner)}, which "
                    f"started the write {quoted(session)}"
                )
            trace.add(where, source, time_us, keys, None)
        else:
            trace.skipped[f"events {quoted(kind)}"] += 1
    for source, time_us, keys, where in started.values():
        trace.add(where, source, time_us + _UNFINISHED_US, keys, None)


def _add_schema(trace: Trace, where: str, found: dict[str, Any]) -> None:
    """A line with lengths is a request, another one a read if it has a query, else a write."""
    instance = _get(found, where, "instance_id", str)
    time_us = _get(found, where, "timestamp_us", int)
    keys = read_keys(found, where, "keys")
    if {"input_len", "output_len", "total_keys"} <= found.keys():
        if _is_prefix_match(trace, where, found):
            total = read_keys(found, where, "total_keys")
            asked, tokens = min(len(keys), len(total)), _get(found, where, "input_len", int)
            trace.add(where, instance, time_us, total, asked, tokens=max(0, tokens) or None)
    elif {"query_type", "block_mask"} <= found.keys():
        _add_read(trace, where, found, instance, time_us)
    else:
        trace.add(where, instance, time_us, keys, None)


def _add_read(trace: Trace, where: str, found: dict[str, Any], instance: str, time_us: int) -> None:
    """Add a read without a write. A mask beyond the keys masks all of them."""
    if not _is_prefix_match(trace, where, found):
        return
    keys, mask = read_keys(found, where, "keys"), found.get("block_mask", 0)
    check_type(f"{where}: block_mask", mask, int | list[bool])
    if isinstance(mask, int) and mask < 0:
        raise ConfigError(f"{where}: block_mask: got {mask}, expected a number from 0 on")
    mask = mask[: len(keys)] if isinstance(mask, list) else min(mask, len(keys))
    trace.add(where, instance, time_us, keys, len(keys), writes=False, mask=mask)


def _is_prefix_match(trace: Trace, where: str, found: dict[str, Any]) -> bool:
    """Whether a query asks for leading hits; others are skipped, as Tair does."""
    kind = _get({"query_type": "prefix_match"} | found, where, "query_type", str)
    if kind != "prefix_match":
        trace.skipped[f"queries {quoted(kind)}"] += 1
    return bool(kind == "prefix_match")


def _get(found: dict[str, Any], where: str, name: str, kind: Any) -> Any:
    """A field of a line, which must have it with this type."""
    check_type(f"{where}: {name}", found.get(name), kind)
    return found[name]
