"""``page_table``: device pages in the order of the slots."""

from __future__ import annotations

import pytest
import torch

from hisparse.errors import KernelError
from hisparse.kernels import page_table
from tests.kernels.world import i32

PAGES = i32([[10, 11, 12, -1], [20, 21, 22, 23], [30, 31, -1, -1]])


def test_slots_become_pages(impl: str) -> None:
    table = page_table(PAGES, torch.tensor([2, 0]), i32([[1, 0, -1], [2, -1, 0]]), impl=impl)
    assert table.tolist() == [[31, 30, -1], [12, -1, 10]]


def test_inputs_may_be_strided(impl: str) -> None:
    slots, rows = i32([[1, 0], [0, 1]]).t(), torch.tensor([1, 9, 0])[::2]
    assert page_table(PAGES, rows, slots, impl=impl).tolist() == [[21, 20], [10, 11]]


@pytest.mark.parametrize(("rows", "slot"), [(3, 0), (0, 4)], ids=["row", "slot"])
def test_what_is_in_no_table_is_refused(impl: str, rows: int, slot: int) -> None:
    with pytest.raises((KernelError, IndexError)):
        page_table(PAGES, torch.tensor([rows]), i32([[slot]]), impl=impl)
