"""Checks of the methods that run in every decode step.

The checks run on a CPU, so they look for signs of what would be slow or wrong on a GPU: a read of a
tensor's value stands for a wait for the device, a changing list of operations for a CUDA graph that
cannot be replayed, and bytes of new tensors for the work of an allocator. They see the operations
of PyTorch and not what compiled kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import torch

from hisparse.kernels.build.cpu import cpu_library
from hisparse.testing.case import Case
from hisparse.testing.operations import Operations, no_sync
from hisparse.testing.recorder import Call, Guard
from hisparse.testing.replaying_simulator import ReplayingSimulator
from hisparse.testing.simulator import Simulator
from hisparse.testing.violation import Violation

#: Methods that run in every decode step.
_DECODE = ("retrieve_topk", "update_representations")


def no_syncs(case: Case) -> None:
    """No tensor value is read on the host, and no shape depends on values."""

    @contextmanager
    def guard(call: Call) -> Iterator[None]:
        if call.method not in _DECODE:
            yield
            return
        with no_sync(call):
            yield

    _decode(case, guard, (0, -1))


def no_loops(case: Case) -> None:
    """A step runs the same operations for any number of requests and any values."""
    two, five, others = (
        _operations(case, (0,) * n, seed=seed) for n, seed in ((2, 0), (5, 0), (2, 9))
    )
    for method in _DECODE:
        few, many, different = (x[method] for x in (two, five, others))
        if few != many:
            raise Violation(
                f"{method}: got {len(few)} tensor operations for 2 requests and {len(many)} for 5 "
                f"of the same length ({_first_difference(few, many)}), expected the same: a loop "
                "over requests costs time for each of them"
            )
        if few != different:
            raise Violation(
                f"{method}: got other tensor operations for other values "
                f"({_first_difference(few, different)}), expected the same: a CUDA graph replays "
                "the operations that it has captured"
            )


def allocations(case: Case) -> None:
    """Allocations scale with the batch, not the pool, and are freed."""
    least = case.settings["host_pages"]
    small, large = (_bytes(case, least * n) for n in (1, 2))
    for method in _DECODE:
        if small[method] != large[method]:
            raise Violation(
                f"{method}: got {small[method]} bytes of new tensors with {least} host pages and "
                f"{large[method]} with {2 * least}, expected the same: gather the requests' own "
                "entries (index_select) before anything else"
            )
    _require_nothing_kept(case)


def replays(case: Case) -> None:
    """A step that is captured with padding only and then replayed gives the same output.

    Skipped for algorithms that read keys on the host and without compiled kernels: neither can be
    captured.
    """
    if case.make().reads_host_keys or cpu_library() is None:
        return
    case = (case.smaller() or [case])[0]
    sims = [
        kind(**case.settings, algorithm=case.make()) for kind in (Simulator, ReplayingSimulator)
    ]
    requests = [
        [sim.request(slot, prompt + case.steps, case.seed + slot, prompt=prompt) for sim in sims]
        for slot, prompt in ((1, case.prompt), (2, case.prompt - case.page_size))
    ]
    for each in requests:
        for sim, request in zip(sims, each, strict=True):
            sim.prefill((request, request.prompt or 0))
    for step in range(case.page_size + 2):
        some = requests if step % 3 else requests[:1]
        eager, replayed = (sim.decode(*own) for sim, *own in zip(sims, *some, strict=True))
        if not torch.allclose(eager, replayed, rtol=1e-4, atol=1e-5):
            raise Violation(
                f"step {step + 1} of {len(some)} requests: got outputs that differ by "
                f"{(eager - replayed).abs().max():.1e} from those of an eager step, expected the "
                "same: a CUDA graph replays the numbers and shapes that it has captured, also "
                "those that come from step.max_pages"
            )


def _decode(case: Case, guard: Guard, pages: tuple[int, ...], seed: int = 0, **world: int) -> None:
    """Decode requests whose prompts are ``pages`` pages longer than that of the smallest case."""
    case = (case.smaller() or [case])[0]
    run = case.start(num_slots=len(pages) + 1, **world)
    requests = []
    for slot, more in enumerate(pages, 1):
        prompt = case.prompt + more * case.page_size
        request = run.sim.request(slot, prompt + case.steps, seed + slot, prompt=prompt)
        run.sim.prefill((request, prompt))
        requests.append(request)
    run.recorder.guards.append(guard)
    run.finish(*requests, steps=case.page_size + 1)


def _operations(case: Case, pages: tuple[int, ...], seed: int) -> dict[str, list[str]]:
    """Names of all operations that run in each method."""
    names: dict[str, list[str]] = {method: [] for method in _DECODE}

    @contextmanager
    def guard(call: Call) -> Iterator[None]:
        with Operations() as seen:
            yield
        names[call.method] += seen.names

    _decode(case, guard, pages, case.seed + seed)
    return names


def _bytes(case: Case, host_pages: int) -> dict[str, int]:
    """Bytes that each method allocates."""
    found = dict.fromkeys(_DECODE, 0)

    @contextmanager
    def guard(call: Call) -> Iterator[None]:
        with Operations() as seen:
            yield
        found[call.method] += seen.num_bytes

    _decode(case, guard, (0, 0), host_pages=host_pages)
    return found


def _require_nothing_kept(case: Case) -> None:
    steps: list[Operations] = []

    @contextmanager
    def guard(call: Call) -> Iterator[None]:
        with Operations() as seen:
            yield
        steps.append(seen)

    _decode(case, guard, (0,))
    # The results of the last calls may still be in use.
    alive = [seen.num_alive for seen in steps[:-4]]
    if sum(map(bool, alive)) > len(alive) // 2:
        raise Violation(
            f"got {sum(alive)} tensors of {len(alive)} earlier calls that are not freed, expected "
            "none: state belongs in representations"
        )


def _first_difference(a: list[str], b: list[str]) -> str:
    index, (one, other) = next(
        (i, pair) for i, pair in enumerate(zip_longest(a, b)) if pair[0] != pair[1]
    )
    return f"number {index + 1} is {one or 'none'} or {other or 'none'}"
