"""``hisparse bench serve``: one long request to the SGLang server, dense and sparse."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse_bench.report import Case, Report, Result
from hisparse_bench.server import Generation, ServerProcess

__all__ = ["ServeBench"]

#: Implementation to its ``--attention-backend``.
_BACKENDS = {
    "torch_native": "torch_native",
    "hisparse_dense": "hisparse",
    "hisparse": "hisparse",
}


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """SGLang's dense backend, hisparse's dense path and hisparse on the same prompt.

    Attributes:
        model: folder or hub id.
        prompt: token ids.
        budget: budget of the sparse run, tokens.
        num_tokens: tokens to generate.
        repeats: timed requests of each implementation, after one that is not timed.
        num_threads: CPU threads of each server.
    """

    model: str
    prompt: Sequence[int]
    budget: int
    num_tokens: int
    repeats: int
    num_threads: int

    def run(self, console: Console) -> Report:
        """Time requests to all servers in turns, so that a slow phase of the host affects all."""
        runs: dict[str, list[Generation]] = {impl: [] for impl in _BACKENDS}
        with ExitStack() as stack:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hisparse-bench-")))
            servers = {}
            for impl in _BACKENDS:
                with console.status(f"starting {impl}"):
                    servers[impl] = stack.enter_context(self._server(impl, logs))
                    servers[impl].start(ServerProcess.cpu_environment(self.num_threads))
            for repeat in range(self.repeats + 1):
                for impl, server in servers.items():
                    with console.status(f"{impl}, {repeat} of {self.repeats} timed"):
                        server.flush_cache()
                        runs[impl].append(server.stream(self.prompt, self.num_tokens))
        return Report(command="bench serve", device="cpu", cases=self._cases(runs))

    def _server(self, impl: str, logs: Path) -> ServerProcess:
        flags = ["--device", "cpu", "--dtype", "float32", "--skip-server-warmup"]
        flags += ["--skip-tokenizer-init", "--sleep-on-idle"]
        flags += ["--attention-backend", _BACKENDS[impl]]
        if impl == "torch_native":
            flags += ["--max-total-tokens", str(2 * self._context)]
        else:
            flags += ["--hisparse-config", json.dumps(self._config(impl))]
        return ServerProcess(self.model, logs / f"{impl}.log", flags)

    @property
    def _context(self) -> int:
        return len(self.prompt) + self.num_tokens

    def _config(self, impl: str) -> Mapping[str, Any]:
        config: dict[str, Any] = {
            "budget": self.budget,
            "host_memory": "2GiB",
            "device_memory": "1GiB",
        }
        if impl == "hisparse_dense":
            config["min_sparse_context"] = self._context + 1
        return config

    def _cases(self, runs: Mapping[str, Sequence[Generation]]) -> list[Case]:
        """Cases with their gate: dense tokens agree, and so does the first token of sparse runs."""
        reference = runs["torch_native"][0].ids
        exact = all(run.ids == reference for run in runs["hisparse_dense"])
        starts = all(run.ids[:1] == reference[:1] for run in runs["hisparse"])
        gate = "passed" if reference and exact and starts else "failed"
        params = {
            "model": Path(self.model).name,
            "context": len(self.prompt),
            "budget": self.budget,
            "tokens": self.num_tokens,
            "requests": 1,
            "repeats": self.repeats,
            "threads": self.num_threads,
        }
        timed = {impl: list(all_runs)[1:] for impl, all_runs in runs.items()}
        return [
            Case(
                name=name,
                params=params,
                gate=gate,
                results=[
                    Result.of(impl, [getattr(run, field) for run in these])
                    for impl, these in timed.items()
                ],
            )
            for name, field in (("ttft", "ttft_s"), ("time_per_token", "time_per_token_s"))
        ]
