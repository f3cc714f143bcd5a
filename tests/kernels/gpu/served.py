"""SGLang on a GPU with CUDA graphs and overlap on: ``python -m tests.kernels.gpu.served``.

The model has the shapes of Llama-3.1-8B, four layers and random weights, so no hub is needed. The
gate: the captured server gives the tokens of the eager one, and hisparse's dense path begins with
those of SGLang's own backend. Prints the JSON of a benchmark.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hisparse_bench.report import Case, Report, Result
from hisparse_bench.server import Generation, ServerProcess

CONTEXT, TOKENS, BUDGET, REPEATS = 16384, 64, 2048, 3
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
#: Settings of hisparse by server; None: SGLang's own backend.
SERVERS: Mapping[str, Mapping[str, Any] | None] = {
    "sglang": None,
    "dense": {"min_sparse_context": 32768},
    "eager": {"cuda_graph": False, "overlap": False},
    "graphs": {"cuda_graph": True, "overlap": False},
    "graphs_overlap": {"cuda_graph": True, "overlap": True},
}


def flags_of(config: Mapping[str, Any] | None, device: str = "cuda") -> list[str]:
    """Flags of one server."""
    flags = ["--device", device, "--dtype", "bfloat16", "--load-format", "dummy"]
    flags += ["--skip-tokenizer-init", "--mem-fraction-static", "0.5", "--page-size", "16"]
    # A short start: three graphs, where SGLang would capture 36, and 58 for prompts.
    flags += ["--max-running-requests", "4", "--cuda-graph-max-bs-decode", "4"]
    flags += ["--disable-prefill-cuda-graph", "--max-total-tokens", str(4 * CONTEXT)]
    if config is None:
        return flags
    settings = {"budget": BUDGET, "host_memory": "8GiB", "device_memory": "4GiB"} | dict(config)
    return [*flags, "--attention-backend", "hisparse", "--hisparse-config", json.dumps(settings)]


def runs_of(model: Path, name: str) -> list[Generation]:
    """The first request of a server warms it up."""
    prompt = [7 * i % 31000 for i in range(CONTEXT)]
    with ServerProcess(str(model), model / f"{name}.log", flags_of(SERVERS[name])) as server:
        server.start({})
        found = []
        for _ in range(REPEATS + 1):
            server.flush_cache()
            found.append(server.stream(prompt, TOKENS))
    return found


def cases_of(runs: Mapping[str, list[Generation]]) -> list[Case]:
    """Time to first token and time per token of every server."""
    ids = {name: these[0].ids for name, these in runs.items()}
    same = ids["graphs"] == ids["eager"] == ids["graphs_overlap"]
    gate = "passed" if ids["eager"] and same and ids["dense"][:1] == ids["sglang"][:1] else "failed"
    params = {"context": CONTEXT, "budget": BUDGET, "tokens": TOKENS, "layers": 4}
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


def main() -> int:
    """Exit code 0 if the gate passed. A server that does not start is an error, with its log."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(MODEL))
        runs = {name: runs_of(model, name) for name in SERVERS}
    cases = cases_of(runs)
    print(Report(command="bench serve", device="cuda", cases=cases).to_json())
    return 0 if cases[0].gate == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
