"""The check before any figure: tokens equal dense ones; and how far a small budget is from them.

A server does not give its logits away, so the distance is measured step by step. For each position
i of the dense answer, the prompt and the dense answer up to i are prefilled, which is exact, and
two tokens are generated. The second one comes from a decode step, sparse under a small budget, and
its probabilities are compared with those of a server that attends all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from hisparse.errors import HiSparseError, one_line, shorten
from hisparse_bench.load.contenders import DENSE, Contender
from hisparse_bench.load.options import LoadOptions, round_up
from hisparse_bench.server import RunningServer, ServerClient

#: Tokens of an answer that are compared.
NUM_TOKENS = 32
#: Fewer compared tokens say nothing: a tie may end a comparison at its first token.
_MIN_COMPARED = 8
#: Likeliest tokens of the dense server that a distance compares one by one, the others as one.
_TOP = 20
#: A token whose dense log-probability is this close to the best one's ties with it: sums in another
#: order may prefer it.
_TIE = {"cpu": 1e-3, "cuda": 0.05}

#: Token id to log-probability, of a step.
Step = Mapping[int, float]


@dataclass(frozen=True)
class Reference:
    """What the dense server answers.

    Attributes:
        prompt: token ids.
        ids: the answer's.
        steps: of each position of the answer, the likeliest tokens.
    """

    prompt: Sequence[int]
    ids: Sequence[int]
    steps: Sequence[Step]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Answers beside the dense ones.

    Attributes:
        compared: equal tokens before the first difference or tie, over all answers.
        failure: what differs, or that too few tokens were compared; None if the check passed.
    """

    compared: int
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distance of a server's next-token distributions from the dense ones.

    Attributes:
        kl: mean Kullback-Leibler divergence, nats per token, of the dense server's likeliest tokens
            and all others as one; never above that of all tokens.
        agreement: share of the steps whose best token is the dense one.
        positions: decode steps that were compared.
    """

    kl: float
    agreement: float
    positions: int

    @classmethod
    def mean(cls, found: Sequence[Distance]) -> Distance:
        """The mean over all positions."""
        total = sum(x.positions for x in found) or 1
        return cls(
            kl=sum(x.kl * x.positions for x in found) / total,
            agreement=sum(x.agreement * x.positions for x in found) / total,
            positions=sum(x.positions for x in found),
        )


def measure_reference(server: ServerClient, prompt: Sequence[int], output: int) -> Reference:
    """Let the dense server answer."""
    count = min(output, NUM_TOKENS)
    answer = server.generate([prompt], count, top_logprobs_num=_TOP)[0]
    steps = _steps(answer, "output_top_logprobs")
    return Reference(prompt, list(answer["output_ids"]), steps)


def measure_steps(server: ServerClient, reference: Reference) -> list[Step]:
    """A decode step at each position of the dense answer but the first, by a server that is exact.

    SGLang's CPU backend computes the prefix again for each of these short prefills, so a hisparse
    server that attends all tokens, and whose answers are the dense ones, measures them.
    """
    answers = _forced(server, reference.prompt, reference.ids, top_logprobs_num=_TOP)
    return [_steps(x, "output_top_logprobs")[1] for x in answers]


def compare_answers(
    server: ServerClient, references: Sequence[Reference], device: str
) -> Comparison:
    """Compare a server's answers with dense ones, token by token."""
    compared = 0
    for reference in references:
        equal, differs = _equal_tokens(server, reference, device)
        compared += equal
        if differs:
            return Comparison(
                compared=compared, failure=f"token {equal} of an answer is not the dense one"
            )
    wanted = min(_MIN_COMPARED, sum(len(reference.ids) for reference in references))
    if compared >= wanted:
        return Comparison(compared=compared, failure=None)
    return Comparison(
        compared=compared,
        failure=f"only {compared} tokens could be compared before ties, expected {wanted} or more",
    )


def _equal_tokens(server: ServerClient, reference: Reference, device: str) -> tuple[int, bool]:
    """Equal tokens at the beginning of an answer, and whether the next one differs.

    Where two tokens tie within rounding, either is right, and what follows is not compared.
    """
    answer = server.generate([reference.prompt], len(reference.ids))[0]["output_ids"]
    for i, (got, wanted) in enumerate(zip(answer, reference.ids, strict=False)):
        if got != wanted:
            step = reference.steps[i]
            tied = got in step and step[wanted] - step[got] <= _TIE[device]
            return i, not tied
    return len(answer), len(answer) != len(reference.ids)


