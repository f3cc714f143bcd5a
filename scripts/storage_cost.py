"""Measure what writing prefixes to a store adds to the decode steps of the same server.

``python -m scripts.storage_cost OUT.json --model NAME`` runs two servers, with a store and without.
In each pair both answer the same new documents, ``--turns`` of them, in alternating order. The
server with the store writes a document's pages while it decodes the answer. The time of an answer
is that from its first token to its last; a pair's is their sum. After each answer the script waits
until the writes have ended. It exits with 1 if the servers differ in a token, or if the upper end
of the ratio's 95% interval is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hisparse.doctor import provenance
from hisparse.eval.models import resolve
from hisparse.eval.texts import TEXTS, read_text
from hisparse_bench.server import ServerProcess
from scripts.pairs import LIMIT, PAIRS, ratio_of_pairs

__all__ = ["main"]

_PAGE = 16


def _server(
    arguments: argparse.Namespace, folder: Path, name: str, storage: Mapping[str, Any] | None
) -> ServerProcess:
    config = {"budget": arguments.budget, "host_memory": "2GiB", "device_memory": "1GiB"}
    flags = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "hisparse"]
    flags += ["--hisparse-config", json.dumps(config | ({"storage": storage} if storage else {}))]
    flags += ["--skip-tokenizer-init", "--max-running-requests", "2", "--sleep-on-idle"]
    return ServerProcess(resolve(arguments.model), folder / f"{name}.log", flags)


def _written(server: ServerProcess) -> float:
    return server.metrics().get("hisparse:storage_offloaded_pages_total", 0.0)


def _wait_until_written(server: ServerProcess, pages: float) -> None:
    end = time.monotonic() + 60
    while _written(server) < pages:
        if time.monotonic() > end:
            raise SystemExit("the document was not stored")
        # A server that is asked often is slower, also the next one.
        time.sleep(0.5)


def _measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[tuple[float, float]], bool]:
    """Seconds of each pair's answers without a store and with it, and whether tokens are equal."""
    text = "\n\n".join(map(read_text, TEXTS)) * 4
    ids = AutoTokenizer.from_pretrained(resolve(arguments.model))(text).input_ids
    needed = (arguments.pairs + 1) * arguments.turns * arguments.tokens
    ids = (ids * -(-needed // len(ids)))[:needed]
    store = {"path": str(folder / "store"), "timeout_s": 30.0}
    pairs, same = [], True
    with ExitStack() as stack:
        servers = [_server(arguments, folder, "off", None), _server(arguments, folder, "on", store)]
        for server in servers:
            stack.enter_context(server).start(ServerProcess.cpu_environment(os.cpu_count() or 1))
        turns = arguments.turns
        for pair in range(-1, arguments.pairs):
            seconds = [0.0, 0.0]
            for turn in range(turns):
                first = ((pair + 1) * turns + turn) * arguments.tokens
                prompt, answers = ids[first : first + arguments.tokens], {}
                # Slow drifts of the machine meet both.
                for at in (0, 1) if turn % 4 in (0, 3) else (1, 0):
                    pages = _written(servers[1]) + (len(prompt) - 1) // _PAGE
                    answer = servers[at].stream(prompt, arguments.output)
                    seconds[at] += answer.times_s[-1] - answer.times_s[0]
                    answers[at] = answer.ids
                    if at:
                        _wait_until_written(servers[1], pages)
                same &= answers[0] == answers[1]
            if pair >= 0:  # The first pair warms up.
                pairs.append((seconds[0], seconds[1]))
                print(f"{seconds[1] / seconds[0]:.3f}", flush=True)
    return pairs, same


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=int, choices=PAIRS, default=20)
    parser.add_argument("--turns", type=int, default=6, help="documents of a pair")
    parser.add_argument("--tokens", type=int, default=2000, help="of a document")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--budget", type=int, default=512)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=arguments.out.absolute().parent) as folder:
        pairs, same = _measure(arguments, Path(folder))
    ratio, (low, high) = ratio_of_pairs(pairs)
    result = {
        "command": "storage-cost",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "params": {k: v for k, v in vars(arguments).items() if k != "out"},
        "gate": "passed" if same else "failed",
        "ratio": ratio,
        "interval": [low, high],
        "pairs_s": pairs,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"ratio {ratio:.4f}, 95% interval {low:.4f} to {high:.4f}, limit {LIMIT}; "
        f"tokens {result['gate']}"
    )
    return int(high > LIMIT or not same)


if __name__ == "__main__":
    raise SystemExit(main())
