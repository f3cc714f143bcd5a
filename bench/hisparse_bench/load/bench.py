"""``hisparse bench serve``: the same load on each contender's server, one after the other."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from hisparse.errors import HiSparseError
from hisparse.units import format_bytes
from hisparse_bench.fork_server import ForkServer
from hisparse_bench.load.client import Prompts, Request, run_load
from hisparse_bench.load.contenders import DENSE, Contender, ServedModel, contenders
from hisparse_bench.load.gate import BROKEN, Check, reason
from hisparse_bench.load.options import LoadOptions, round_up
from hisparse_bench.load.report import UNCHECKED, LoadResult, Usage
from hisparse_bench.report import Case, Result
from hisparse_bench.server import RunningServer, ServerClient, ServerProcess

#: Prompts of each context that the gate compares.
_NUM_CHECKED = 2
#: Tokens of a prompt beyond which it compares one: a CPU takes minutes for each.
_LONG = 8192
#: Memory of a request of the stand-in for dense, in that of its KV: it has staging and tables too,
#: and its requests share no device pages.
_STAND_IN = 1.25
#: Tokens of the request before the first load, above the budget.
_WARM_UP = 64


class Status:
    """The state of one run: a bar on a terminal, elsewhere a line for each change.

    Args:
        progress: shows the bar.
        run: which run of how many, such as "run 2 of 4"; empty for a single one.

    Attributes:
        servers: how many the run starts.
    """

    servers = 0

    def __init__(self, progress: Progress, run: str = "") -> None:
        self._progress, self._run = progress, run
        self._started = 0
        self._task = progress.add_task("reading the model", total=None)

    def start_server(self, name: str) -> None:
        """Say that the next server starts."""
        self._started += 1
        self.say(f"starting the server of {name}")

    def say(self, text: str, total: int | None = None) -> None:
        """Say what happens; ``total``: how often :meth:`advance` is called."""
        server = f"server {self._started} of {self.servers}" if self._started else ""
        where = ", ".join(filter(None, (self._run, server)))
        text = f"{where}: {text}" if where else text
        self._progress.reset(self._task, description=text, total=total)
        if not self._progress.console.is_terminal:
            self.show(text)

    def show(self, text: str) -> None:
        """Print a line that stays."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def advance(self) -> None:
        """One of the total is done."""
        self._progress.advance(self._task)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.remove_task(self._task)


