"""Measure what recording a trace adds to a decode step on a CPU.

``python -m scripts.trace_cost OUT.json`` decodes with the same random requests twice, with a trace
and without, in pairs of blocks whose order alternates. A block with a trace ends when the writer
has compressed and written all of it. A step is the attention of all layers and no matrix product of
a model, so that the share of a whole step is smaller. It exits with 1 if the upper end of the
ratio's 95% interval is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hisparse.doctor import provenance
from hisparse.engine.extensions.trace import Trace
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.shape import ModelShape

__all__ = ["main"]

_LIMIT = 1.03
#: Student's t for 95%, by pairs.
_T95 = {20: 2.093, 40: 2.023}


def _requests(shape: ModelShape, arguments: argparse.Namespace, trace: Path | None) -> Any:
    steps = arguments.tokens * arguments.pairs + 2 * arguments.tokens
    return RandomRequests(
        kv=shape.kv,
        batch=arguments.batch,
        context=arguments.context,
        budget=arguments.budget,
        row_tokens=2 * arguments.budget,
        max_new_tokens=-(-steps // shape.page_size) * shape.page_size,
        device=torch.device("cpu"),
        algorithm=arguments.algorithm,
        extensions={} if trace is None else {"trace": str(trace)},
    )


def _seconds(requests: Any, tokens: int, trace: Trace | None) -> float:
    """Time of a block of tokens in all layers, until the writer of the trace is idle again."""
    kv, total = requests.kv, 0.0
    shape = (kv.num_layers, requests.batch, kv.num_q_heads, kv.head_dim)
    for _ in range(tokens):
        queries, token = torch.randn(shape).to(kv.dtype), requests.new_token()
        start = time.perf_counter()
        requests.begin_token()
        for layer in range(kv.num_layers):
            requests.coordinator.attention(layer, queries[layer], *token)
        requests.coordinator.forward_end()
        total += time.perf_counter() - start
    start = time.perf_counter()
    if trace is not None:
        trace.flush()
    return total + time.perf_counter() - start


def main(words: list[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, choices=sorted(_T95), default=20)
    parser.add_argument("--tokens", type=int, default=16, help="of a block")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--algorithm", default="sketch")
    arguments = parser.parse_args(words)
    shape = ModelShape(layers=arguments.layers)
    with tempfile.TemporaryDirectory() as folder:
        off = _requests(shape, arguments, None)
        on = _requests(shape, arguments, Path(folder) / "a.trace")
        (trace,) = (x for x in on.coordinator.extensions if isinstance(x, Trace))
        traces, pairs = {id(off): None, id(on): trace}, []
        for pair in range(-1, arguments.pairs):
            order = (off, on) if pair % 2 else (on, off)
            found = {id(x): _seconds(x, arguments.tokens, traces[id(x)]) for x in order}
            if pair >= 0:  # The first pair warms up.
                pairs.append((found[id(off)], found[id(on)]))
        trace.close()
        stats = on.coordinator.stats().extensions
        num_bytes = trace.path.stat().st_size
    logs = [math.log(with_trace / without) for without, with_trace in pairs]
    half = _T95[arguments.pairs] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    ratio, low, high = (math.exp(x) for x in (mean, mean - half, mean + half))
    result = {
        "command": "trace_cost",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "params": {k: v for k, v in vars(arguments).items() if k != "out"}
        | {"threads": torch.get_num_threads()},
        "ratio": ratio,
        "interval": [low, high],
        "pairs_ms": [[1000 * x for x in pair] for pair in pairs],
        "steps": stats["trace_steps"],
        "dropped_steps": stats["trace_dropped_steps"],
        "bytes": num_bytes,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"ratio {ratio:.4f}, 95% interval {low:.4f} to {high:.4f}, limit {_LIMIT}")
    return int(high > _LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
