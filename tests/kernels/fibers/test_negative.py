"""Mistakes planted in the kernels are found, so the suite would find them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hisparse.kernels import RowState, lru_diff
from tests.kernels.conftest import ON_FIBERS, run_on_fibers
from tests.kernels.fibers.build import load, spoiled
from tests.kernels.fibers.traces import run_traces
from tests.kernels.world import i32


def test_the_kernels_as_they_are_pass(fibers: str) -> None:
    run_traces(fibers)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            "__syncthreads();  // The index names an entry for every missing page.",
            "",
            id="missing-barrier",
        ),
        pytest.param("cold < num_misses", "cold <= num_misses", id="off-by-one"),
    ],
)
def test_a_planted_mistake_is_found(tmp_path: Path, old: str, new: str) -> None:
    folder = spoiled(tmp_path, {"lru_diff.cuh": [(old, new)]})
    command = [sys.executable, "-m", "tests.kernels.fibers.traces", str(folder)]
    root = Path(__file__).parents[3]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert list(folder.glob("*.so")), result.stderr  # It was built.
    assert "nothing found" not in result.stdout
    crashed = result.returncode < 0
    assert crashed or "AssertionError" in result.stderr or "KernelError" in result.stderr


# What goes wrong depends on how many pages the host page table has.
PLANTS = [
    (
        "__syncthreads();  // The bits are clear.",
        """if (p.num_pages == 12 && threadIdx.x % 2) __syncthreads();
else if (p.num_pages == 11 && threadIdx.x == 5)
  return false;
else
  __syncthreads();""",
    ),
    (
        "if (hits != 0) atomicAdd(&shared.num_hits, hits);",
        """if (p.num_pages != 13 || lane_id() < 9) __ballot_sync(kAllLanes, true);
if (hits != 0) atomicAdd(&shared.num_hits, hits);""",
    ),
    (
        "if (threadIdx.x == 0) shared.num_hits = 0;",
        """if (threadIdx.x == 0) {
  shared.num_hits = 0;
  if (p.num_pages == 14) work.hit_bits[9] = 0;
}""",
    ),
    (
        "wait_for_earlier_launches();",
        "if (launch.diff.num_pages != 15 || threadIdx.x != 7) wait_for_earlier_launches();",
    ),
]


@pytest.fixture(scope="module")
def misled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Kernels whose threads go astray for tables of certain widths, and are well for others."""
    folder = spoiled(tmp_path_factory.mktemp("misled"), {"lru_diff.cuh": PLANTS})
    with pytest.MonkeyPatch.context() as patch:
        run_on_fibers(patch, load(folder, folder))
        yield ON_FIBERS


@pytest.mark.parametrize(
    ("num_pages", "message"),
    [
        pytest.param(11, "of 64 threads wait for the others at ", id="block"),
        pytest.param(12, r"threads wait at .*.cuh:\d+ and at .*.cuh:\d+", id="not-the-same"),
        pytest.param(13, r"threads wait|lanes of a warp wait", id="warp"),
        pytest.param(14, "shared memory is written behind its end", id="beyond-shared-memory"),
        pytest.param(15, "without having waited for the launches before", id="early"),
    ],
)
def test_threads_that_stray_are_reported_and_the_next_launch_runs(
    misled: str, num_pages: int, message: str
) -> None:
    def step(num_pages: int) -> list[int]:
        order = torch.arange(40, dtype=torch.int32)[None]
        state = RowState.empty(order.clone(), order.clone(), 40)
        table = torch.arange(num_pages, dtype=torch.int32)[None]
        selection = i32([[3, 5, 3]])
        diff = lru_diff(selection, table, i32([40]), i32([1]), state, impl=misled)
        return diff.num_misses.tolist()

    assert step(10) == [2]
    with pytest.raises(RuntimeError, match=message):
        step(num_pages)
    assert step(10) == [2]
