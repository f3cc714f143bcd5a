"""``hisparse bench kernels``: CPU kernels against the limits of the processor, in the same run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.cache.allocate import zeros
from hisparse.errors import ConfigError
from hisparse.kernels import SketchLayout, page_score, page_sketch, paged_attention, sketch_score
from hisparse.kernels.build.compiler import SOURCES, CannotBuildError
from hisparse.kernels.build.cpu import build_cpu_library
from hisparse.types import StoredKV
from hisparse_bench.options import NO_FLAG, ModelShape, Options
from hisparse_bench.report import Case, Report, Result
from hisparse_bench.timing import Candidate, time_in_turns

#: Pieces of work for each thread, and rounds of a piece, each of some hundred multiply-adds: about
#: a millisecond in all.
_ITEMS, _ROUNDS = 16, 5000


@functools.cache
def _library() -> Any:
    try:
        import tvm_ffi

        kernels = SOURCES / "cpu"
        sources = [Path(__file__).with_name("peak.cpp"), kernels / "parallel.cpp"]
        headers = sorted(kernels.glob("*.h"))
        path = build_cpu_library("peak", "the limits' loops", sources, headers=headers)
        return tvm_ffi.load_module(str(path))
    except (ImportError, OSError, CannotBuildError) as error:
        raise ConfigError(
            f"the limits of the processor cannot be measured: {error}; expected g++ and "
            "apache-tvm-ffi, as for the kernels"
        ) from None


def multiply_add(threads: int) -> int:
    """Run float32 multiply-adds on threads; returns how many, of all threads together."""
    items = _ITEMS * threads
    _library().multiply_add(items, _ROUNDS, threads)
    return int(items * _ROUNDS * _library().multiply_adds_per_round())


def read(tensors: Sequence[Tensor], threads: int) -> None:
    """Read contiguous tensors on the CPU from the first byte to the last."""
    for tensor in tensors:
        _library().read(tensor, threads)


_PEAK, _READ = "multiply_add", "read"


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A kernel with its inputs.

    Attributes:
        name: name of the kernel.
        dtype: dtype of its inputs.
        run: runs it on a copy of the inputs: ``(copy, impl) -> result``.
        inputs: tensors that it reads whole, for each copy; all copies are equal.
        multiply_adds: of one run.
        tolerance: largest allowed error, relative to the largest number.
    """

    name: str
    dtype: str
    run: Callable[[int, str], Tensor]
    inputs: list[list[Tensor]]
    multiply_adds: int
    tolerance: float = 1e-4

    @property
    def num_bytes(self) -> int:
        """Bytes that one run reads."""
        return sum(x.numel() * x.itemsize for x in self.inputs[0])

    def agrees(self) -> bool:
        """Whether the kernel equals the reference, up to rounding."""
        got, expected = (self.run(0, impl) for impl in ("cpu", "reference"))
        slack = self.tolerance * float(expected.abs().max())
        return torch.allclose(got, expected, rtol=self.tolerance, atol=slack)


