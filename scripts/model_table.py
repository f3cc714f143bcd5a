"""Serve a tiny random model of each family, densely and with hisparse; write docs/models.md.

``python -m scripts.model_table OUT.json [--page docs/models.md] [NAME ...]`` serves the families of
``scripts/model_families.py``, or those named. For each it starts SGLang's ``torch_native`` and
hisparse, in float32 on a CPU, with the same weights:

- three prompts at once with a budget beyond their lengths: the tokens of both have to be equal.
  hisparse prefills them in chunks, and has their common prefix in the radix cache.
- three prompts longer than the budget, on hisparse: every log-probability has to be finite, and so
  have those of the shorter ones.

OUT.json is written after each family. The next run continues after the last one, and repeats the
families that are named. It exits with 1 if a family differs, or ends in another way than its line
in ``--known`` (an earlier OUT.json) says.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from hisparse.doctor import provenance
from hisparse.errors import HiSparseError
from hisparse_bench.fork_server import ForkServer
from hisparse_bench.server import ServerProcess
from scripts.model_families import FAMILIES, VOCAB, Family
from scripts.model_page import make_page, outcome
from scripts.random_weights import make_plugin

ROOT = Path(__file__).resolve().parent.parent

_BUDGET, _CHUNK = 384, 128
_PREFIX, _NEW_TOKENS = 64, 24
_LENGTHS, _LONG = (37, 120, 250), 800
_FLAGS = (
    "--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "--skip-tokenizer-init",
    "--skip-server-warmup", "--sleep-on-idle", "--max-total-tokens", "6144",
    "--max-running-requests", "4",
)  # fmt: skip
#: SGLang keeps convolutions' states in bfloat16 by default, which prompts in chunks read.
_ENV = {"TORCHDYNAMO_DISABLE": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
#: ``torch_native`` is the reference: it computes each prompt at once.
_OF_BACKEND = {
    "torch_native": ("--disable-radix-cache", "--chunked-prefill-size", "4096"),
    "hisparse": ("--chunked-prefill-size", str(_CHUNK)),
}
_SETTINGS = {"budget": _BUDGET, "host_memory": "1GiB", "device_memory": "512MiB"}


def _tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


_PROMPTS = [_tokens(_PREFIX, 0) + _tokens(length, length) for length in _LENGTHS]
_LONG_PROMPTS = [_tokens(_LONG, seed) for seed in (1, 2, 3)]


class Table:
    """Serves families, each server a fork of one process.

    Args:
        folder: for models and logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = (make_plugin(folder / "plugin"), ROOT)
        self._env = ServerProcess.cpu_environment(1) | _ENV
        self._env |= {"PYTHONPATH": os.pathsep.join(map(str, self._path))}
        self.forks = ForkServer(os.environ | self._env, folder / "forks.log")

    def row(self, family: Family) -> dict[str, Any]:
        """What the family did: the answers compared, or the line with which it ended."""
        model = family.write(self._folder / re.sub(r"\W+", "-", family.name))
        row: dict[str, Any] = {"name": family.name, "architecture": family.model_class}
        row["flags"] = " ".join(family.flags)
        dense, error = self._answers(family, model, "torch_native")
        row["torch_native"] = error or "served"
        found, error = self._answers(family, model, "hisparse")
        row["hisparse"] = error or "served"
        if found is not None:
            compared = dense is not None and family.comparable
            row |= _compare(found, dense["short"] if compared else None)
        return row

    def _answers(
        self, family: Family, model: Path, backend: str
    ) -> tuple[dict[str, Any] | None, str]:
        """Answers to the prompts, or the line with which the server ended."""
        log = model / f"{backend}.log"
        flags = [*_FLAGS, *_OF_BACKEND[backend], *family.flags, "--attention-backend", backend]
        if backend == "hisparse":
            flags += ["--hisparse-config", json.dumps(_SETTINGS | dict(family.hisparse))]
        forks = self.forks if family.forked else None
        server = ServerProcess(str(model), log, flags, forks, self._path)
        try:
            with server:
                server.start(self._env)
                return _ask(server, sparse=backend == "hisparse"), ""
        except (HiSparseError, OSError, requests.RequestException) as error:
            return None, _reason(log.read_text(errors="replace")) or type(error).__name__


