"""Checks of what an algorithm keeps: representations of pages, and state of requests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hisparse.errors import shorten
from hisparse.testing.case import Case, Run
from hisparse.testing.operations import Violation
from hisparse.testing.recorder import Call, Trace
from hisparse.testing.simulator import Request

#: Fraction of the pages that may differ. A different order of summation rounds differently and may
#: swap two pages with nearly equal scores.
_NEAR_TIES = 0.01

#: Fraction of the values of a page that may differ. Rounding may also change a quantised value.
_ROUNDED_CODES = 0.05


def require_same_trace(got: Trace, expected: Trace, when: str, reference: str) -> None:
    """Require the same pages at the same context lengths, near ties aside.

    Raises:
        Violation: too many pages differ; the message shows the first difference.
    """
    if not expected or got.keys() != expected.keys():
        raise Violation(
            f"{when}: got selections at {len(got)} (step, layer) pairs, expected {len(expected)} "
            f"as {reference}, and at least one"
        )
    total = differing = 0
    first = ""
    for where, heads in expected.items():
        for head, (mine, other) in enumerate(zip(got[where], heads, strict=True)):
            total += len(other)
            if mine != other:
                differing += len(set(mine) ^ set(other)) or 1
                first = first or (
                    f"layer {where[1]}, {where[0]} tokens, head {head}: got pages {shorten(mine)}, "
                    f"expected {shorten(other)}"
                )
    if differing > _NEAR_TIES * total:
        raise Violation(f"{when}: {first}, as {reference}")


def page_representations(run: Run, request: Request, num_pages: int) -> dict[str, Tensor]:
    """Page representations of a request's first pages, ``[L, num_pages, *shape]`` by name."""
    pages = torch.tensor(request.host_pages[:num_pages])
    kinds = run.recorder.algorithm.representations(run.sim.policy)
    tensors = run.sim.representations.tensors
    return {name: tensors[name][:, pages] for name, kind in kinds.items() if kind.per == "page"}


def require_same_pages(
    got: dict[str, Tensor], expected: dict[str, Tensor], when: str, reference: str
) -> None:
    """Require the same page representations up to rounding.

    Args:
        got: ``[L, P, *shape]`` in the declared dtype, by name.
        expected: the same shapes and dtypes.
        when: what was done, for the message.
        reference: how ``expected`` was made, for the message.

    Raises:
        Violation: names the first layer and page that differ.
    """
    for name, other in expected.items():
        differs = ~_close(got[name], other).reshape(*other.shape[:2], -1)
        wrong = differs.float().mean(-1) > _ROUNDED_CODES
        if wrong.any():
            layer, page = wrong.nonzero()[0].tolist()
            raise Violation(
                f"{when}: representation {name!r} of page {page} in layer {layer}: got "
                f"{_head(got[name][layer, page])}, expected {_head(other[layer, page])}, as "
                f"{reference}"
            )


def _close(got: Tensor, expected: Tensor) -> Tensor:
    if not got.dtype.is_floating_point:
        return got == expected
    rtol = max(4 * torch.finfo(got.dtype).eps, 1e-4)
    return torch.isclose(got.float(), expected.float(), rtol=rtol, atol=1e-4)


def _head(entry: Tensor) -> str:
    values = entry.flatten()[:4].tolist()
    shown = ", ".join(f"{x:.4g}" for x in values)
    return f"[{shown}{', ...' if entry.numel() > 4 else ''}]"


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


def _prefilled(case: Case, *chunks: int) -> tuple[Run, Request]:
    """Prefill the typical request in chunks of these lengths."""
    run = case.start()
    prompt = sum(chunks)
    request = run.sim.request(1, case.prompt + case.steps, case.seed + 1, prompt=prompt)
    for chunk in chunks:
        run.sim.prefill((request, chunk))
    return run, request


