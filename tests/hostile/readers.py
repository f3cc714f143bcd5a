"""Every reader of a file that a user may name, each with a file that it accepts."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse import cli
from hisparse.config import HiSparseConfig
from hisparse.errors import HiSparseError
from hisparse.eval.results import Records
from hisparse.kvcm.optimizer.replay import Point, make_setup, sweep
from hisparse.kvcm.optimizer.traces import read_trace
from hisparse.options import read_text
from hisparse.storage import FileStore, Namespace
from hisparse.trace import SelectionTrace, adjacent_overlap, replay_hits
from hisparse.trace.prefix import PrefixRequest, PrefixTrace, convert_sglang, write_prefix
from hisparse.trace.replay import least_buffer
from scripts import make_plots
from tests.eval.synthetic_records import record
from tests.eval.test_tables import result
from tests.storage.pages import NAMESPACE, contents, fill, key_of, page_file, read
from tests.trace.made import write_trace

_RESULTS = Path(__file__).parents[2] / "bench" / "results"


class Refused(Exception):
    """The reader refused the file with this line."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A way to read a file.

    Attributes:
        name: what reads.
        content: a file that is accepted.
        read: reads the file with this path, and raises ``HiSparseError`` or ``Refused``.
        weight: how often the reader's turn comes, compared with others.
    """

    name: str
    content: bytes
    read: Callable[[Path], object]
    weight: int = 4

    def line_for(self, path: Path) -> str | None:
        """The line of the refusal, or None if the file is accepted."""
        try:
            self.read(path)
        except (HiSparseError, Refused) as error:
            return str(error)
        return None


def _command(main: Callable[[list[str]], int], capture: Any, *after: str) -> Callable[[Path], None]:
    """Reads by a command line; what it says on standard error is the refusal."""

    def read(path: Path) -> None:
        code = main([str(path), *after])
        said = capture.readouterr().err
        if code:
            assert said.endswith("\n")
            raise Refused(said.removesuffix("\n"))

    return read


def _records() -> Reader:
    lines = [
        record(document, method, kl=[0.1], continued=[-1.0]) | {"config": "00000000"}
        for document in "ab"
        for method in ("dense", "quest")
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    return _reader("records", content.encode(), lambda path: Records(path.parent).read())


def _trace(folder: Path) -> Reader:
    content = write_trace(folder / "made.trace", requests=2).read_bytes()

    def read(path: Path) -> None:
        trace = SelectionTrace(path)
        adjacent_overlap(trace)
        replay_hits(trace, [least_buffer(trace)])

    # Not every change must be refused: a file that ends early is that of a killed process.
    return _reader("trace", content, read)


#: Of a manager: a write, and a read that finds it.
_EVENT = {"source": "a", "keys": [1, -2, 3]}
_EVENTS = [
    {"type": "StartWriteCache", "trigger_time_us": 1, "write_session_id": "x"} | _EVENT,
    {"type": "FinishWriteCache", "trigger_time_us": 9, "write_session_id": "x", "source": "a"},
    {"type": "GetCacheLocation", "trigger_time_us": 10, "query_type": "prefix_match"}
    | {"block_mask": [True, False, False]}
    | _EVENT,
]


def _replay(path: Path) -> None:
    trace = read_trace(path)
    sweep(trace, make_setup(trace), [Point("leaf_aware_lru", 2)], trace.block_size)


def _prefixes(folder: Path) -> list[Reader]:
    requests = [PrefixRequest(1e3 * i, 1024, 8, (i // 3, 100 + i), 512) for i in range(20)]
    made = PrefixTrace(source="recorded", note="", block_size=512, requests=requests)
    write_prefix(folder / "made.jsonl", made)
    parameters = json.dumps({"input_ids": list(range(200))})
    exported = {"request_parameters": parameters, "completion_tokens": 3, "cached_tokens": 64}
    exported |= {"request_received_ts": 1.5}
    return [
        _reader(
            "prefixes",
            (folder / "made.jsonl").read_bytes(),
            _replay,
        ),
        _reader(
            "events", "".join(map(json.dumps, _EVENTS)).replace("}{", "}\n{").encode(), _replay
        ),
        _reader("exported", json.dumps(exported).encode(), lambda p: convert_sglang([p], 64, None)),
    ]


def _store_readers(folder: Path) -> list[Reader]:
    """The files of a store. A damaged file loses its page at most, and no store is refused."""
    whole, made = folder / "whole", folder / "store"
    with FileStore(whole, 1 << 20) as store:
        keys = fill(store, range(3))

    def read_store(changed: Path, damaged: Path) -> None:
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(whole, made)
        shutil.copyfile(changed, made / damaged)
        with FileStore(made, 1 << 20, create=False) as store:
            if damaged.name == keys[0]:
                store.verify()
            found = read(store, keys)
            assert found[1:] == [True, True] and (found[0] or damaged.name == keys[0])
            store.collect()
            assert store.put(NAMESPACE, key_of(9), contents(key_of(9)))
            assert read(store, [*keys, key_of(9)]) == [*found, True]
            store.describe()

    return [
        _reader(name, (whole / file).read_bytes(), lambda x, file=file: read_store(x, file), weight)
        for name, file, weight in (
            ("page", page_file(Path(), keys[0]), 4),
            ("namespace.json", page_file(Path(), "namespace.json"), 1),
            ("hisparse.size", Path("hisparse.size"), 1),
        )
    ]


def _storage_command(folder: Path, capture: Any) -> Reader:
    """``hisparse storage``: an action and its flags, a line each; the store is always the same."""
    store = folder / "commanded"

    def read_words(path: Path) -> None:
        action, *flags = path.read_bytes().decode("utf-8", "replace").replace("\0", "0").split("\n")
        with FileStore(store) as opened:
            opened.put(NAMESPACE, key_of(0), contents(key_of(0)))
        try:
            code: object = cli.main(["storage", action, str(store), *flags])
        except SystemExit as stopped:
            code = stopped.code
        said = capture.readouterr().err
        if code:
            raise Refused(said.removesuffix("\n"))

    return _reader("storage command", b"gc\n--size\n1MB", read_words, weight=1)


def _namespace(path: Path) -> None:
    found = Namespace.parse(read_text(path, "--namespace"))
    assert Namespace.parse(found.text) == found


def _plot(kind: str, folder: Path, capture: Any) -> Callable[[Path], None]:
    def draw(words: list[str]) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make_plots.main([kind, *words])

    return _command(draw, capture, str(folder / "plot.svg"))


def readers(folder: Path, capture: Any) -> list[Reader]:
    """All readers.

    Args:
        folder: for files that they write.
        capture: pytest's ``capsys``.
    """
    quality = json.dumps(result() | {"dtype": "float32"}).encode()
    bench_file = min(_RESULTS.glob("*-decode-4k-resident-float32-avx512-*.json"))
    bench = json.dumps(json.loads(bench_file.read_bytes())).encode()
    traces_file = min(_RESULTS.glob("*-trace-qwen-8k-*.json"))
    traces = json.dumps(json.loads(traces_file.read_bytes())).encode()
    settings = {"algorithm": "quest", "budget": 512, "algorithm_config": {"ranges": 2}}
    settings |= {"trace": {"max_bytes": 0.5}}
    found = [
        _records(),
        _trace(folder),
        *_prefixes(folder),
        *_store_readers(folder),
        _storage_command(folder, capture),
        _reader("namespace", NAMESPACE.text.encode(), _namespace),
        _reader("settings", json.dumps(settings).encode(), lambda p: HiSparseConfig.parse(f"@{p}")),
        _reader("text", "Straße 😀\n".encode(), lambda path: read_text(path, "--text")),
        *(
            _reader(f"{kind} plot", content, _plot(kind, folder, capture), weight=1)
            for kind, content in (("quality", quality), ("speed", bench), ("trace", traces))
        ),
    ]
    return found


def _reader(name: str, content: bytes, read: Callable[[Path], object], weight: int = 4) -> Reader:
    return Reader(name=name, content=content, read=read, weight=weight)