def measure_distance(server: ServerClient, reference: Reference, steps: Sequence[Step]) -> Distance:
    """Compare a server's decode steps with those of :func:`measure_steps`."""
    tops = [list(step) for step in steps]
    answers = _forced(server, reference.prompt, reference.ids, token_ids_logprob=tops)
    found = []
    for i, (answer, dense) in enumerate(zip(answers, steps, strict=True)):
        ours = _steps(answer, "output_token_ids_logprobs")[1]
        first, second = answer["output_ids"]
        if first != reference.ids[i]:
            continue  # A tie in prefill: the decode step continued another text.
        best = max(dense, key=lambda token: dense[token])
        found.append(Distance(kl=_kl(dense, ours), agreement=second == best, positions=1))
    return Distance.mean(found)


def _forced(
    server: ServerClient, prompt: Sequence[int], ids: Sequence[int], **logprobs: Any
) -> list[dict[str, Any]]:
    """Two tokens after the prompt and each beginning of an answer."""
    # The longest one first: what the others continue is then from prefill.
    server.generate([[*prompt, *ids[:-1]]], 1)
    return server.generate([[*prompt, *ids[:i]] for i in range(len(ids) - 1)], 2, **logprobs)


def _steps(answer: Mapping[str, Any], key: str) -> list[Step]:
    """The log-probabilities of each generated token."""
    about, count = answer["meta_info"], len(answer["output_ids"])
    found = about.get(key) or []
    if not 0 < len(found) == count:
        raise HiSparseError(
            f"{key}: got {len(found)} for {count} tokens, finished by "
            f"{about.get('finish_reason')}, expected one for each token"
        )
    return [{int(token): float(x) for x, token, *_ in entries} for entries in found]


def _kl(dense: Step, ours: Step) -> float:
    """Divergence of ``ours`` from ``dense``: each token of ``dense``, and all others as one."""
    if absent := dense.keys() - ours.keys():
        raise HiSparseError(
            f"token_ids_logprob: got none for tokens {shorten(sorted(absent))}, expected one for "
            "each token that was asked"
        )
    parts = [(math.exp(p), p, ours[token]) for token, p in dense.items()]
    rest = [max(1 - sum(math.exp(x[i]) for x in parts), 1e-9) for i in (1, 2)]
    kl = sum(share * (p - q) for share, p, q in parts)
    return max(0.0, kl + rest[0] * math.log(rest[0] / rest[1]))


#: What a request raises when its server refuses it, ends, or breaks an answer off.
BROKEN = (HiSparseError, OSError, HTTPException)

#: Starts a server with flags; a name for its log, and one for people.
Start = Callable[[Sequence[str], str, str], AbstractContextManager[ServerClient]]


class Check:
    """Runs the check and keeps what dense servers answered.

    Args:
        options: the run.
        prompts: of each context (0: of the trace), the prompts that are compared.
        say: shows a line of progress.
    """

    def __init__(
        self,
        options: LoadOptions,
        prompts: Mapping[int, Sequence[Sequence[int]]],
        say: Callable[[str], None],
    ) -> None:
        #: Tokens compared, by context.
        self.compared: dict[int, int] = {}
        self._options = options
        self._prompts = prompts
        self._say = say
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
            # This check does not depend on the sizes of device buffers.
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
                            context: [measure_steps(server, x) for x in references]
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
                self._steps[context] = [measure_steps(dense, x) for x in references]
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
                found.append(measure_distance(server, reference, steps))
            self._distances[key] = Distance.mean(found)
        return self._distances[key]

    def _measure_references(self, server: ServerClient, context: int) -> None:
        self._say(f"check: dense answers at context {context or 'of the trace'}")
        prompts, output = self._prompts[context], self._options.output
        self._references[context] = [measure_reference(server, x, output) for x in prompts]

    def _compare(self, server: ServerClient) -> str | None:
        for context, references in self._references.items():
            found = compare_answers(server, references, self._options.device)
            self.compared[context] = min(self.compared.get(context, found.compared), found.compared)
            if found.failure is not None:
                return found.failure
        return None


def reason(error: Exception) -> str:
    """One line; for a server that did not start, the line of its log with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) < 2:
        return one_line(error)
    named = [line for line in lines[1:] if "rror" in line]
    return (named or lines)[-1][:300]
