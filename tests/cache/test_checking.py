"""``checked: true`` detects planted faults."""

from __future__ import annotations

import pytest
import torch

from hisparse.cache import check_selection
from hisparse.errors import HiSparseError
from hisparse.testing import Simulator
from hisparse.types import Selection


def test_a_byte_that_differs_from_host_memory_is_found() -> None:
    sim = Simulator()
    request = sim.request(1, 100, seed=0)
    sim.prefill((request, 90))
    sim.decode(request)
    sim.manager.host.layer(1).v[request.host_pages[0], 0, 3, 5] += 1
    with pytest.raises(HiSparseError, match=r"layer 1, row 0: page 0 on the device .* differs"):
        sim.decode(request)


@pytest.mark.parametrize(
    ("pages", "length"),
    [
        pytest.param([0, 2, 2, -1], 3, id="twice"),
        pytest.param([0, 5, 9, -1], 3, id="beyond"),
        pytest.param([3, 1, -1, -1], 2, id="order"),
        pytest.param([0, 1, 2, -1], 2, id="length"),
        pytest.param([0, 1, 2, 3], 5, id="more than there are"),
    ],
)
def test_a_bad_selection_is_found(pages: list[int], length: int) -> None:
    class Step:
        num_pages = torch.tensor([9], dtype=torch.int32)

    selection = Selection(torch.tensor([[pages]]), torch.tensor([[length]]))
    with pytest.raises(HiSparseError, match="layer 4, request 0, head 0: got a selection"):
        check_selection(4, selection, Step())
