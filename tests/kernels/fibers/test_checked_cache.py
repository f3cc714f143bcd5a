"""``checked: true`` finds faults that the CUDA operations leave alone, on fibers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hisparse.engine.build import make_policy
from hisparse.errors import KernelError
from hisparse.kernels.operation import OPERATIONS
from hisparse.testing import Request, Simulator, simulator
from tests.kernels.world import indexed


@pytest.fixture
def served_by_cuda(fibers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookkeeping, selection and transfers by CUDA's sources, arithmetic by the CPU's."""
    for operation in OPERATIONS.values():
        if (compiled := operation.lookup("cuda")) is not None:
            monkeypatch.setitem(operation.functions, "cpu", compiled)
    monkeypatch.setattr(simulator, "make_policy", lambda *most: make_policy(*most[:-1], "cuda"))


def decode_with_a_broken_order(sim: Simulator, request: Request) -> None:
    sim.manager.device.states.lru_order.fill_(99)
    sim.decode(request)


def begin_without_free_pages(sim: Simulator, request: Request) -> None:
    sim.manager.device.num_free.zero_()
    sim.prefill((sim.request(2, 90, seed=2), 70))


def write_beyond_the_pool(sim: Simulator, request: Request) -> None:
    token = torch.zeros(1, sim.spec.num_kv_heads, sim.spec.head_dim)
    sim.manager.kv_io.write(0, torch.tensor([10**6]), token, token)


@pytest.mark.usefixtures("served_by_cuda")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(decode_with_a_broken_order, "selection: got in row 0 ", id="order"),
        pytest.param(begin_without_free_pages, "new_capacity: row .* got 0", id="capacity"),
        pytest.param(write_beyond_the_pool, "slots: got 1000000, expected 0", id="slot"),
    ],
)
def test_faults_are_reported_if_checked(
    fault: Callable[[Simulator, Request], None], message: str
) -> None:
    sim, request = running(checked=True)
    with pytest.raises(KernelError, match=message):
        fault(sim, request)


@pytest.mark.usefixtures("served_by_cuda")
def test_nothing_is_verified_unless_checked() -> None:
    """The CUDA operation skips a slot outside the pool, and decoding goes on."""
    sim, request = running(checked=False)
    write_beyond_the_pool(sim, request)
    assert sim.decode(request).isfinite().all()


def running(*, checked: bool) -> tuple[Simulator, Request]:
    sim = Simulator(checked=checked)
    device = sim.manager.device
    # As on a GPU.
    device.states = indexed(*device.states[:3])
    device._layer_states = [device.states.layer(layer) for layer in range(sim.layers)]
    request = sim.request(1, 150, seed=1)
    sim.prefill((request, 100))
    assert sim.decode(request).isfinite().all()
    return sim, request