def _ask(server: ServerProcess, *, sparse: bool) -> dict[str, Any]:
    """Answers of a server to the prompts."""
    server.generate(_PROMPTS[:1], 2)
    answers = {"short": server.generate(_PROMPTS, _NEW_TOKENS, top_logprobs_num=1)}
    if sparse:
        answers["long"] = server.generate(_LONG_PROMPTS, _NEW_TOKENS, top_logprobs_num=1)
    return answers


def _compare(found: Mapping[str, Any], dense: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Facts of a served family."""
    short = found["short"]
    logprobs = [*_logprobs(short), *_logprobs(found["long"])]
    facts: dict[str, Any] = {
        "cached_tokens": max(answer["meta_info"]["cached_tokens"] for answer in short),
        "distinct_tokens": len({token for answer in short for token in answer["output_ids"]}),
        "finite": all(map(math.isfinite, logprobs)),
    }
    if dense is not None:
        pairs = zip(short, dense, strict=True)
        facts["equal"] = sum(a["output_ids"] == b["output_ids"] for a, b in pairs)
        differences = [abs(a - b) for a, b in zip(_logprobs(short), _logprobs(dense), strict=True)]
        facts["logprob_difference"] = max(differences) if facts["finite"] else None
    return facts


def _logprobs(answers: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Log-probabilities of all tokens; JSON has null for one that is not a number."""
    for answer in answers:
        for value, *_ in answer["meta_info"]["output_token_logprobs"]:
            yield math.nan if value is None else value


def _reason(log: str) -> str:
    """The line of a log that says why a server ended, "" if there is none."""
    own = re.findall(r"hisparse: error: .*", log)
    if own:
        return str(own[0])
    lines = re.findall(r"^(?:\[.*?\] )?([\w.]*(?:Error|Exception)(?:: .*)?)$", log, re.MULTILINE)
    # The processes of a server that ends lose each other.
    errors = [line for line in lines if "Connection" not in line]
    return re.sub(r"0x[0-9a-f]+", "0x…", errors[0])[:160].strip() if errors else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the families; exit code 1 if one is not as it has to be."""
    options = _parser().parse_args(arguments)
    rows = _read(options.out)
    known = _read(options.known) if options.known else {}
    wanted = [f for f in FAMILIES if f.name in options.names or not options.names]
    left = [f for f in wanted if options.names or f.name not in rows]
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder)) if left else None
        for family in left:
            start = time.monotonic()
            assert table is not None
            row = table.row(family) | {"seconds": round(time.monotonic() - start, 1)}
            rows[family.name] = row
            print(f"{family.name}: {outcome(row)}, {row['seconds']} s", flush=True)
            _write(options.out, rows)
        if table is not None:
            table.forks.stop()
    if options.page:
        options.page.write_text(make_page(json.loads(options.out.read_text())), encoding="utf-8")
    return _judge([rows[f.name] for f in wanted], known)


def _judge(rows: Sequence[Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]]) -> int:
    """Print what is wrong; 1 if anything is."""
    wrong = [
        f"{row['name']}: {outcome(row)}; expected equal tokens and finite log-probabilities"
        for row in rows
        if row["hisparse"] == "served" and (row.get("equal", 3) < 3 or not row["finite"])
    ]
    for row in rows:
        before = known.get(row["name"])
        if before is not None and outcome(before) != outcome(row):
            wrong.append(f"{row['name']}: {outcome(row)}; expected {outcome(before)}, as before")
    for line in wrong:
        print(f"model_table: error: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a result by name, those of families that exist in their order."""
    if not path.exists():
        return {}
    rows = {row["name"]: row for row in json.loads(path.read_text())["families"]}
    return {f.name: rows[f.name] for f in FAMILIES if f.name in rows}


def _write(path: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    ordered = [rows[f.name] for f in FAMILIES if f.name in rows]
    result = {
        "command": "model_table",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "params": {"budget": _BUDGET, "long_prompts": _LONG},
        "families": ordered,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="model_table", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the result; continued")
    parser.add_argument("names", nargs="*", metavar="NAME", help="families; default: all")
    parser.add_argument("--page", type=Path, help="write this page from the result")
    parser.add_argument("--known", type=Path, help="an earlier result, which has to hold")
    return parser


if __name__ == "__main__":
    sys.exit(main())
