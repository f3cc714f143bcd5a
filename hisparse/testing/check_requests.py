"""Checks that a request depends on its own tokens and on nothing else."""

from __future__ import annotations

import torch

from hisparse.testing.case import Case
from hisparse.testing.compare import page_representations, require_same_trace
from hisparse.testing.violation import Violation


def batch_order(case: Case) -> None:
    """The order of the requests in a batch does not change their selections."""
    reordered = case.serve(-1, 4, order=(2, 0, 1))
    for slot in (1, 2, 3):
        got, expected = (run.recorder.traces.get(slot, {}) for run in (reordered, case.together))
        require_same_trace(got, expected, f"batch order [3, 1, 2], request {slot}", "in [1, 2, 3]")


def other_requests(case: Case) -> None:
    """Other requests in the batch do not change the selections of a request."""
    got, expected = (run.recorder.traces.get(1, {}) for run in (case.together, case.alone))
    require_same_trace(got, expected, "beside a shorter and a longer request", "it does alone")


def reused_slot(case: Case) -> None:
    """A request is not affected by the last owner of its slot and its host pages."""
    expected = case.alone.recorder.traces.get(1, {})
    run = case.start()
    sim, size = run.sim, case.page_size
    old = sim.request(1, case.prompt + 3 * size + case.steps, seed=case.seed + 50)
    # Its keys and queries are larger than those of the next request, so that leftovers show.
    for stream in old.streams:
        stream.mul_(4)
    sim.prefill((old, old.length - case.steps))
    run.finish(old, steps=case.steps)
    sim.end(old, free=True)
    run.recorder.traces.clear()
    request = sim.request(1, case.prompt + case.steps, case.seed + 1, prompt=case.prompt)
    sim.prefill((request, case.prompt))
    run.finish(request, steps=case.steps)
    when = "in the slot and the host pages of a request that has ended"
    require_same_trace(run.trace(request), expected, when, "it does in a new server")


def shared_prefix(case: Case) -> None:
    """On a radix hit, shared pages are used as they are and selections do not change."""
    size = case.page_size
    shared_pages = case.pages // 2
    shared, window = shared_pages * size, case.make().query_window
    prompt = max(case.prompt, shared + window + 1)
    run, alone = case.start(), case.start()
    donor = run.sim.request(1, case.prompt + case.steps, case.seed + 1, prompt=case.prompt)
    run.sim.prefill((donor, case.prompt))
    before = {k: x.clone() for k, x in page_representations(run, donor, shared_pages).items()}
    run.recorder.constructed.clear()

    length = prompt + case.steps
    hit = run.sim.request(2, length, case.seed + 2, like=donor, shared=shared, prompt=prompt)
    run.sim.prefill((hit, prompt - shared))
    run.finish(hit, steps=case.steps)
    twin = alone.sim.request(2, length, case.seed + 2, like=donor, shared=shared, prompt=prompt)
    twin.host_pages, twin.done = [], 0
    alone.sim.prefill((twin, prompt))
    alone.finish(twin, steps=case.steps)

    after = page_representations(run, donor, shared_pages)
    for name, entries in before.items():
        if not torch.equal(*(x.contiguous().view(torch.uint8) for x in (entries, after[name]))):
            raise Violation(
                f"representation {name!r} of pages that another request reuses: got other values "
                "than before, expected them untouched: page representations may depend only on the "
                "tokens of the page"
            )
    computed = max(len(pages) for pages in run.recorder.constructed)
    if computed != prompt // size - shared_pages:
        raise Violation(
            f"a radix hit of {shared_pages} pages: got {computed} pages constructed, expected "
            f"the {prompt // size - shared_pages} that follow"
        )
    when = f"with {shared_pages} pages reused from another request"
    # With sparse prefill, the selections of the shared tokens are not computed again.
    expected = {where: heads for where, heads in alone.trace(twin).items() if where[0] > shared}
    require_same_trace(run.trace(hit), expected, when, "it does alone")
