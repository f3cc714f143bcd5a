"""The NUMA node of a host pool, in a made-up ``sysfs``."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hisparse.cache import numa
from hisparse.cache.numa import near_gpu, pool_processors

OWN = os.sched_getaffinity(0)
ONE = min(OWN)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU at node 1, which has 3 GiB free and one of this process's processors."""
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    monkeypatch.setattr(numa, "_SYSTEM", tmp_path)
    write(tmp_path / "bus/pci/devices/0000:dc:01.0/numa_node", "1\n")
    node = tmp_path / "devices/system/node/node1"
    write(node / "meminfo", f"Node 1 MemTotal: 9 kB\nNode 1 MemFree:   {3 * 2**20} kB\n")
    write(node / "cpulist", f"{ONE},{2**20}-{2**20 + 3}\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_pool_that_fits_is_put_on_the_gpu_s_node(system: Path) -> None:
    processors, line = pool_processors(3 * 2**30, system)
    assert processors == {ONE}
    touched = "host pool: 3 GiB touched first by the 1 processors of NUMA node 1"
    assert line == f"{touched}, that of GPU 0000:dc:01.0"


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("bus/pci/devices/0000:dc:01.0/numa_node", "-1\n", "that of GPU 0000:dc:01.0 is not known"),
        ("devices/system/node/node1/cpulist", "\n", "this process has none of its processors"),
        ("devices/system/node/node1/meminfo", "\n", "has 0 B free of the 3 GiB needed"),
        (
            "devices/system/node/node1/meminfo",
            f"Node 1 MemFree: {2**20} kB\n",
            "has 1 GiB free of the 3 GiB needed",
        ),
    ],
    ids=["unknown", "bound-elsewhere", "unreadable", "full"],
)
def test_else_all_processors_share_it_and_the_line_says_why(
    system: Path, file: str, text: str, why: str
) -> None:
    write(system / file, text)
    processors, line = pool_processors(3 * 2**30, system)
    assert processors == OWN
    assert why in line


@pytest.mark.parametrize("file", ["devices/system/node/node1", "bus/pci/devices/0000:dc:01.0"])
def test_a_system_that_says_nothing(system: Path, file: str) -> None:
    for path in (system / file).iterdir():
        path.unlink()
    assert pool_processors(1, system)[0] == OWN


def test_a_gpu_without_an_address(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace())
    assert pool_processors(1, system)[0] == OWN


def test_threads_that_touch_the_pool_are_near(
    system: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of an executor too, which touch it; afterwards this thread runs as before."""
    with caplog.at_level("INFO"), near_gpu(2**20), ThreadPoolExecutor(1) as pool:
        assert pool.submit(os.sched_getaffinity, 0).result() == {ONE}
    assert os.sched_getaffinity(0) == OWN
    assert len(caplog.records) == 1
    assert "1 MiB touched first by the 1 processors of NUMA node 1" in caplog.text
