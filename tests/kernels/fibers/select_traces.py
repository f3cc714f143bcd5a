"""Selections from scores of several widths, on a given folder of sources, in a process of its own.

It prints the widths at which it found a mistake. A mistake may well bring a process down, so each
width has one too: that counts as found.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from hisparse.kernels import SelectRule, select
from tests.kernels.conftest import ON_FIBERS, run_on_fibers
from tests.kernels.fibers.build import load

#: Clusters of two blocks.
NARROWEST = 1100
NUM_WIDTHS = 6
#: Two turns of the heads that are weighed at once.
_HEADS = 10


def is_right(impl: str, width: int, seed: int) -> bool:
    """Whether all orders of threads give one selection, and that of the reference."""
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(1, _HEADS, width, generator=generator)
    count = torch.tensor([width], dtype=torch.int32)
    try:
        for heads in (1, _HEADS):
            rule, own = SelectRule(heads=1, max_pages=30), scores[:, :heads]
            got, want = (select(own, count, rule, impl=name) for name in (impl, "reference"))
            if not torch.equal(got.pages, want.pages):
                return False
    except (AssertionError, RuntimeError):
        return False
    return True


def run_width(impl: str, width: int) -> None:
    """Exit with 1 if a selection is wrong."""
    sys.exit(not all(is_right(impl, width, seed) for seed in range(4)))


def run_traces(impl: str) -> list[int]:
    """The widths at which a selection is wrong."""
    found, context = [], multiprocessing.get_context("fork")
    for width in range(NARROWEST, NARROWEST + NUM_WIDTHS):
        process = context.Process(target=run_width, args=(impl, width))
        process.start()
        process.join()
        if process.exitcode != 0:
            found.append(width)
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        run_on_fibers(patch, load(folder, folder))
        print(*run_traces(ON_FIBERS))