@dataclass(frozen=True, kw_only=True)
class KernelsBench(ModelShape):
    """``page_score``, ``sketch_score`` and ``paged_attention``, with one thread and with all.

    A kernel's time is compared with that of the limit that binds, whichever takes longer: a plain
    read of the same bytes, or as many float32 multiply-adds in registers. All three are timed in
    turns. Kernel and read find their inputs in memory alike, not in a cache: each run takes another
    copy, and the read is half the copies ahead of the kernel. The read goes over contiguous bytes,
    four streams at a time, where ``paged_attention`` takes pages in random order. All inputs lie in
    memory as pools do, in huge memory pages. What is counted as a multiply-add:

    - ``page_score``: 2 D for each query head and range, q+ . high + q- . low;
    - ``sketch_score``: for each query head and page D, and one for each token in each of the
      detailed channels; exponentials and the unpacking of bits are not counted;
    - ``paged_attention``: 2 D for each query head and token. "misses" has rows of a twentieth of
      the budget, as ``"miss": "host"`` attends.

    Attributes:
        context: tokens whose pages are scored.
        budget: tokens attended.
        layers: copies of a kernel's inputs, at least.
        footprint: MiB of all copies together, at least. With more than twice the processor's caches
            inputs come from memory, as in a model; with 1 they stay in a cache if they fit.
    """

    context: int = 32768
    budget: int = 2048
    layers: int = field(default=2, metadata=NO_FLAG)
    dtype: torch.dtype = field(default=torch.float32, metadata=NO_FLAG)
    footprint: int = 1024

    def run(self, options: Options) -> list[Case]:
        """Time all kernels; the gates compare them with the reference."""
        if options.device.type != "cpu":
            raise ConfigError(f"--device: got {options.device.type}, expected cpu")
        for flag in ("context", "budget"):
            if getattr(self, flag) % self.page_size:
                raise ConfigError(
                    f"--{flag}: got {getattr(self, flag)}, expected a multiple of --page-size "
                    f"{self.page_size}"
                )
        torch.manual_seed(options.seed)
        most = torch.get_num_threads()
        try:
            return [
                self._time(work, threads, options)
                for work in self._works()
                for threads in sorted({1, most})
            ]
        finally:
            torch.set_num_threads(most)

    def _time(self, work: _Work, threads: int, options: Options) -> Case:
        torch.set_num_threads(threads)
        gate = "passed" if work.agrees() else "failed"
        copies = len(work.inputs)
        ahead = copies // 2
        times = time_in_turns(
            {
                _PEAK: Candidate(lambda step: multiply_add(threads)),
                _READ: Candidate(lambda step: read(work.inputs[(step + ahead) % copies], threads)),
                work.name: Candidate(lambda step: work.run(step % copies, "cpu")),
            },
            options.num_steps,
            device=options.device,
        )
        # A read is memory's business; the others have no bytes to speak of or are compared with it.
        moved = {_PEAK: None, _READ: work.num_bytes, work.name: work.num_bytes}
        results = [Result.of(impl, seconds, moved[impl]) for impl, seconds in times.items()]
        params = self.reported("context", "budget") | {
            "layers": copies,
            "cache": f"as {copies} copies leave it, and a read of each, half of them earlier",
            "dtype": work.dtype,
            "threads": threads,
            "bytes": work.num_bytes,
            "multiply_adds": work.multiply_adds,
        }
        limits = _limits(work, results, multiply_add(threads)) if gate == "passed" else {}
        return Case(name=work.name, params=params | limits, gate=gate, results=results)

    def _works(self) -> Iterator[_Work]:
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
            yield self._page_score(dtype)
        yield self._sketch_score()
        few = max(self.budget // 20 // self.page_size, 1) * self.page_size
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32):
            yield self._attention("paged_attention", dtype, self.budget)
            yield self._attention("paged_attention, misses", dtype, few)

    def _copies(self, inputs: Sequence[Tensor]) -> list[list[Tensor]]:
        num_bytes = sum(x.numel() * x.itemsize for x in inputs)
        count = max(self.layers, -(-self.footprint * 2**20 // num_bytes))
        return [[zeros(x.shape, x.dtype, x.device).copy_(x) for x in inputs] for _ in range(count)]

    def _query(self) -> Tensor:
        query = torch.randn(1, self.q_heads, self.head_dim)
        return query.mul_(self.head_dim**-0.5)

    def _page_score(self, dtype: torch.dtype) -> _Work:
        pages = self.context // self.page_size
        shape = (pages, Quest.ranges, self.kv_heads, 2 * self.head_dim)
        # Quest scales ranges to the largest number of fp8, 448, and stores no subnormal ones.
        ranges = 100 * torch.randn(shape)
        ranges = ranges.where(ranges.abs() >= 2**-6, 0).clamp_(-448, 448)
        summaries = self._copies([ranges.to(dtype)])
        table = torch.randperm(pages, dtype=torch.int32)[None]
        query, count = self._query(), torch.tensor([pages], dtype=torch.int32)
        return _Work(
            name="page_score",
            dtype=str(dtype).removeprefix("torch."),
            run=lambda copy, impl: page_score(query, summaries[copy][0], table, count, impl=impl),
            inputs=summaries,
            multiply_adds=2 * self.head_dim * self.q_heads * pages * Quest.ranges,
        )

    def _sketch_score(self) -> _Work:
        pages, size = self.context // self.page_size, self.page_size
        layout = SketchLayout(self.head_dim, size, round(Sketch.detail * self.head_dim), False)
        shape = (pages, self.kv_heads, layout.num_bytes)
        sketch = torch.empty(shape, dtype=torch.uint8)
        keys = torch.randn(pages, size, self.kv_heads, self.head_dim)
        page_sketch(keys, sketch, torch.arange(pages), layout)
        sketches = self._copies([sketch])
        table = torch.randperm(pages, dtype=torch.int32)[None]
        query, count = self._query(), torch.tensor([pages], dtype=torch.int32)
        return _Work(
            name="sketch_score",
            dtype="uint8",
            run=lambda copy, impl: sketch_score(
                query, sketches[copy][0], table, count, layout, impl=impl
            )[0],
            inputs=sketches,
            multiply_adds=self.q_heads * pages * (self.head_dim + layout.num_channels * size),
            tolerance=0.03,  # It rounds queries and scales to 8 bits.
        )

    def _attention(self, name: str, dtype: torch.dtype, tokens: int) -> _Work:
        """Attention over all pages of a pool, in random order: it reads what a plain read does.

        Rows have ``tokens`` tokens of one head each. There are as many as have a budget's together.
        """
        requests, pages = self.budget // tokens, tokens // self.page_size
        shape = (requests * pages, self.kv_heads, self.page_size, self.head_dim)
        kv = [torch.randn(shape).to(dtype) for _ in range(2)]
        if dtype.itemsize == 1:
            kv.append(torch.full((*shape[:3], 2), 127, dtype=torch.uint8))  # Scales of 1.
        pools = self._copies(kv)
        table = torch.randperm(shape[0], dtype=torch.int32).view(requests, pages)
        table = table.repeat_interleave(self.kv_heads, dim=0)
        lens = torch.full((len(table),), tokens, dtype=torch.int32)
        query = self._query().view(self.kv_heads, -1, self.head_dim).repeat(requests, 1, 1)
        return _Work(
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            run=lambda copy, impl: paged_attention(
                query, StoredKV(*pools[copy]), table, lens, heads=self.kv_heads, impl=impl
            )[0],
            inputs=pools,
            multiply_adds=2 * self.head_dim * self.q_heads * requests * tokens,
        )


def _limits(work: _Work, results: list[Result], peak_multiply_adds: int) -> dict[str, Any]:
    """The limit that binds, and the share of it that the kernel reaches.

    A multiply-add counts as two operations in GFLOP/s.
    """
    us = {result.impl: result.median_us for result in results}
    peak_gflop_s = 2e-3 * peak_multiply_adds / us[_PEAK]
    limits = {"read": us[_READ], _PEAK: us[_PEAK] * work.multiply_adds / peak_multiply_adds}
    binding = max(limits, key=lambda name: limits[name])
    return {
        "gflop_s": round(2e-3 * work.multiply_adds / us[work.name], 2),
        "peak_gflop_s": round(peak_gflop_s, 2),
        "limit": binding,
        "limit_us": round(limits[binding], 2),
        "percent_of_limit": round(100 * limits[binding] / us[work.name], 1),
    }


class KernelsReport(Report):
    """A report with one line for each kernel and number of threads."""

    def print_table(self, console: Console) -> None:
        """Print times, rates, and the share of the limit that binds."""
        table = Table(title=self.title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("kernel", overflow="fold")
        table.add_column("dtype", overflow="fold")
        for head in ("thr.", "ms", "GB/s", "read", "GFLOP/s", "peak", "limit", "%"):
            table.add_column(head, justify="right", no_wrap=True)
        for case in self.cases:
            if case.gate != "passed":
                table.add_row(case.name, case.params["dtype"], "the check failed")
                continue
            by_impl, params = {result.impl: result for result in case.results}, case.params
            own = by_impl[case.name]
            table.add_row(
                case.name,
                params["dtype"].removesuffix("_e4m3fn"),
                str(params["threads"]),
                f"{own.median_us / 1e3:.2f}",
                f"{own.gb_s:.1f}",
                f"{by_impl[_READ].gb_s:.1f}",
                f"{params['gflop_s']:.0f}",
                f"{params['peak_gflop_s']:.0f}",
                "FMA" if params["limit"] == _PEAK else "read",
                f"{params['percent_of_limit']:.0f}",
            )
        console.print(table)
        console.print(
            "read: a plain read of as many bytes, equally cold. peak: multiply-adds in registers. "
            "%: of the limit that binds. Medians; all checks against the reference ran on these "
            "inputs.",
            highlight=False,
        )