def chunks(case: Case) -> None:
    """Splitting a prompt into chunks, also within a page, does not change the result."""
    size, total = case.page_size, case.prompt
    whole, one = _prefilled(case, total)
    expected = page_representations(whole, one, case.pages)
    # A copy: decoding adds to the tensors.
    expected = {name: entries.clone() for name, entries in expected.items()}
    whole.finish(one, steps=case.steps)
    for cut in ((1, size + size // 2, 2 * size), (total - size - 2, size + 1)):
        parts = (*cut, total - sum(cut))
        run, request = _prefilled(case, *parts)
        when = f"prompt in chunks of {', '.join(map(str, parts))} tokens"
        got = page_representations(run, request, case.pages)
        require_same_pages(got, expected, when, "in one chunk")
        run.finish(request, steps=case.steps)
        require_same_trace(run.trace(request), whole.trace(one), when, "in one chunk")


def decoded_pages(case: Case) -> None:
    """A page that decoding fills has the same representation as in prefill."""
    total = case.prompt + case.steps
    decoded, request = _prefilled(case, case.prompt)
    decoded.finish(request, steps=case.steps)
    prompt, twin = _prefilled(case, total)
    num_pages = total // case.page_size
    require_same_pages(
        page_representations(decoded, request, num_pages),
        page_representations(prompt, twin, num_pages),
        f"pages from {case.prompt // case.page_size} on, filled by decoding",
        "prefill remembers them",
    )


def writes(case: Case) -> None:
    """Only entries of the step's own layer, pages and request slots are written."""
    run = case.start()
    kinds = run.recorder.algorithm.representations(run.sim.policy)
    tensors = run.sim.representations.tensors

    @contextmanager
    def guard(call: Call) -> Iterator[None]:
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        yield
        for name, tensor in tensors.items():
            per = kinds[name].per
            changed = _changed(before[name], tensor, 1 if per == "layer" else 2)
            if per == "page":
                # Page 0 is the padding page, which every step may write.
                changed[call.layer_id, [0, *call.host_pages.tolist()]] = False
            elif per == "request":
                changed[call.layer_id, call.slots] = False
            if changed.any():
                raise Violation(_describe(call, name, per, changed))

    run.recorder.guards.append(guard)
    _serve_two(case, run)


def _changed(before: Tensor, after: Tensor, entry_dims: int) -> Tensor:
    """Entries that differ in any bit, ``[L, ...]`` with ``entry_dims`` dimensions."""
    flat = (x.reshape(*x.shape[:entry_dims], -1).view(torch.uint8) for x in (before, after))
    old, new = flat
    return (old != new).any(-1)


def _describe(call: Call, name: str, per: str, changed: Tensor) -> str:
    layer, *entry = changed.nonzero()[0].tolist()
    what = {"page": "host page", "request": "request slot", "layer": "constants"}[per]
    allowed = {
        "page": f"its host pages {sorted(set(call.host_pages.tolist()))}",
        "request": f"its request slots {call.slots.tolist()}",
        "layer": "none: only initialize() writes what is per layer",
    }[per]
    return (
        f"{call}: got a write of {name!r} for {' '.join([what, *map(str, entry)])} in layer "
        f"{layer}, expected writes in layer {call.layer_id} of {allowed}"
    )


def inputs_untouched(case: Case) -> None:
    """Keys, queries and the tensors of the step are not changed in place."""
    run = case.start()

    @contextmanager
    def guard(call: Call) -> Iterator[None]:
        before = {name: tensor.clone() for name, tensor in call.tensors.items()}
        yield
        for name, tensor in call.tensors.items():
            # The simulator fills K and V of positions without a token with NaN.
            if not torch.equal(before[name].nan_to_num(), tensor.nan_to_num()):
                raise Violation(
                    f"{call}: got {name} changed in place, expected it untouched: the model "
                    "and other layers use it too"
                )

    run.recorder.guards.append(guard)
    _serve_two(case, run)


def _serve_two(case: Case, run: Run) -> None:
    """Prefill two requests in chunks, then decode both."""
    sim, size = run.sim, case.page_size
    a = sim.request(1, case.prompt + case.steps, case.seed + 1, prompt=case.prompt)
    b = sim.request(3, case.prompt + size + case.steps, case.seed + 2, prompt=case.prompt + size)
    sim.prefill((a, case.prompt - size), (b, 2 * size + 1))
    sim.prefill((b, case.prompt - size - 1), (a, size))
    run.finish(a, b, steps=case.steps)
