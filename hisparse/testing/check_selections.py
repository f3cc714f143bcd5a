"""Checks of selections: they are valid for every query, and dense if the budget allows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from hisparse.testing.case import Case
from hisparse.testing.recorder import Retrieved
from hisparse.testing.violation import Violation


def runs(case: Case) -> None:
    """Prefill and decoding raise no error, and selections have the right shapes."""
    if not case.together.recorder.retrieved:
        raise Violation("got no call of retrieve_topk, expected some: contexts exceed the budget")


#: Takes the pages of a head, the length of its selection and the number of full pages; returns what
#: is wrong, or None.
Rule = Callable[[list[int], int, int], str | None]


def _require(case: Case, rule: Rule) -> None:
    for found in case.together.recorder.retrieved:
        for request, heads in enumerate(found.pages):
            for head, pages in enumerate(heads):
                length, count = found.lengths[request][head], found.num_pages[request]
                wrong = rule(pages, length, count)
                if wrong:
                    where = _where(found, request, head)
                    raise Violation(f"{where}: got pages {pages}, length {length}; {wrong}")


def _where(found: Retrieved, request: int, head: int) -> str:
    return (
        f"layer {found.layer_id}, request {request} of {len(found.slots)} "
        f"({found.seq_lens[request]} tokens), head {head}"
    )


def well_formed(case: Case) -> None:
    """Pages are in range, ascending and unique, and the rest is padded with -1."""

    def rule(pages: list[int], length: int, count: int) -> str | None:
        used, padding = pages[:length], pages[length:]
        if any(not 0 <= page < count for page in used):
            return f"expected {length} pages from 0 to {count - 1} (the tail page is {count})"
        if any(a >= b for a, b in pairwise(used)):
            return "expected ascending pages, each once"
        if length < 0 or length > len(pages) or any(page != -1 for page in padding):
            return f"expected {length} pages, then nothing but -1"
        return None

    _require(case, rule)


def scores(case: Case) -> None:
    """No score is NaN or +inf, also for keys and queries that are zero, equal or a thousandfold.

    Only scores that the algorithm passes to ``select`` are seen.
    """
    case = (case.smaller() or [case])[0]
    for name, change in _HARD_STREAMS.items():
        run = case.start()
        request = run.sim.request(1, case.prompt + 2, case.seed, prompt=case.prompt)
        for stream in (request.q, request.k, *request.indexer):
            change(stream)
        run.sim.prefill((request, case.prompt))
        run.finish(request, steps=2)
        stats = run.sim.coordinator.stats()
        if stats.invalid_scores:
            raise Violation(
                f"{name} keys and queries: got NaN or +inf among the scores of "
                f"{stats.invalid_scores} of {stats.selections} selections, expected numbers or "
                "-inf; to select pages in any case, pass forced to select"
            )


#: By name: changes the queries or keys of a request, ``[L, n, ...]``, in place.
_HARD_STREAMS: dict[str, Callable[[Tensor], object]] = {
    "random": lambda stream: None,
    "zero": torch.Tensor.zero_,
    "equal": lambda stream: stream.copy_(stream[:, :1].clone().expand_as(stream)),
    "thousandfold": lambda stream: stream.mul_(1000),
}


def sinks_and_recents(case: Case) -> None:
    """Sink pages and recent pages are always selected."""
    policy = case.together.sim.policy

    def rule(pages: list[int], length: int, count: int) -> str | None:
        forced = policy.forced_pages(torch.tensor([count], dtype=torch.int32), count)[0]
        missing = set(forced.nonzero()[:, 0].tolist()) - set(pages)
        if not missing:
            return None
        return (
            f"expected {sorted(missing)} among them: num_sink_pages is {policy.num_sink_pages} "
            f"and num_recent_pages {policy.num_recent_pages} of {count} full pages"
        )

    _require(case, rule)


def budget(case: Case) -> None:
    """No more pages are selected than the policy allows."""
    most = case.together.sim.policy.max_pages

    def rule(pages: list[int], length: int, count: int) -> str | None:
        if len(pages) <= most and length <= most:
            return None
        return f"expected at most step.policy.max_pages = {most}, padding included"

    _require(case, rule)


def dense(case: Case) -> None:
    """If the budget holds the whole context, the output equals dense attention in float64.

    Checked with a budget that holds every request, and for a short request beside a long one.
    """
    total = -(-(case.prompt + case.steps) // case.page_size) + 2
    _require_dense(case, 0, budget=total * case.page_size)
    _require_dense(case, case.budget_pages - 4 - case.pages)


def _require_dense(case: Case, pages: int, budget: int | None = None) -> None:
    """Decode the typical request beside one whose prompt is ``pages`` pages longer."""
    buffer_tokens = 2 * (budget or case.budget)
    sizes = {
        "budget": budget or case.budget,
        "device_buffer": buffer_tokens,
        "max_row": buffer_tokens,
    }
    run = case.start(**sizes)
    sim, prompt = run.sim, case.prompt + pages * case.page_size
    steps = min(case.steps, sizes["budget"] - prompt)
    short = sim.request(1, prompt + steps, case.seed + 1, prompt=prompt)
    long = sim.request(2, case.prompt + steps, case.seed + 2, prompt=case.prompt)
    sim.prefill((short, prompt), (long, case.prompt))
    for _ in range(steps):
        out = sim.decode(short, long)[:, 0]
        expected = sim.dense(short, short.done - 1, short.done)[:, 0]
        error = (out.double() - expected).abs().max().item()
        if not error < 1e-4:
            raise Violation(
                f"a request of {short.done} tokens with a budget of {sim.budget}: got an output "
                f"{error:.3g} off dense attention, expected at most 1e-4: every full page has to "
                "be selected"
            )
