"""``hisparse storage``: list, check and shrink a store of pages."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hisparse.cli.terminal import (
    Values,
    add_command,
    add_flag,
    make_table,
    print_paragraph,
    print_result,
    string,
)
from hisparse.errors import ConfigError, quoted
from hisparse.units import format_bytes, parse_memory

if TYPE_CHECKING:
    from hisparse.storage import FileStore, StoreReport

_DAY_S = 86_400
#: Characters of a namespace's key that `ls` prints, and fewest that `rm` takes.
_SHOWN, _FEWEST = 12, 4
_DAYS = Values(float, "a number of days", "N", lambda x: 0 <= x < 1e6, several=False)


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "list, check and shrink a store of KV pages"
    parser = add_command(commands, "storage", text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    parsers = {}
    for name, text, run in (
        ("ls", "what a store holds", _list),
        ("check", "read every page and drop damaged ones (exit code 1: there were some)", _check),
        ("gc", "evict the least recently used pages down to a size", _collect),
        ("rm", "remove pages", _remove),
    ):
        parsers[name] = add_command(actions, name, text, run)
        parsers[name].add_argument("path", type=Path, metavar="PATH", help="folder of the store")
    text = "the size, such as 100GiB (no limit)"
    add_flag(parsers["gc"], "--size", string, text, metavar="SIZE")
    which = parsers["rm"].add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every page")
    text = "pages of one namespace: its key, or the beginning that ls prints"
    add_flag(which, "--namespace", string, text, metavar="KEY")
    add_flag(which, "--unused-days", _DAYS, "pages that nobody wrote or read for so many days")


def _open(arguments: argparse.Namespace) -> FileStore:
    # Other commands do without the packages that a store needs.
    from hisparse.storage import FileStore

    return FileStore(arguments.path, create=False)


def _print(arguments: argparse.Namespace, found: dict[str, Any], lines: list[str]) -> None:
    def show(console: Console) -> None:
        for line in lines:
            print_paragraph(console, line)

    print_result(arguments, {"command": f"storage {arguments.action}", **found}, show)


def _list(arguments: argparse.Namespace) -> int:
    with _open(arguments) as store:
        report = store.describe()
    keys = {"namespaces": [{"key": x.namespace.key, **asdict(x)} for x in report.namespaces]}
    _print(arguments, asdict(report) | keys, [_summary(report)])
    if arguments.json or not report.namespaces:
        return 0
    right = ("page", "rank", "pages", "size")
    table = make_table("namespace", "model", "dtype", *right, "last used", right=right)
    for use in report.namespaces:
        names = use.namespace
        table.add_row(
            names.key[:_SHOWN],
            names.model,
            names.kv_dtype,
            str(names.page_size),
            f"{names.rank}/{names.num_ranks}",
            f"{use.pages:,}",
            format_bytes(use.bytes),
            datetime.fromtimestamp(use.last_used).strftime("%Y-%m-%d %H:%M"),
        )
    Console(highlight=False).print(table)
    return 0


def _summary(report: StoreReport) -> str:
    return f"{report.path}: {report.pages:,} pages, {format_bytes(report.bytes)}"


def _check(arguments: argparse.Namespace) -> int:
    with _open(arguments) as store:
        report = store.verify()
    lines = [f"{x.namespace[:_SHOWN]}: page {x.key}: {x.reason}" for x in report.damaged]
    total = f"{report.pages:,} pages, {format_bytes(report.bytes)}: {len(lines):,} damaged"
    _print(arguments, asdict(report), [*lines, total])
    return int(bool(report.damaged))


def _collect(arguments: argparse.Namespace) -> int:
    size = None if arguments.size is None else int(parse_memory("--size", arguments.size))
    with _open(arguments) as store:
        store.collect(size)
        return _report_removal(arguments, store, "evicted", store.counters["evicted"])


def _report_removal(
    arguments: argparse.Namespace, store: FileStore, done: str, removed: int
) -> int:
    given_back, left = store.counters["collected_bytes"], store.describe()
    found = {done: removed, "bytes": given_back, "pages": left.pages}
    line = f"{removed:,} pages {done}, {format_bytes(given_back)} given back"
    _print(arguments, found, [line, _summary(left)])
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    with _open(arguments) as store:
        namespace = None
        if arguments.namespace is not None:
            known = {use.namespace.key: use.namespace for use in store.describe().namespaces}
            given = arguments.namespace
            matches = [key for key in known if key.startswith(given) and len(given) >= _FEWEST]
            if len(matches) != 1:
                choices = ", ".join(key[:_SHOWN] for key in known) or "none"
                raise ConfigError(f"--namespace: got {quoted(given)}, expected one of: {choices}")
            namespace = known[matches[0]]
        unused_s = None if arguments.unused_days is None else arguments.unused_days * _DAY_S
        removed = store.remove(namespace, None, unused_s)
        return _report_removal(arguments, store, "removed", removed)
