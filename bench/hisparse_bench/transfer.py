"""``hisparse bench transfer``: gather scattered pages from a large host pool."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.cache import HostKVPool
from hisparse.errors import ConfigError
from hisparse.kernels import gather_pages
from hisparse.types import KVSpec, PagedKV
from hisparse_bench.options import Options
from hisparse_bench.report import Case, Result
from hisparse_bench.timing import Candidate, time_in_turns


@dataclass(frozen=True, kw_only=True)
class TransferBench:
    """Gathers pages into device pages; each step reads pages that no earlier step has read.

    Attributes:
        pool_bytes: bytes of the host pool, keys and values.
        page_bytes: bytes of a page's keys; its values take as many.
        pages: pages gathered in a step.
    """

    pool_bytes: int = 4 << 30
    page_bytes: int = 4096
    pages: int = 2048

    def run(self, options: Options) -> Case:
        """Time all; the gate compares every gathered page. ``memcpy`` copies contiguous bytes."""
        num_pages = self.pool_bytes // (2 * self.page_bytes)
        steps = options.num_steps + 3
        if self.page_bytes % 64 or self.page_bytes <= 0:
            raise ConfigError(f"--page-bytes: got {self.page_bytes}, expected a multiple of 64")
        if steps * self.pages > num_pages:
            raise ConfigError(
                f"--pool-bytes: got {self.pool_bytes}, expected "
                f"{steps * self.pages * 2 * self.page_bytes} or more, so that each of {steps} "
                "steps reads pages of its own"
            )
        host = self._pool(num_pages, options)
        work = _TransferWorkload(host, self.pages, options)
        candidates = {
            "reference": Candidate(work.reference),
            "memcpy": Candidate(work.contiguous),
            options.device.type: Candidate(work.gather),
        }
        gate = "passed" if work.agree() else "failed"
        times = time_in_turns(candidates, options.num_steps, device=options.device)
        moved = self.pages * 2 * self.page_bytes
        return Case(
            name="transfer",
            params={
                "pool_bytes": host.num_bytes,
                "page_bytes": self.page_bytes,
                "pages": self.pages,
                "bytes": moved,
                "threads": torch.get_num_threads(),
                "cache": "cold source, warm destination",
            },
            gate=gate,
            results=[Result.of(impl, seconds, moved) for impl, seconds in times.items()],
        )

    def _pool(self, num_pages: int, options: Options) -> HostKVPool:
        kv = KVSpec(
            num_layers=1,
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=self.page_bytes // 64,
            v_head_dim=self.page_bytes // 64,
            dtype=torch.float32,
            page_size=16,
        )
        pool = HostKVPool(kv, num_pages, "page_head", pin=options.device.type == "cuda")
        # Written once, because untouched memory is mapped to one shared page of zeros.
        for pages in pool.layer(0):
            pages.view(torch.int32).copy_(_pattern(pages.shape))
        return pool


def _pattern(shape: torch.Size) -> Tensor:
    """Values that differ between the words of a page and between pages."""
    words = torch.arange(shape[1:].numel(), dtype=torch.int32).view(shape[1:])
    page = torch.arange(shape[0], dtype=torch.int32).view(-1, 1, 1, 1)
    return words + (page << 10)


class _TransferWorkload:
    """The pages of each step, and the implementations that move them."""

    def __init__(self, host: HostKVPool, pages: int, options: Options) -> None:
        self._host, self._pages = host.layer(0), pages
        generator = torch.Generator().manual_seed(options.seed)
        order = torch.randperm(host.num_pages, generator=generator, dtype=torch.int64).int()
        self._lists = order[: (options.num_steps + 3) * pages].view(-1, 1, pages).to(options.device)
        shape = (pages, *self._host.k.shape[1:])
        self._device = PagedKV(*(torch.zeros(shape, device=options.device) for _ in range(2)))
        self._targets = torch.arange(pages, dtype=torch.int32, device=options.device)[None]

    def gather(self, step: int) -> None:
        """Gather with the device's kernel."""
        gather_pages(self._host, self._lists[step], self._device, self._targets)

    def reference(self, step: int) -> None:
        """Gather with the PyTorch reference."""
        sources = self._lists[step]
        gather_pages(self._host, sources, self._device, self._targets, impl="reference")

    def contiguous(self, step: int) -> None:
        """Copy as many contiguous bytes, which no other step has read."""
        first = step * self._pages
        for target, source in zip(self._device, self._host, strict=True):
            part = source[first : first + self._pages]
            if target.is_cuda:
                target.copy_(part, non_blocking=True)
            else:
                ctypes.memmove(target.data_ptr(), part.data_ptr(), part.nbytes)

    def agree(self) -> bool:
        """Whether every step's pages equal the pool's bit for bit."""
        for step in range(len(self._lists)):
            for pages in self._device:
                pages.fill_(torch.nan)
            self.gather(step)
            index = self._lists[step, 0].cpu().long()
            for target, source in zip(self._device, self._host, strict=True):
                if not torch.equal(target.cpu().view(torch.int32), source[index].view(torch.int32)):
                    return False
        return True
