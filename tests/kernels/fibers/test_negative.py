"""Threads that stray and race in a kernel are found, so the suite would find them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.conftest import ON_FIBERS, run_on_fibers
from tests.kernels.fibers.build import load, spoiled
from tests.kernels.world import diff_slots, empty_state, i32

#: Threads do as in races, with barriers of their warp and atomics.
ORDERED = 20
# What goes wrong depends on how many pages the host page table has.
PLANTS = [
    (
        "__syncthreads();  // The bits are clear, and the tables are there.",
        """if (p.num_pages == 12 && threadIdx.x % 2) __syncthreads();
else if (p.num_pages == 11 && threadIdx.x == 5)
  return false;
else
  __syncthreads();""",
    ),
    (
        "if (entries.unordered) atomicOr(&shared.unordered, 1);",
        """if (p.num_pages != 13 || lane_id() < 9) __ballot_sync(kAllLanes, true);
if (entries.unordered) atomicOr(&shared.unordered, 1);""",
    ),
    (
        "if (threadIdx.x == 0) shared.num_hits = shared.unordered = shared.malformed = 0;",
        """if (threadIdx.x == 0) {
  shared.num_hits = shared.unordered = shared.malformed = 0;
  if (p.num_pages == 14) step.work.hit_bits[150] = 0;
}""",
    ),
    (
        "__syncthreads();  // The index names an entry for every missing page.",
        "if (p.num_pages != 21) __syncthreads();",
    ),
    (
        "wait_for_earlier_launches();",
        "if (launch.diff.num_pages != 22 || threadIdx.x != 7) wait_for_earlier_launches();",
    ),
    # Races that change no byte: threads of two warps, then of one, write the same; a thread reads
    # what another writes again; a vote stands where memory has to be waited for; two blocks write.
    (
        "const int32_t num_misses = served ? step.number_misses() : 0;",
        """const int32_t num_misses = served ? step.number_misses() : 0;
const int32_t t = threadIdx.x;
int32_t* unused = step.work.hits;
if (p.num_pages == 15 && t % 32 == 7) unused[0] = 3;
if (p.num_pages == 16 && t < 2) unused[0] = 3;
if (p.num_pages == 17) {
  if (t == 40) unused[0] = shared.num_hits;
  if (t == 1) *const_cast<volatile int32_t*>(&shared.num_hits) = shared.num_hits;
}
if (p.num_pages == 18) {
  if (t == 3) unused[0] = 3;
  __ballot_sync(kAllLanes, true);
  if (t == 4) unused[1] = unused[0];
}
if (p.num_pages == 19 && t == 0) p.num_misses[0] = num_misses;
if (p.num_pages == 20) {
  if (t == 3) unused[0] = 3;
  __syncwarp();
  if (t == 4) unused[1] = unused[0];
  if (t < 2) atomicAdd(&unused[2], t);
}""",
    ),
]


@pytest.fixture(scope="module")
def misled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Kernels whose threads go astray for tables of certain widths, and are well for others."""
    folder = spoiled(tmp_path_factory.mktemp("misled"), {"diff_tables.cuh": PLANTS})
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
        pytest.param(22, "without having waited for the launches before", id="early"),
        *(
            pytest.param(pages, f"a race: a {now} by .* and a {before} by", id=name)
            for pages, now, before, name in [
                (15, "write", "write", "race-same-value"),
                (16, "write", "write", "race-in-a-warp"),
                (17, "(read|write)", "(read|write)", "race-same-bits"),
                (18, "(read|write)", "(read|write)", "race-behind-a-vote"),
                (19, "write", "write", "race-of-blocks"),
                (21, "(read|atomic)", "(read|atomic)", "missing-barrier"),
            ]
        ),
    ],
)
def test_threads_that_stray_are_reported_and_the_next_launch_runs(
    misled: str, num_pages: int, message: str
) -> None:
    def step(num_pages: int) -> list[int]:
        order = torch.arange(40, dtype=torch.int32).repeat(2, 1)
        state = empty_state(order.clone(), order.clone(), 40)
        table = torch.arange(num_pages, dtype=torch.int32).repeat(2, 1)
        selection = i32([[3, 5, 3]] * 2)
        diff = diff_slots(selection, table, i32([40, 40]), i32([2]), state, impl=misled)
        return diff.num_misses.tolist()

    assert step(10) == [2, 2]
    with pytest.raises(RuntimeError, match=message):
        step(num_pages)
    assert step(ORDERED) == [2, 2]