class LoadBench:
    """Runs one set of options; :attr:`cases` has what is finished, also if it is interrupted.

    Args:
        options: what to run.
        status: shows the progress.
    """

    def __init__(self, options: LoadOptions, status: Status) -> None:
        self._cases: list[Case] = []
        self._status = status
        #: Forks the servers on a CPU, where most of a start is imports.
        self._forks: ForkServer | None = None
        self._running = list(map(RunningServer.connect, options.url))
        dtype = None
        if self._running:
            name = options.model
            for server in self._running:
                name = server.check_model(name)
            options = replace(options, model=name, device=self._running[-1].device)
            dtype = self._running[-1].dtype
        self._model = ServedModel.load(options, status.say, dtype)
        self._prompts = Prompts.of(self._model.tokenizer, options.text)
        if options.trace and not options.requests:
            self._options = options
            options = replace(options, requests=len(self._requests(0)))
        self._options = options
        self._contenders = [] if options.url else contenders(options, self._model)
        #: Environment variables of the servers.
        self._environment = {}
        if options.device == "cpu":
            self._environment = ServerProcess.cpu_environment(options.num_threads)
        self._check = Check(options, {x: self._checked(x) for x in self._contexts}, status.say)

    @property
    def cases(self) -> list[Case]:
        """Those that failed or have a result."""
        return [x for x in self._cases if x.results or x.params["failures"] or x.gate == "failed"]

    @property
    def device(self) -> str:
        """The servers' device, "cpu" or "cuda"."""
        return self._options.device

    def run(self) -> None:
        """Check all contenders, then measure them."""
        if self._options.url:
            self._run_urls()
        else:
            with ExitStack() as stack:
                prefix = "hisparse-bench-"
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)))
                if self._options.device == "cpu":
                    self._forks = ForkServer(os.environ | self._environment, folder / "forks.log")
                    stack.callback(self._forks.stop)
                self._run_servers(folder)
        self._status.close()

    def _run_servers(self, folder: Path) -> None:
        """Start and measure a server of each contender for each device memory."""
        memories = list(self._memories())
        checked = {DENSE, *(x.algorithm for x in self._contenders)} if self._options.quality else ()
        self._status.servers = len(memories) * len(self._contenders) + len(checked)
        dense = Contender(options=self._options, model=self._model, algorithm=DENSE)

        def start(
            flags: Sequence[str], log: str, name: str
        ) -> AbstractContextManager[ServerClient]:
            return self._server(flags, folder / log, name)

        failure = None
        if self._options.quality:
            self._status.show(
                "answers are compared with dense ones first, which takes most of a short run; "
                "--no-quality leaves it out"
            )
            failure = self._check.started(dense, self._contenders, start)
        if failure is not None:
            self._status.show(failure)
        for device_bytes, contexts in memories:
            cells = [(context, load) for context in contexts for load in self._options.loads]
            compared = self._options.quality
            cases = [self._case(device_bytes, *cell, failure, compared=compared) for cell in cells]
            self._cases += cases
            for contender in self._contenders if failure is None else ():
                self._measure(contender, device_bytes, cells, cases, folder)

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
                prefix, each = self._dense_tokens(context)
                yield (prefix + count * each) * self._model.kv_token_bytes, (context,)

    def _dense_tokens(self, context: int) -> tuple[int, int]:
        """Tokens of a dense server: of the common prefix, and of each request (the longest)."""
        prefix = int(self._options.shared_prefix * context)
        longest = max(map(_tokens, self._requests(context, 1 if context else 0)))
        if self._model.stands_in_for_dense:
            return 0, round_up(int(_STAND_IN * longest))
        return prefix, round_up(longest - prefix + 1)

    def _requests(self, context: int, count: int = 0) -> list[Request]:
        """Requests of a context; 0: those of the trace."""
        options = self._options
        if options.trace:
            return self._prompts.trace(options.trace, options.requests, self._model.longest)
        count = count or max(map(options.num_requests, options.loads))
        found = self._prompts.equal(count, context, options.shared_prefix, options.output)
        return [replace(x, turns=options.turns) for x in found]

    def _checked(self, context: int) -> list[Sequence[int]]:
        """Token ids of the prompts that are checked."""
        prompts = [request.ids for request in self._requests(context)]
        return prompts[: 1 if len(prompts[0]) > _LONG else _NUM_CHECKED]

    def _run_urls(self) -> None:
        """Measure running servers; of two the first is the reference of a check."""
        servers = self._running
        failure, compared = None, len(servers) == 2 and self._options.quality
        if compared:
            failure = self._check.running(*servers)
        for server in servers if failure is None else ():
            self._warm_up(server, self._contexts[0])
        for context in self._contexts:
            for load in self._options.loads:
                case = self._case(None, context, load, failure, compared=compared)
                self._cases.append(case)
                for i, server in enumerate(servers if failure is None else ()):
                    key = server.url if i and compared else None
                    self._load_case(case, server, server.url, key, context, load)

    def _case(
        self,
        device_bytes: int | None,
        context: int,
        load: dict[str, float],
        failure: str | None,
        *,
        compared: bool,
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
            "turns": options.turns,
            "trace": options.trace,
            "budget": self._budget,
            "device_memory": device_bytes,
            "dense_requests": None,
            "kv_token_bytes": self._model.kv_token_bytes,
            "threads": None if self._running else options.num_threads,
            "compared_tokens": self._check.compared.get(context),
            "failures": {},
        }
        if failure is not None:
            params["failure"] = failure
        name = f"{options.model}, {where}, {what}"
        if device_bytes is not None:
            tokens = device_bytes // self._model.kv_token_bytes
            prefix, each = self._dense_tokens(context)
            fit = max(0, tokens - prefix) // each
            params["dense_requests"] = None if options.device_bytes else fit
            params["dense_holds"] = holds = min(len(requests), fit)
            # The memory of the stand-in for dense beside KV is unknown before it starts.
            hold = "hold about" if self._model.stands_in_for_dense else "hold"
            name += (
                f", {format_bytes(device_bytes)} = {tokens:,} dense tokens, which {hold} {holds} "
            )
            name += f"of the {len(requests)} requests"
        gate = "passed" if compared else UNCHECKED
        gate = gate if failure is None else "failed"
        return Case(name=name, params=params, gate=gate, results=[])

    @property
    def _budget(self) -> int | None:
        """Tokens that a decode step of hisparse attends."""
        if self._running:
            return self._running[-1].budget
        return self._model.index_top_k or self._options.budget

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
        """All loads on one server."""
        flags = contender.flags(device_bytes, self._pool_tokens(cells))
        with ExitStack() as stack:
            try:
                server = stack.enter_context(
                    self._server(flags, folder / "server.log", contender.name)
                )
            except HiSparseError as error:
                self._status.show(why := f"did not start: {reason(error)}")
                for case in cases:
                    case.params["failures"][contender.name] = why
                return
            self._warm_up(server, cells[0][0])
            compared = self._options.quality and contender.algorithm != DENSE
            key = contender.algorithm if compared else None
            for (context, load), case in zip(cells, cases, strict=True):
                self._load_case(case, server, contender.name, key, context, load)

    def _load_case(
        self,
        case: Case,
        server: ServerClient,
        name: str,
        key: str | None,
        context: int,
        load: dict[str, float],
    ) -> None:
        """Add the result of a load, or why there is none; ``key``: see :meth:`Check.distance`."""
        try:
            quality = {}
            if key is not None:
                self._status.say(f"{name}: distance from dense decoding")
                # Before the load, whose answers the cache would hold, decoded sparsely.
                quality = asdict(self._check.distance(server, key, context))
            result = self._load(server, name, context, load, case.name)
            result = replace(result, quality=quality)
        except BROKEN as error:
            case.params["failures"][name] = reason(error)
            self._status.show(f"{name}: {reason(error)}")
            return
        case.results.append(result)
        if errors := result.load["errors"]:
            case.params["failures"][name] = "; ".join(errors)

    def _warm_up(self, server: ServerClient, context: int) -> None:
        """One untimed request, the same for all servers; hisparse decodes it sparsely."""
        ids = self._requests(context, 1)[0].ids
        with suppress(*BROKEN):  # It may not fit; a load says more.
            server.generate([ids[: (self._budget or 0) + _WARM_UP]], 8)

    def _pool_tokens(self, cells: Sequence[tuple[int, dict[str, float]]]) -> int:
        """Tokens of all requests that run at once."""
        options, most = self._options, 0
        for context, load in cells:
            requests = self._requests(context, options.num_requests(load))
            running = min(len(requests), options.most_running)
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
    ) -> LoadResult:
        options = self._options
        requests = self._requests(context, options.num_requests(load))
        self._status.say(f"{contender}: before {name}")
        server.flush_cache()
        prefix = int(options.shared_prefix * context)
        if prefix:
            with suppress(HiSparseError):  # A refusal is counted when it is timed.
                server.generate([requests[0].ids[:prefix]], 1)
        self._status.say(f"{contender}: {name}", total=len(requests) * options.turns)
        before = Usage.read(server)
        run = run_load(
            server.url,
            requests,
            self._model.tokenizer,
            load,
            options.slos_ms,
            self._status.advance,
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
        )
        self._status.show(f"{contender}: {name}: {result.throughput:.4g} tokens/s")
        return result

    @contextmanager
    def _server(self, flags: Sequence[str], log: Path, name: str) -> Iterator[ServerProcess]:
        self._status.start_server(name)
        with ServerProcess(self._model.folder, log, flags, self._forks) as server:
            server.start(self._environment)
            yield server


def _tokens(request: Request) -> int:
    return len(request.ids) + request.output
