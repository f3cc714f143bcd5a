"""A few steps at small sizes, to be run under compute-sanitizer: ``python small_case.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.kernels.gpu.test_graphs import Step


def main() -> None:
    """Three steps with different queries; what they give is checked by the tests."""
    step = Step()
    for seed in range(3):
        torch.manual_seed(seed)
        step.query.copy_(torch.randn(step.query.shape))
        step.run()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
