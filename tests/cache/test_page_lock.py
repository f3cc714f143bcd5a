"""Page-locked memory without a GPU: a runtime of CUDA that writes down what is registered."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hisparse.cache import HostKVPool, allocate, numa
from hisparse.cache.allocate import zeros
from hisparse.errors import CapacityError
from tests.shapes import small_spec

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
PIECE = 16 * PAGE


class FakeRuntime:
    """``torch.cuda.cudart()``; refuses the registration number ``fails_at``."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.processors: set[int] = set()

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
        assert flags == 3, "portable and mapped"
        self.processors = os.sched_getaffinity(0)
        if len(self.calls) == self.fails_at:
            return 2
        assert begin % PAGE == 0, "registrations share no page of the kernel"
        assert all(begin + size <= a or a + n <= begin for a, n in self.registered.items())
        assert all(map(is_mapped, (begin, begin + size - 1)))
        self.calls.append((begin, size))
        self.registered[begin] = size
        return 0

    def cudaHostUnregister(self, begin: int) -> int:
        assert is_mapped(begin), "unmapped before it was unregistered"
        del self.registered[begin]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"reason {error}"


def mappings() -> list[tuple[range, str]]:
    """Addresses and flags of all mappings of this process."""
    found, addresses = [], range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:":
            found.append((addresses, " ".join(rest)))
        elif not first.endswith(":"):
            begin, end = first.split("-")
            addresses = range(int(begin, 16), int(end, 16))
    return found


def not_forked() -> list[range]:
    """Mappings that a forked child does not get; threads and allocators of others make none."""
    return [addresses for addresses, flags in mappings() if "dc" in flags.split()]


def is_mapped(address: int) -> bool:
    return any(address in addresses for addresses, _ in mappings())


def resident_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's mapping that have been touched."""
    pages = (tensor.nbytes + PAGE - 1) // PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
        entries.seek(tensor.data_ptr() // PAGE * 8)
        table = entries.read(8 * pages)
    return PAGE * sum(table[i + 7] >> 7 for i in range(0, len(table), 8))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(allocate, "is_readable_in_place", lambda: True)
    monkeypatch.setattr(allocate, "_forget_error", lambda: None)
    monkeypatch.setattr(allocate, "PIECE_BYTES", PIECE)
    return fake


def pinned(num_bytes: int) -> Tensor:
    return zeros([num_bytes], torch.uint8, CPU, pin=True)


@pytest.mark.parametrize("num_bytes", [1, PAGE, PIECE - 1, PIECE])
def test_small_memory_is_one_registration(runtime: FakeRuntime, num_bytes: int) -> None:
    memory = pinned(num_bytes)
    whole = -(-num_bytes // PAGE) * PAGE
    assert runtime.calls == [(memory.data_ptr(), whole)]


@pytest.mark.parametrize("num_bytes", [PIECE + 1, 3 * PIECE, 5 * PIECE + PAGE + 7])
def test_pieces_cover_exactly_the_memory(runtime: FakeRuntime, num_bytes: int) -> None:
    """Bytes taken equal bytes planned; pieces end where the copy engine expects it."""
    memory = pinned(num_bytes)
    begin, at = memory.data_ptr(), memory.data_ptr()
    for first, size in runtime.calls:
        assert first == at
        assert 0 < size <= PIECE
        assert first // PIECE == (first + size - 1) // PIECE
        at = first + size
    assert at == begin + -(-num_bytes // PAGE) * PAGE
    assert resident_bytes(memory) == at - begin, "committed before a request comes"
    assert memory.count_nonzero() == 0


def test_a_forked_child_gets_no_copy(runtime: FakeRuntime) -> None:
    memory = pinned(PIECE)
    assert any(memory.data_ptr() in addresses for addresses in not_forked())


def test_memory_is_unregistered_when_its_last_view_is_gone(runtime: FakeRuntime) -> None:
    view = pinned(3 * PIECE).view(torch.int64)[5:9]
    gc.collect()
    assert len(runtime.registered) >= 3
    view += 1
    del view
    gc.collect()
    assert not runtime.registered


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_refused_piece(
    runtime: FakeRuntime, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the limits, and nothing stays registered or mapped."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    runtime.fails_at = fails_at
    before = not_forked()
    with pytest.raises(CapacityError) as refused:
        pinned(4 * PIECE)
    locked = sum(size for _, size in runtime.calls)
    assert str(refused.value) == (
        f"page-locked host memory: {4 * PIECE // 1024} KiB were refused (RuntimeError: "
        f"cudaHostRegister: reason 2, after {f'{locked // 1024} KiB' if locked else '0 B'} were "
        "page-locked); lower host_memory; ulimit -l is 64 KiB"
    )
    assert len(runtime.calls) == fails_at
    assert not runtime.registered
    del refused
    gc.collect()
    assert not_forked() == before


def test_a_pool_takes_the_bytes_that_were_planned(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is touched by the processors of the GPU's node."""
    near = {min(os.sched_getaffinity(0))}
    monkeypatch.setattr(numa, "pool_processors", lambda *_: (near, "near"))
    widths = {"head_dim": 24, "v_head_dim": 16, "page_size": 16}
    spec = small_spec(num_layers=3, dtype=torch.float16, **widths)
    pool = HostKVPool(spec, 37, "page_head", pin=True)
    taken = sum(runtime.registered.values())
    assert pool.num_bytes <= taken < pool.num_bytes + 2 * PAGE
    assert runtime.processors == near
    del pool
    gc.collect()
    assert not runtime.registered


EXIT = """
    import os, sys
    import torch
    from hisparse.cache import allocate
    from tests.cache.test_page_lock import FakeRuntime

    class Printing(FakeRuntime):
        def cudaHostUnregister(self, begin):
            print("unregister", begin, flush=True)
            return super().cudaHostUnregister(begin)

    runtime = Printing()
    torch.cuda.cudart = lambda: runtime
    torch.cuda.synchronize = lambda: print("synchronize", flush=True)
    allocate.is_readable_in_place = lambda: True
    memory = allocate.zeros([4096], torch.uint8, torch.device("cpu"), pin=True)
    print("pinned", memory.data_ptr(), flush=True)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        sys.exit()
"""


def test_memory_is_unregistered_at_exit_by_its_process_alone() -> None:
    """After the device has finished; a forked child, which exits first, leaves it alone."""
    line = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(EXIT)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=dict(os.environ))
    pinned_at, *rest = done.stdout.splitlines()
    assert rest == ["synchronize", pinned_at.replace("pinned", "unregister")]


def test_where_cuda_cannot_read_it_in_place(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """WSL 2: PyTorch's own pinned memory, and a warning of what it takes."""
    asked = []

    def pin(*shape: int, pin_memory: bool, **options: torch.dtype) -> Tensor:
        asked.append(pin_memory)
        return torch.empty(*shape, **options)

    monkeypatch.setattr(allocate, "is_readable_in_place", lambda: False)
    monkeypatch.setattr(torch, "zeros", pin)
    pinned(PIECE)
    assert asked == [True]
    assert not runtime.calls
    assert "pinned memory may take twice its size" in caplog.text
