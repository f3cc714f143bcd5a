"""SGLang on a GPU, eager and captured: ``python -m tests.kernels.gpu.served [load]``.

The model has the shapes of Llama-3.1-8B, four layers and random weights, so no hub is needed. All
servers start at once, and are asked one after the other. The gate: each answers, the captured one
gives the tokens of the eager one, and hisparse's dense path begins with those of SGLang's own
backend. ``load`` serves all 32 layers to 8 long prompts at once instead, which takes 90 GB of the
GPU and 70 GB of host memory. Prints the JSON of a benchmark, and to stderr a line for each server.
Other arguments are flags of SGLang's own server, such as ``--attention-backend triton``.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from http.client import HTTPException
from itertools import takewhile
from pathlib import Path
from typing import Any

from hisparse.errors import HiSparseError, one_line
from hisparse_bench.report import Case, Report, Result
from hisparse_bench.server import Generation, ServerProcess

CONTEXT, TOKENS, BUDGET, REPEATS = 16384, 64, 2048, 3
#: The longest that servers may take to start, all at once.
START_S = 120.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
#: ``load``: the whole model, and the prompts that it is asked at once.
WHOLE_MODEL = MODEL | {
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LOAD_REQUESTS, LOAD_CONTEXT, LOAD_TOKENS = 8, 61440, 128
#: Settings of hisparse by server; None: SGLang's own backend.
SERVERS: Mapping[str, Mapping[str, Any] | None] = {
    "sglang": None,
    "dense": {"min_sparse_context": 32768},
    "eager": {"cuda_graph": False},
    "graphs": {"cuda_graph": True},
    "dipr": {"algorithm": "dipr", "cuda_graph": True},
    "quest": {"algorithm": "quest", "cuda_graph": True},
}


def flags_of(
    config: Mapping[str, Any] | None,
    own: Sequence[str] = (),
    *,
    requests: int = 4,
    tokens: int = 4 * CONTEXT,
    memory: Mapping[str, str] = {"host_memory": "8GiB", "device_memory": "4GiB"},
) -> list[str]:
    """Flags of one server.

    Args:
        config: settings of hisparse; None: SGLang's own backend.
        own: more flags of that backend.
        requests, tokens: the most at once.
        memory: what hisparse may take.
    """
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--load-format", "dummy"]
    flags += ["--skip-tokenizer-init", "--mem-fraction-static", "0.9", "--page-size", "16"]
    # A short start: three graphs, where SGLang would capture 36, and 58 for prompts.
    flags += ["--max-running-requests", str(requests), "--cuda-graph-max-bs-decode", str(requests)]
    flags += ["--disable-prefill-cuda-graph", "--max-total-tokens", str(tokens)]
    if config is None:
        return [*flags, *own]
    settings = {"budget": BUDGET} | dict(memory) | dict(config)
    return [*flags, "--attention-backend", "hisparse", "--hisparse-config", json.dumps(settings)]


def runs_of(server: ServerProcess) -> list[Generation]:
    """The first request of a server warms it up."""
    prompt = [7 * i % 31000 for i in range(CONTEXT)]
    found = []
    for _ in range(REPEATS + 1):
        server.flush_cache()
        found.append(server.stream(prompt, TOKENS))
    return found


def all_runs(model: Path, own: Sequence[str]) -> dict[str, list[Generation]]:
    """Runs of the servers; without one that fails, whose error and end of the log are printed."""
    runs = {}
    logs = {name: model / f"{name}.log" for name in SERVERS}
    with ThreadPoolExecutor(len(SERVERS)) as pool, ExitStack() as stack:
        servers = {
            name: stack.enter_context(ServerProcess(str(model), logs[name], flags_of(config, own)))
            for name, config in SERVERS.items()
        }
        starts = [pool.submit(server.start, {}) for server in servers.values()]
        wait(starts, START_S)
        for start, (name, server) in zip(starts, servers.items(), strict=True):
            try:
                start.result(timeout=0)
                runs[name] = these = runs_of(server)
                times = [f"{x.ttft_s * 1e3:.1f}+{x.time_per_token_s * 1e3:.2f} ms" for x in these]
                print(f"{name}: {', '.join(times)}, {these[0].ids[:8]}", file=sys.stderr)
            except (HiSparseError, HTTPException, OSError, LookupError, ValueError) as error:
                end = logs[name].read_text(errors="replace").splitlines()[-20:]
                print(f"{name}: {one_line(error)}", *end, sep="\n", file=sys.stderr)
    return runs


def cases_of(runs: Mapping[str, list[Generation]]) -> list[Case]:
    """Time to first token and time per token of every server."""
    ids = {name: runs[name][0].ids if name in runs else [] for name in SERVERS}
    right = (
        all(ids.values())
        and ids["graphs"] == ids["eager"]
        and ids["dense"][:1] == ids["sglang"][:1]
    )
    gate = "passed" if right else "failed"
    equal = {
        name: len(
            list(
                takewhile(lambda pair: pair[0] == pair[1], zip(these, ids["sglang"], strict=False))
            )
        )
        for name, these in ids.items()
    }
    params: dict[str, Any] = {"context": CONTEXT, "budget": BUDGET, "tokens": TOKENS, "layers": 4}
    params |= {"first_tokens_equal_to_sglang": equal}
    return [
        Case(
            name=name,
            params=params,
            gate=gate,
            results=[
                Result.of(impl, [getattr(run, field) for run in these[1:]])
                for impl, these in runs.items()
            ],
        )
        for name, field in (("ttft", "ttft_s"), ("time_per_token", "time_per_token_s"))
    ]


def load_runs_of(model: Path, name: str, own: Sequence[str]) -> list[Generation]:
    """The answers to prompts that a server gets at once, after a short one."""
    flags = flags_of(
        SERVERS[name],
        own,
        requests=LOAD_REQUESTS,
        tokens=LOAD_REQUESTS * (LOAD_CONTEXT + LOAD_TOKENS + 64),
        memory={"host_memory": "66GiB", "device_memory": "16GiB"},
    )
    numbers = random.Random(0)
    prompts = [numbers.choices(range(10, 31000), k=LOAD_CONTEXT) for _ in range(LOAD_REQUESTS)]
    with ServerProcess(str(model), model / f"{name}.log", flags) as server:
        server.start({})
        server.stream(prompts[0][: 4 * BUDGET], LOAD_TOKENS)
        with ThreadPoolExecutor(LOAD_REQUESTS) as pool:
            return list(pool.map(lambda prompt: server.stream(prompt, LOAD_TOKENS), prompts))


def load_cases_of(runs: Mapping[str, list[Generation]]) -> list[Case]:
    """Time per token, and time to the last first token.

    The gate: each answer's first token, which no selection decides, is SGLang's own.
    """
    first = [[run.ids[:1] for run in these] for these in runs.values()]
    shape = {"context": LOAD_CONTEXT, "requests": LOAD_REQUESTS, "layers": 32}
    params = shape | {"budget": BUDGET, "tokens": LOAD_TOKENS}
    gate = "passed" if first[0][0] and first[0] == first[-1] else "failed"
    times = {
        "time_per_token": {n: [x.time_per_token_s for x in each] for n, each in runs.items()},
        "last_ttft": {n: [max(x.ttft_s for x in each)] for n, each in runs.items()},
    }
    return [
        Case(
            name=name,
            params=params,
            gate=gate,
            results=[Result.of(impl, seconds) for impl, seconds in found.items()],
        )
        for name, found in times.items()
    ]


def main(arguments: list[str]) -> int:
    """Exit code 0 if the gate passed."""
    load = arguments[:1] == ["load"]
    own = arguments[load:]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(WHOLE_MODEL if load else MODEL))
        if load:
            cases = load_cases_of({n: load_runs_of(model, n, own) for n in ("sglang", "graphs")})
        else:
            cases = cases_of(all_runs(model, own))
    print(Report(command="bench serve", device="cuda", cases=cases).to_json())
    return 0 if cases[0].gate == "passed" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
