"""Checks of representations: how tokens arrive does not matter, and nothing else is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hisparse.testing.case import Case, Run
from hisparse.testing.compare import (
    page_representations,
    require_same_pages,
    require_same_trace,
)
from hisparse.testing.recorder import Call
from hisparse.testing.simulator import Request
from hisparse.testing.violation import Violation


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
