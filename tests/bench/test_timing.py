"""Timing on a GPU, with stand-ins for its events: the device sleeps until a step is queued."""

from __future__ import annotations

import pytest
import torch

from hisparse_bench.timing import Candidate, time_in_turns, us_by_kernel


class Device:
    """Notes what it is given; its first event is reached early while it sleeps too little.

    Attributes:
        queued: names of what was queued, in order.
        slept: cycles of each sleep.
        enough: cycles that the host takes to queue a step.
    """

    def __init__(self, enough: int) -> None:
        self.queued: list[str] = []
        self.slept: list[int] = []
        self.enough = enough

    def sleep(self, cycles: int) -> None:
        self.queued.append("sleep")
        self.slept.append(cycles)

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._device.queued.append("event")

    def query(self) -> bool:
        return self._device.slept[-1] < self._device.enough

    def elapsed_time(self, end: Event) -> float:
        return 2.0


@pytest.mark.parametrize("enough", [0, 10_000_000])
def test_the_device_waits_for_the_host(monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
    device = Device(enough)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step = Candidate(lambda number: device.queued.append("step"))
    times = time_in_turns({"a": step}, 6, device=torch.device("cuda"), num_warmups=4)
    assert times["a"] == [0.002] * 5  # Of six timed steps one begins a block.
    assert device.queued == ["sleep", "event", "step", "event"] * 10
    # It grows until it is enough, within the steps that are not timed.
    assert device.slept == sorted(device.slept)
    assert device.slept[4:] == device.slept[4:5] * 6
    assert device.slept[4] >= enough


def test_times_of_kernels_with_the_same_short_name_are_added() -> None:
    """Each after its own median: a mixture of two has none that says anything."""
    plain = "void at::native::(anonymous namespace)::fill<{}>(int)".format
    found = {plain(4): [2.0] * 4, plain(8): [20.0] * 2, "_attend": [9.0, 10.0], "tiny": [0.5]}
    assert us_by_kernel(found, 2) == {
        "at::native::fill<8>": 20.0,
        "_attend": 9.5,
        "at::native::fill<4>": 4.0,
    }
    cut = {"k<a>(int, int)": [2.0] * 4, "void k<a>(long)": [20.0] * 2}
    assert us_by_kernel(cut, 2) == {"k<a>": 24.0}
