"""The time of each kernel of a decode layer on an H100, computed from its machine code.

No GPU is needed. ``python -m tests.kernels.timing`` writes the files that the times are compared
with.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from hisparse.kernels import SelectRule, diff_tables, select
from hisparse.kernels.build.cuda import find_nvcc
from tests.kernels.timing.__main__ import BATCHES, BOUNDS, COSTS, times
from tests.kernels.timing.calls import SPECS, Step
from tests.kernels.timing.machine import Machine, wavefronts
from tests.kernels.timing.recorded import RECORDED, Recorded, recorded
from tests.sizes import SWEEPS

pytestmark = [
    # Triton says once in which release a default will change.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.sweeps,
    pytest.mark.skipif(not SWEEPS, reason="takes minutes: make test-all PART=sweeps"),
    pytest.mark.skipif(find_nvcc() is None, reason="no nvcc"),
]
#: Kernels with one block on a multiprocessor, by the width of a key, and why.
_RANKS = "1,024 threads rank the pages of a selection in shared memory"
ONE_BLOCK = {
    **{("select", width): _RANKS for width in SPECS},
    ("sketch_score", 576): "sketches of latents in flight and the queries take 206 KiB",
    ("paged_attention", 576): "a tile of latents and the sums of 16 queries take all registers",
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("width", SPECS)
def test_no_kernel_is_slower_than_its_bound(width: int, batch: int) -> None:
    """By 20%; a kernel that became faster by 20% has a bound that is stale."""
    bounds, faults = json.loads(BOUNDS.read_text())[str(width)][str(batch)], []
    for name, each in times(width, batch).items():
        if each.spills:
            faults.append(f"{name}: spills {each.spills} bytes of registers")
        if each.resident < 2 and (name, width) not in ONE_BLOCK:
            faults.append(f"{name}: one block on a multiprocessor: {each.registers} registers, "
                          f"{each.shared} bytes of shared memory")  # fmt: skip
        if not bounds[name] / 1.2 <= each.us <= 1.2 * bounds[name]:
            faults.append(
                f"{name}: {each.us:.1f} us, expected {bounds[name]} within 20%: "
                "python -m tests.kernels.timing writes new bounds"
            )
    assert not faults, "\n".join(faults)


def test_the_plan_reads_what_the_bounds_say() -> None:
    """Times of instructions are not above the times of kernels, and nothing is missing."""
    bounds, costs = (json.loads(path.read_text()) for path in (BOUNDS, COSTS))
    for name, widths in costs["us"].items():
        for width, (_, _, many) in widths.items():
            most = max(bounds[width][str(batch)].get(name, 0) for batch in BATCHES)
            assert many <= most * 1.01, f"{name}, {width}"
        assert set(widths) == set(bounds)


@pytest.mark.parametrize(
    ("stride", "width", "count"), [(0, 4, 1), (4, 4, 1), (8, 4, 2), (16, 16, 4), (128, 16, 32)]
)
def test_a_bank_gives_one_word_at_a_time(stride: int, width: int, count: int) -> None:
    threads = np.arange(32)
    assert wavefronts(threads, stride * threads, width) == count


def run_all(each: Recorded) -> None:
    """Run every block of a launch."""
    machine = Machine(each.code.program(), each.launch, each.memory)
    blocks, rows, _ = each.launch.grid
    for number, row in itertools.product(range(0, blocks, each.launch.cluster), range(rows)):
        machine.run((number, row, 0))


def test_machine_code_selects_as_the_reference_does() -> None:
    """So its instructions are counted for what they do."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, 3000, generator=generator)
    count = torch.tensor([3000, 700], dtype=torch.int32)
    rule = SelectRule(heads=2, max_pages=127)
    with recorded(run_all, lambda tensor: False):
        got = select(scores, count, rule, impl=RECORDED)
    want = select(scores, count, rule, impl="reference")
    assert torch.equal(got.pages, want.pages)
    assert torch.equal(got.lengths, want.lengths)


def test_machine_code_finds_misses_as_the_reference_does() -> None:
    step = Step(SPECS[128], batch=2, context=16384)
    results: dict[str, Any] = {}
    for impl in (RECORDED, "reference"):
        chosen, rows, state = step.missing()
        with recorded(run_all, lambda tensor: False):
            found = diff_tables(chosen, rows, state, page_size=16, impl=impl)
        assert found.away is None
        # The index may say anything else.
        results[impl] = (*found[:6], *state[:3], rows.counts)
    assert results["reference"][5].tolist() == [6] * 16
    for got, want in zip(*results.values(), strict=True):
        assert torch.equal(got, want)
