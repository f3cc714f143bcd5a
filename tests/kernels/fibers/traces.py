"""Traces of the contract suite on a given folder of sources, in a process of its own.

A mistake in a kernel may well bring the process down: that too counts as found.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from tests.kernels.conftest import ON_FIBERS, run_on_fibers
from tests.kernels.fibers.build import load
from tests.kernels.world import World


def run_traces(impl: str, num_traces: int = 8) -> None:
    """A few of the traces that the contract suite draws by the hundred."""
    for seed in range(num_traces):
        world = World(2, 40, Random(seed), impl)
        world.resize([0, 1], [40, 17])
        for step in range(4):
            world.step(0, 60 + 10 * step, padded=1, shared=1)
            world.check()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        run_on_fibers(patch, load(folder, folder))
        run_traces(ON_FIBERS)
    print("nothing found")
