"""Attention by the CPU as CUDA calls it: from a thread that knows no Python."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import HostAttentionCalls, paged_attention, quantize
from hisparse.kernels.attention import op
from hisparse.types import AttentionRule, StoredKV
from tests.kernels.world import i32

PAGES, KV_HEADS, SIZE, DIM, QUERIES = 30, 2, 4, 40, 4
RULE = AttentionRule(0.3, 5.0)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.int8]


def stored(dtype: torch.dtype) -> StoredKV:
    k, v = torch.randn(2, PAGES, KV_HEADS, SIZE, DIM)
    if dtype in EIGHT_BITS:
        return quantize(k, v, dtype)
    return StoredKV(k.to(dtype), v.to(dtype), None)


def call_by_a_thread(name: str, on: Tensor, function: int, argument: int) -> None:
    """In place of ``call_cuda``. The GIL is held meanwhile: whoever takes it waits forever."""
    assert name == "launch_host_call"
    libc, thread = ctypes.PyDLL(None), ctypes.c_ulong()
    address, call = ctypes.c_void_p(function), ctypes.c_void_p(argument)
    assert libc.pthread_create(ctypes.byref(thread), None, address, call) == 0
    assert libc.pthread_join(thread, None) == 0


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was launched; each call is made at once."""
    found: list[tuple[Any, ...]] = []

    def launch(*call: Any) -> None:
        found.append(call)
        call_by_a_thread(*call)

    monkeypatch.setattr(op, "call_cuda", launch)
    return found


class Call(NamedTuple):
    """Tensors of a call of some engine's."""

    query: Tensor
    kv: StoredKV
    table: Tensor
    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, query: Tensor, kv: StoredKV, table: Tensor) -> Call:
        out = torch.full((*query.shape[:2], DIM), torch.nan)
        return cls(query, kv, table, out, torch.full(query.shape[:2], torch.nan))

    def launch(self, calls: HostAttentionCalls, on: Any = None, layer_id: int = 0) -> None:
        given = self.query, self.kv, self.table, (self.out, self.lse)
        calls.launch(self.table if on is None else on, layer_id, *given, RULE)


@pytest.mark.parametrize("heads", [1, KV_HEADS], ids=["whole-pages", "a-head-a-row"])
@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS], ids=str)
def test_it_is_attention_over_the_pages_before_the_first_gap(
    dtype: torch.dtype, heads: int
) -> None:
    torch.manual_seed(0)
    kv = stored(dtype)
    query = torch.randn(6, QUERIES, DIM).to(torch.float32 if dtype in EIGHT_BITS else dtype)
    table = i32([[-1] * 5] * 6)
    call, calls = Call.of(query, kv, table), HostAttentionCalls(heads, 2)
    for lengths in ([5, 0, 1, 3, 5, 2], [0] * 6):
        query.copy_(torch.randn(query.shape))
        table.fill_(-1)
        for row, length in enumerate(lengths):
            table[row, :length] = torch.randperm(PAGES)[:length]
        call.launch(calls)
        lens = SIZE * i32(lengths)
        expected = paged_attention(query, kv, table, lens, rule=RULE, heads=heads, impl="cpu")
        assert torch.equal(call.out, expected[0])
        assert torch.equal(call.lse, expected[1])
    calls.raise_error()


def test_a_call_takes_the_threads_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that PyTorch may start: SGLang's servers on a GPU leave it one."""
    made: list[Any] = []
    monkeypatch.setattr(op, "call_cuda", lambda *call: made.append(call[2:]))
    call = Call.of(torch.randn(2, QUERIES, DIM), stored(torch.float32), i32([[3, 7], [1, -1]]))
    before = torch.get_num_threads()
    for threads in (3, 1):
        calls = HostAttentionCalls(1, threads)
        call.launch(calls)
        function, argument = made.pop()
        try:
            # In this thread, as the driver's would: what it may start, PyTorch may then.
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)


def test_a_graph_makes_its_call_again(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[Any, ...]]
) -> None:
    """With what its tensors hold then, whatever else was launched in between."""
    calls, on = HostAttentionCalls(1, 2), SimpleNamespace(is_cuda=True)
    call = Call.of(torch.randn(2, QUERIES, DIM), stored(torch.float32), i32([[3, 7], [1, -1]]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call.launch(calls, on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first, graph = call.out.clone(), launched[0]
    for _ in range(5):
        call.launch(calls, on)
    assert torch.equal(call.out, first)
    call.query.mul_(2)
    call_by_a_thread(*graph)
    assert not torch.equal(call.out, first)
    again = call.out.clone()
    call.launch(calls, on)
    assert torch.equal(call.out, again)


def test_what_was_called_is_gone(launched: list[tuple[Any, ...]]) -> None:
    """Of shapes that differ from step to step, as those of eager steps."""
    calls, kv, pages = HostAttentionCalls(1, 2), stored(torch.float32), i32([[-1] * 4] * 100)

    def launch_all() -> int:
        for rows in range(1, 100):
            Call.of(torch.zeros(rows, KV_HEADS, DIM), kv, pages[:rows]).launch(calls)
        launched.clear()
        gc.collect()
        return int(mallinfo().uordblks)

    before = [launch_all() for _ in range(3)][-1]
    # Kept, each would take a kilobyte, and a length for each of its rows: 120 KB in all.
    assert launch_all() - before < 50_000


class Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_: ClassVar = [
        (x, ctypes.c_size_t)
        for x in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                  "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def mallinfo() -> Any:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = Mallinfo
    return function()


def test_an_error_is_kept_for_the_engine_whose_call_it_was() -> None:
    table = i32([[3, 7], [1, PAGES]])
    call = Call.of(torch.randn(2, QUERIES, DIM), stored(torch.float32), table)
    calls, others = HostAttentionCalls(1, 2), HostAttentionCalls(1, 2)
    call.launch(calls, layer_id=3)
    assert call.out.eq(0).all()
    assert call.lse.eq(-torch.inf).all()
    table[1, 1] = PAGES + 1  # The first one is kept.
    call.launch(calls, layer_id=4)
    others.raise_error()
    expected = "layer 3, attention in host memory: page_table: got 30 in row 1, entry 1, expected"
    with pytest.raises(KernelError, match=expected):
        calls.raise_error()
    calls.raise_error()
    table[1, 1] = 2
    call.launch(calls)
    assert call.lse.isfinite().all()


def test_tensors_are_checked_when_it_is_launched(launched: list[tuple[Any, ...]]) -> None:
    query = torch.randn(2, QUERIES, DIM)
    with pytest.raises(KernelError, match="page_table: got"):
        Call.of(query, stored(torch.float32), i32([[1]]).long()).launch(HostAttentionCalls(1, 2))
    assert not launched
