"""A few steps at small sizes, to be run under compute-sanitizer: ``python small_case.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from hisparse.kernels import SelectRule, select
from tests.kernels.gpu.test_graphs import Step


def main() -> None:
    """Three steps with different queries, and a selection that a cluster of blocks shares.

    What they give is checked by the tests.
    """
    step = Step()
    for seed in range(3):
        torch.manual_seed(seed)
        step.query.copy_(torch.randn(step.query.shape))
        step.run()
    counts = torch.tensor([5000, 2100], dtype=torch.int32, device="cuda")
    select(torch.randn(2, 4, 5000, device="cuda"), counts, SelectRule(heads=1, max_pages=64))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
