"""A few steps at small sizes, to be run under compute-sanitizer: ``python small_case.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from hisparse.kernels import SelectRule, SketchLayout, TailPages, page_sketch, select, sketch_score
from hisparse.types import Selection, StoredKV
from tests.kernels.gpu.test_graphs import Step


def select_by_sketches(dim: int, device: str = "cuda") -> Selection:
    """Score 40 and 7 pages of the default algorithm, and two tail pages; dim 576: latents."""
    heads, size, bf16 = 1 if dim == 576 else 2, 16, torch.bfloat16
    layout = SketchLayout(dim, size, dim * 5 // 16)
    with torch.device(device):
        keys = torch.randn(41, size, heads, dim, dtype=bf16)
        sketches = torch.zeros(41, heads, layout.num_bytes, dtype=torch.uint8)
        page_sketch(keys, sketches, torch.arange(41), layout)
        table = torch.arange(1, 41, dtype=torch.int32).repeat(2, 1)
        num_pages = torch.tensor([40, 7], dtype=torch.int32)
        # Every head's rows are one row.
        pages = keys.transpose(1, 2).contiguous()
        tail = TailPages(StoredKV(pages, pages, None), num_pages // 2, num_pages.clamp(max=size))
        query = torch.randn(2, 16 * heads, dim, dtype=bf16)
        given = (query, sketches, table, num_pages, layout)
        scores, rest = sketch_score(*given, scale=dim**-0.5, tail=tail)
        return select(scores, num_pages, SelectRule(heads=heads, max_pages=9), rest=rest)


def main() -> None:
    """Three steps with different queries, and a selection that a cluster of blocks shares.

    What they give is checked by the tests.
    """
    for dim in (64, 128, 256, 576):
        select_by_sketches(dim)
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
