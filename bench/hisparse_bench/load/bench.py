"""``hisparse bench serve``: the same load on each contender's server, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from hisparse.errors import HiSparseError, one_line
from hisparse.units import format_bytes
from hisparse_bench.load.client import Request, run_load
from hisparse_bench.load.contenders import DENSE, Contender, contenders
from hisparse_bench.load.gate import (
    NUM_TOKENS,
    Distance,
    Reference,
    Step,
    compare_answers,
    measure_distance,
    measure_reference,
    measure_steps,
)
from hisparse_bench.load.options import LoadOptions, round_up
from hisparse_bench.load.prompts import Prompts
from hisparse_bench.load.report import UNCHECKED, LoadResult
from hisparse_bench.load.running import RunningServer
from hisparse_bench.load.served_model import ServedModel
from hisparse_bench.load.usage import Usage
from hisparse_bench.report import Case, Result
from hisparse_bench.server import ServerClient, ServerProcess

__all__ = ["LoadBench"]

#: Prompts of each context that the gate compares.
_NUM_CHECKED = 2
#: Tokens of the request before the first load, above the budget.
_WARM_UP = 64


class LoadBench:
    """Runs one set of options; :attr:`cases` has what is finished, also if it is interrupted.

    Args:
        options: what to run.
        progress: shows what happens.
    """

    def __init__(self, options: LoadOptions, progress: Progress) -> None:
        self.cases: list[Case] = []
        self._progress = progress
        self._task = progress.add_task("reading the model", total=None)
        self._running = list(map(RunningServer.connect, options.url))
        dtype = None
        if self._running:
            name = options.model
            for server in self._running:
                name = server.check_model(name)
            options = replace(options, model=name, device=self._running[-1].device)
            dtype = self._running[-1].dtype
        self._model = ServedModel.load(options, self._say, dtype)
        self._prompts = Prompts.of(self._model.tokenizer, options.text)
        if options.trace and not options.requests:
            self._options = options
            options = replace(options, requests=len(self._requests(0)))
        self._options = options
        self._contenders = [] if options.url else contenders(options, self._model)
        self._references: dict[int, list[Reference]] = {}
        self._steps: dict[int, list[list[Step]]] = {}
        self._distances: dict[tuple[str, int], Distance] = {}
        self._compared: dict[int, int] = {}

    @property
    def device(self) -> str:
        """The servers' device, "cpu" or "cuda"."""
        return self._options.device

    def run(self) -> None:
        """Check all contenders, then measure them."""
        if self._options.url:
            self._run_urls()
            self._progress.remove_task(self._task)
            return
        with tempfile.TemporaryDirectory(prefix="hisparse-bench-") as folder:
            failure = self._check(Path(folder))
            for device_bytes, contexts in self._memories():
                cells = [(context, load) for context in contexts for load in self._options.loads]
                cases = [self._case(device_bytes, *cell, failure) for cell in cells]
                if failure is not None:
                    self.cases += cases
                    continue
                for contender in self._contenders:
                    self._measure(contender, device_bytes, cells, cases, Path(folder))
        self._progress.remove_task(self._task)

    def _memories(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Device bytes of the servers, and the contexts that each serves."""
        options = self._options
        contexts = options.context if not options.trace else (0,)
        if options.device_bytes:
            yield from ((num_bytes, contexts) for num_bytes in options.device_bytes)
            return
        counts = options.dense_requests or (options.most_running,)
        for context in contexts:
            for count in counts:
                yield count * self._dense_bytes(context), (context,)

    def _dense_bytes(self, context: int) -> int:
        """KV bytes of a dense request of a context; of a trace, of the longest request."""
        longest = max(map(_tokens, self._requests(context, 1 if context else 0)))
        return round_up(longest + 1) * self._model.kv_token_bytes

    def _requests(self, context: int, count: int = 0) -> list[Request]:
        """Requests of a context; 0: those of the trace."""
        options = self._options
        if options.trace:
            return self._prompts.trace(options.trace, options.requests, self._model.longest)
        count = count or max(map(options.num_requests, options.loads))
        return self._prompts.equal(count, context, options.shared_prefix, options.output)

    def _run_urls(self) -> None:
        """Measure running servers; of two the first is the reference of a check."""
        servers = self._running
        gate, failure = UNCHECKED, None
        if len(servers) == 2:
            gate, failure = "passed", self._check_running(*servers)
        for server in servers if failure is None else ():
            self._warm_up(server, self._contexts[0])
        for context in self._contexts:
            for load in self._options.loads:
                case = self._case(None, context, load, failure, gate)
                self.cases.append(case)
                for i, server in enumerate(servers if failure is None else ()):
                    key = server.url if i else None
                    self._load_case(case, server, server.url, key, context, load)

    def _check_running(self, dense: RunningServer, other: RunningServer) -> str | None:
        """Compare answers to prompts that fit the budget; measure the reference of distances."""
        for context in self._contexts:
            prompts = [x.ids for x in self._requests(context)[:_NUM_CHECKED]]
            short = max(map(len, prompts))
            if other.exact_tokens is not None:
                short = max(1, min(short, other.exact_tokens - NUM_TOKENS))
            self._say(f"check: prompts of at most {short} tokens")
            pairs = [measure_reference(dense, x[:short], self._options.output) for x in prompts]
            found = compare_answers(other, pairs, self._options.device)
            self._compared[context] = found.compared
            if found.failure is not None:
                return f"{other.url}, prompts of at most {short} tokens: {found.failure}"
            self._say(f"check: dense answers at context {context or 'of the trace'}")
            references = [measure_reference(dense, x, self._options.output) for x in prompts]
            self._references[context] = references
            self._steps[context] = [measure_steps(dense, x) for x in references]
        return None

    def _case(
        self,
        device_bytes: int | None,
        context: int,
        load: dict[str, float],
        failure: str | None,
        gate: str = "passed",
    ) -> Case:
        options = self._options
        requests = self._requests(context, options.num_requests(load))
        what = ", ".join(f"{name} {value:g}" for name, value in load.items()) or "trace's arrivals"
        where = f"context {context}" if context else "trace"
        params: dict[str, Any] = {
            "model": options.model,
            "context": context or None,
            "output": options.output,
            **load,
            "requests": len(requests),
            "shared_prefix": options.shared_prefix,
            "repeat_prompts": options.repeat_prompts,
            "trace": options.trace,
            "budget": self._budget,
            "device_memory": device_bytes,
            "dense_requests": None,
            "kv_token_bytes": self._model.kv_token_bytes,
            "threads": None if self._running else options.num_threads,
            "compared_tokens": self._compared.get(context),
            "failures": {},
        }
        if failure is not None:
            params["failure"] = failure
        name = f"{options.model}, {where}, {what}"
        if device_bytes is not None:
            tokens = device_bytes // self._model.kv_token_bytes
            if not options.device_bytes:
                params["dense_requests"] = device_bytes // self._dense_bytes(context)
            params["dense_holds"] = holds = self._dense_holds(tokens, context, requests)
            name += f", {format_bytes(device_bytes)} = {tokens:,} dense tokens, which hold {holds} "
            name += f"of the {len(requests)} requests"
        gate = gate if failure is None else "failed"
        return Case(name=name, params=params, gate=gate, results=[])

    @property
    def _budget(self) -> int | None:
        """Tokens that a decode step of hisparse attends."""
        if self._running:
            return self._running[-1].budget
        return self._model.index_top_k or self._options.budget

    def _dense_holds(self, tokens: int, context: int, requests: Sequence[Request]) -> int:
        """Requests whose KV a dense cache of ``tokens`` holds at once, their prefix once."""
        prefix = int(self._options.shared_prefix * context)
        each = round_up(max(map(_tokens, requests)) - prefix)
        return min(len(requests), max(0, tokens - prefix) // each)

    def _check(self, folder: Path) -> str | None:
        """The gate: why no figure is shown, or None."""
        checked = [
            [x.ids for x in self._requests(context)[:_NUM_CHECKED]] for context in self._contexts
        ]
        longest = max(len(ids) for prompts in checked for ids in prompts)
        tokens = (_NUM_CHECKED + 1) * round_up(longest + NUM_TOKENS + 16)
        dense = Contender(options=self._options, model=self._model, algorithm=DENSE)
        with self._server(dense.exact_flags(tokens), folder / "dense.log") as server:
            for context, prompts in zip(self._contexts, checked, strict=True):
                self._say(f"check: dense answers at context {context or 'of the trace'}")
                self._references[context] = [
                    measure_reference(server, ids, self._options.output) for ids in prompts
                ]
        # Sizes of device buffers are no part of this check.
        by_algorithm = {x.algorithm: x for x in self._contenders if x.algorithm != DENSE}
        for name, contender in by_algorithm.items():
            flags = contender.exact_flags(tokens)
            with self._server(flags, folder / "exact.log") as server:
                self._say(f"check: {name} with all tokens in its budget")
                for context, references in self._references.items():
                    found = compare_answers(server, references, self._options.device)
                    known = self._compared.get(context, found.compared)
                    self._compared[context] = min(known, found.compared)
                    if found.failure is not None:
                        return f"{name}, budget >= context: {found.failure}"
                if not self._steps:
                    self._say("check: decode steps that attend all tokens")
                    self._steps = {
                        context: [measure_steps(server, x) for x in references]
                        for context, references in self._references.items()
                    }
        return None

    @property
    def _contexts(self) -> Sequence[int]:
        return (0,) if self._options.trace else self._options.context

    def _measure(
        self,
        contender: Contender,
        device_bytes: int,
        cells: Sequence[tuple[int, dict[str, float]]],
        cases: Sequence[Case],
        folder: Path,
    ) -> None:
        """All loads on one server; a case appears in the report with its first result."""
        flags = contender.flags(device_bytes, self._pool_tokens(cells))
        with ExitStack() as stack:
            try:
                server = stack.enter_context(self._server(flags, folder / "server.log"))
            except HiSparseError as error:
                for case in cases:
                    case.params["failures"][contender.name] = f"did not start: {_reason(error)}"
                    self._add(case)
                return
            self._warm_up(server, cells[0][0])
            key = None if contender.algorithm == DENSE else contender.algorithm
            for (context, load), case in zip(cells, cases, strict=True):
                self._load_case(case, server, contender.name, key, context, load)
                self._add(case)

    def _load_case(
        self,
        case: Case,
        server: ServerClient,
        name: str,
        key: str | None,
        context: int,
        load: dict[str, float],
    ) -> None:
        """Add the result of a load, or why there is none; ``key``: see :meth:`_distance`."""
        try:
            distance = None if key is None else self._distance(server, key, context)
            result = self._load(server, name, context, load, case.name, distance)
        except (HiSparseError, OSError) as error:  # Such as a server that ended.
            case.params["failures"][name] = one_line(error)
            return
        case.results.append(result)
        if errors := result.load["errors"]:
            case.params["failures"][name] = "; ".join(errors)

    def _warm_up(self, server: ServerClient, context: int) -> None:
        """One request that is not timed, alike for all servers: sparse decode steps of hisparse."""
        ids = self._requests(context, 1)[0].ids
        with suppress(HiSparseError, OSError):  # It may not fit; a load says more.
            server.generate([ids[: (self._budget or 0) + _WARM_UP]], 8)

    def _add(self, case: Case) -> None:
        if all(case is not known for known in self.cases):
            self.cases.append(case)

    def _pool_tokens(self, cells: Sequence[tuple[int, dict[str, float]]]) -> int:
        """Tokens of all requests that run at once, or of all if their prompts are sent again."""
        options, most = self._options, 0
        for context, load in cells:
            requests = self._requests(context, options.num_requests(load))
            running = len(requests)
            if not options.repeat_prompts:
                running = min(running, options.most_running)
            longest = max(map(_tokens, requests))
            prefix = int(options.shared_prefix * context)
            most = max(most, prefix + running * (round_up(longest - prefix) + 32))
        return round_up(most + 64)

    def _load(
        self,
        server: ServerClient,
        contender: str,
        context: int,
        load: dict[str, float],
        name: str,
        distance: Distance | None,
    ) -> LoadResult:
        options = self._options
        requests = self._requests(context, options.num_requests(load))
        self._say(f"{contender}: before {name}")
        server.flush_cache()
        prefix = int(options.shared_prefix * context)
        known = [x.ids for x in requests] if options.repeat_prompts else [requests[0].ids[:prefix]]
        for ids in known:
            if ids:
                with suppress(HiSparseError):  # A refusal is counted when it is timed.
                    server.generate([ids], 1)
        self._say(f"{contender}: {name}", total=len(requests))
        before = Usage.read(server)
        run = run_load(
            server.url,
            requests,
            self._model.tokenizer,
            load,
            options.slos_ms,
            lambda: self._progress.advance(self._task),
        )
        usage = Usage.read(server)
        times = Result.of(contender, run.tpot_s or [0.0])
        result = LoadResult(
            impl=times.impl,
            median_us=times.median_us,
            p10_us=times.p10_us,
            p90_us=times.p90_us,
            load=run.fields,
            memory=usage.memory(self._model.kv_token_bytes),
            cache=usage.moved_since(before),
            quality={} if distance is None else asdict(distance),
        )
        self._progress.console.print(
            f"{contender}: {name}: {result.throughput:.4g} tokens/s", highlight=False
        )
        return result

    def _distance(self, server: ServerClient, contender: str, context: int) -> Distance:
        """Measured once for a context: selections depend neither on load nor on memory."""
        key = (contender, context)
        if key not in self._distances:
            pairs = zip(self._references[context], self._steps[context], strict=True)
            found = [measure_distance(server, *pair) for pair in pairs]
            self._distances[key] = Distance.mean(found)
        return self._distances[key]

    @contextmanager
    def _server(self, flags: Sequence[str], log: Path) -> Iterator[ServerProcess]:
        self._say("starting a server")
        options = self._options
        on_cpu = options.device == "cpu"
        with ServerProcess(self._model.folder, log, flags) as server:
            server.start(ServerProcess.cpu_environment(options.num_threads) if on_cpu else {})
            yield server

    def _say(self, text: str, total: int | None = None) -> None:
        self._progress.reset(self._task, description=text, total=total)


def _tokens(request: Request) -> int:
    return len(request.ids) + request.output


def _reason(error: HiSparseError) -> str:
    """The line of a server's log that says why it ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines[1:] if "rror" in line]
    return (named or lines)[-1][:300]
