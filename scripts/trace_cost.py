"""Measure what recording a trace adds to a decode step on a CPU.

``python -m scripts.trace_cost OUT.json`` decodes with the same random requests twice, with a trace
and without. A step is the attention of all layers and no matrix product of a model; with
``--model NAME`` it is a step of a model that reads a text, by ``hisparse.transformers``. A pair has
16 steps of each kind. They take turns, so that other work on the machine meets both kinds, and
their order alternates by pair. The writer encodes and writes them at the end of the pair, and also
in between if it would otherwise begin on its own; that time counts as time with a trace. It exits
with 1 if the upper end of the ratio's 95% interval is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hisparse.doctor import provenance
from hisparse.engine.extensions.trace import Trace
from hisparse.eval.models import load, resolve
from hisparse.eval.texts import TEXTS, read_text
from hisparse.transformers import enable
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.shape import ModelShape
from scripts.pairs import LIMIT, PAIRS, ratio_of_pairs

__all__ = ["main"]

#: Less than what wakes the writer's thread, which would work in steps without a trace as well.
_WAIT_S, _WAIT_STEPS, _WAIT_BYTES = 0.7, 24, 3 << 20


#: Does a step and returns its seconds.
Step = Callable[[], float]


def _attention(arguments: argparse.Namespace, trace: Path | None) -> tuple[Step, Any]:
    """Steps of attention alone."""
    shape = ModelShape(layers=arguments.layers)
    steps = arguments.tokens * (arguments.pairs + 1)
    requests = RandomRequests(
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
    kv = requests.kv
    size = (kv.num_layers, requests.batch, kv.num_q_heads, kv.head_dim)

    def step() -> float:
        queries, token = torch.randn(size).to(kv.dtype), requests.new_token()
        start = time.perf_counter()
        requests.begin_token()
        for layer in range(kv.num_layers):
            requests.coordinator.attention(layer, queries[layer], *token)
        requests.coordinator.forward_end()
        return time.perf_counter() - start

    return step, requests.coordinator


def _model(arguments: argparse.Namespace, trace: Path | None) -> tuple[Step, Any]:
    """Steps of a model."""
    folder = resolve(arguments.model)
    model = load(AutoModelForCausalLM, folder).eval()
    needed = arguments.context + arguments.tokens * (arguments.pairs + 1)
    words = "\n\n".join(map(read_text, TEXTS))
    tokens = torch.tensor([load(AutoTokenizer, folder)(words)["input_ids"][:needed]])
    settings: dict[str, Any] = {"algorithm": arguments.algorithm, "budget": arguments.budget}
    if trace is not None:
        settings["trace"] = str(trace)
    cache = enable(model, settings, max_length=needed)
    done = arguments.context

    @torch.no_grad()
    def step() -> float:
        nonlocal done
        start = time.perf_counter()
        model(tokens[:, done : done + 1], past_key_values=cache, logits_to_keep=1)
        done += 1
        return time.perf_counter() - start

    with torch.no_grad():
        model(tokens[:, :done], past_key_values=cache, logits_to_keep=1)
    return step, cache.coordinator


def _pair(
    steps: Sequence[tuple[int, Step]], tokens: int, trace: Trace, flush_steps: int
) -> tuple[float, float]:
    """Seconds of ``tokens`` steps without a trace and with it; steps take turns in their order."""
    seconds = [0.0, 0.0]

    def flush() -> float:
        start = time.perf_counter()
        trace.flush()
        end = time.perf_counter()
        seconds[1] += end - start
        return end

    flushed = flush()
    for token in range(1, tokens + 1):
        for at, step in steps:
            seconds[at] += step()
            late = time.perf_counter() - flushed > _WAIT_S
            if at and (late or token % flush_steps == 0):
                flushed = flush()
    flush()
    return seconds[0], seconds[1]


def main(words: list[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, choices=PAIRS, default=20)
    parser.add_argument("--tokens", type=int, default=16, help="of a pair, of each kind")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--algorithm", default="sketch")
    parser.add_argument("--model", help="a model's steps in place of attention alone")
    arguments = parser.parse_args(words)
    make, pairs = _attention if arguments.model is None else _model, []
    with tempfile.TemporaryDirectory() as folder:
        off, _ = make(arguments, None)
        on, coordinator = make(arguments, Path(folder) / "a.trace")
        (trace,) = (x for x in coordinator.extensions if isinstance(x, Trace))
        policy = coordinator.policy
        step_bytes = 4 * policy.kv.num_layers * arguments.batch * policy.heads * policy.max_pages
        flush_steps = max(1, min(_WAIT_STEPS, _WAIT_BYTES // step_bytes))
        for pair in range(-1, arguments.pairs):
            steps = [(0, off), (1, on)]
            found = _pair(steps if pair % 2 else steps[::-1], arguments.tokens, trace, flush_steps)
            if pair >= 0:  # The first pair warms up.
                pairs.append(found)
        trace.close()
        stats = coordinator.stats().extensions
        num_bytes = trace.path.stat().st_size
    ratio, (low, high) = ratio_of_pairs(pairs)
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
    print(f"ratio {ratio:.4f}, 95% interval {low:.4f} to {high:.4f}, limit {LIMIT}")
    return int(high > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
