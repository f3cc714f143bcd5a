"""The check of a run: every contender's answers against those of the dense server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from http.client import HTTPException

from hisparse.errors import HiSparseError, one_line
from hisparse_bench.load.contenders import DENSE, Contender
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
from hisparse_bench.load.running import RunningServer
from hisparse_bench.load.status import Status
from hisparse_bench.server import ServerClient

#: What a request raises when its server refuses it, ends, or breaks an answer off.
BROKEN = (HiSparseError, OSError, HTTPException)

#: Starts a server with flags; a name for its log, and one for people.
Start = Callable[[Sequence[str], str, str], AbstractContextManager[ServerClient]]


class Check:
    """Runs the check and keeps what dense servers answered.

    Args:
        options: the run.
        prompts: of each context (0: of the trace), the prompts that are compared.
        status: told what happens, and how long it takes.
    """

    def __init__(
        self,
        options: LoadOptions,
        prompts: Mapping[int, Sequence[Sequence[int]]],
        status: Status,
    ) -> None:
        #: Tokens compared, by context.
        self.compared: dict[int, int] = {}
        self._options = options
        self._prompts = prompts
        self._status, self._say = status, status.say
        self._references: dict[int, list[Reference]] = {}
        self._steps: dict[int, list[list[Step]]] = {}
        self._distances: dict[tuple[str, int], Distance] = {}

    def started(self, dense: Contender, others: Sequence[Contender], start: Start) -> str | None:
        """Start a server of each contender; return why no figure is shown, or None."""
        name = dense.name
        try:
            longest = max(len(ids) for prompts in self._prompts.values() for ids in prompts)
            most = max(map(len, self._prompts.values()))
            tokens = (most + 1) * round_up(longest + NUM_TOKENS + 16)
            with start(dense.exact_flags(tokens), "dense.log", f"the check, {name}") as server:
                for context in self._prompts:
                    self._measure_references(server, context)
            # Sizes of device buffers are no part of this check.
            for name, other in {x.algorithm: x for x in others if x.algorithm != DENSE}.items():
                flags = other.exact_flags(tokens)
                with start(flags, "exact.log", f"the check, {name}") as server:
                    self._say(f"check: {name} with all tokens in its budget")
                    failure = self._compare(server)
                    if failure is not None:
                        return f"{name}, budget >= context: {failure}"
                    if not self._steps:
                        self._say("check: decode steps that attend all tokens")
                        self._steps = {
                            context: [self._measure_steps(server, x) for x in references]
                            for context, references in self._references.items()
                        }
        except BROKEN as error:
            return f"{name} failed during the check: {reason(error)}"
        return None

    def running(self, dense: RunningServer, other: RunningServer) -> str | None:
        """Compare answers to prompts that fit the budget; measure the reference of distances."""
        output = self._options.output
        try:
            for context, prompts in self._prompts.items():
                short = max(map(len, prompts))
                if other.exact_tokens is not None:
                    short = max(1, min(short, other.exact_tokens - NUM_TOKENS))
                self._say(f"check: prompts of at most {short} tokens")
                pairs = [measure_reference(dense, x[:short], output) for x in prompts]
                found = compare_answers(other, pairs, self._options.device)
                self.compared[context] = found.compared
                if found.failure is not None:
                    return f"{other.url}, prompts of at most {short} tokens: {found.failure}"
                self._measure_references(dense, context)
                references = self._references[context]
                self._steps[context] = [self._measure_steps(dense, x) for x in references]
        except BROKEN as error:
            return f"the check of {other.url} against {dense.url} failed: {reason(error)}"
        return None

    def distance(self, server: ServerClient, contender: str, context: int) -> Distance:
        """Measured once for a context: selections depend neither on load nor on memory."""
        key = (contender, context)
        if key not in self._distances:
            found = []
            for reference, steps in zip(
                self._references[context], self._steps[context], strict=True
            ):
                with self._status.work("distance", len(reference.prompt)):
                    found.append(measure_distance(server, reference, steps))
            self._distances[key] = Distance.mean(found)
        return self._distances[key]

    def _measure_references(self, server: ServerClient, context: int) -> None:
        self._say(f"check: dense answers at context {context or 'of the trace'}")
        prompts, output = self._prompts[context], self._options.output
        with self._status.work("answers", sum(map(len, prompts))):
            self._references[context] = [measure_reference(server, x, output) for x in prompts]

    def _measure_steps(self, server: ServerClient, reference: Reference) -> list[Step]:
        with self._status.work("distance", len(reference.prompt)):
            return measure_steps(server, reference)

    def _compare(self, server: ServerClient) -> str | None:
        for context, references in self._references.items():
            with self._status.work("answers", sum(len(x.prompt) for x in references)):
                found = compare_answers(server, references, self._options.device)
            self.compared[context] = min(self.compared.get(context, found.compared), found.compared)
            if found.failure is not None:
                return found.failure
        return None


def reason(error: Exception) -> str:
    """One line: of a server that did not start, the line of its log that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) < 2:
        return one_line(error)
    named = [line for line in lines[1:] if "rror" in line]
    return (named or lines)[-1][:300]
