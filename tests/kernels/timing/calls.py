"""The operations of a decode layer, called with the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.kernels import (
    DecodeRows,
    NewTokens,
    RowState,
    SelectRule,
    TailPages,
    TailPools,
    append_tokens,
    diff_tables,
    gather_pages,
    page_score,
    page_sketch,
    page_summary,
    paged_attention,
    promote_tail,
    scores_new_tokens,
    select,
    sketch_score,
)
from hisparse.types import AttentionRule, KVSpec, PagedKV, Selection, StoredKV
from tests.kernels.timing.recorded import RECORDED

__all__ = ["BUDGET", "CONTEXT", "MISSES", "SPECS", "Step"]

#: Tokens of a context, of a selection with the tail page, and the share of pages to load.
CONTEXT, BUDGET, MISSES = 131072, 2048, 0.05
_SLOTS = 256
_I32 = torch.int32


def _spec(q_heads: int, kv_heads: int, width: int, **more: Any) -> KVSpec:
    return KVSpec(
        num_layers=1, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=width, page_size=16,
        dtype=torch.bfloat16, **{"v_head_dim": width} | more,
    )  # fmt: skip


#: By width of a key: heads of Llama-3.2-1B, Phi-2, Phi-3-mini, Llama-3.1-8B, Gemma-2-9B and
#: DeepSeek-V3. No kernel knows the layout of Phi-2's sketches.
SPECS = {
    64: _spec(32, 8, 64),
    80: _spec(32, 32, 80),
    96: _spec(32, 32, 96),
    128: _spec(32, 8, 128),
    256: _spec(16, 8, 256),
    576: _spec(128, 1, 576, v_head_dim=512, attention="MLA"),
}


@dataclass
class Step:
    """A decode step of ``batch`` requests of ``context`` tokens, whose KV heads select apart.

    Attributes:
        spec: heads of the model.
        batch, context: as above.
        host: tensors in host memory.
    """

    spec: KVSpec
    batch: int
    context: int = CONTEXT

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        spec, size = self.spec, self.spec.page_size
        self.latent = spec.attention == "MLA"
        self.pages = (self.context - 1) // size
        self.selected = BUDGET // size - 1
        self.host_kv = self._pool(4096, spec.num_kv_heads)
        self.host = {
            self.host_kv.k.untyped_storage()._cdata,
            self.host_kv.v.untyped_storage()._cdata,
        }
        self.heads = spec.num_kv_heads
        self.rows = self.batch * self.heads
        self.device_kv = self._pool(self.rows * (_SLOTS + 1), 1)
        self.table = self._numbers(self.batch, self.pages, below=4096)
        self.num_pages = torch.full((self.batch,), self.pages, dtype=_I32)
        self.tails = torch.arange(self.rows, dtype=_I32) * (_SLOTS + 1) + _SLOTS
        self.tail_lens = torch.full((self.rows,), size - 1, dtype=_I32)
        self.query = torch.randn(
            self.batch, spec.num_q_heads, spec.head_dim, generator=self.generator
        ).bfloat16()

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.host

    def calls(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The operations by name; those of a full tail page come last."""
        yield "append_tokens", self.append
        yield "sketch_score", self.sketch_score
        yield "page_score", self.page_score
        if self.batch == 1 or not self.latent:
            # Of latents it has a block for each request, which takes a minute here.
            yield "select", self.select
        yield "diff_tables", self.diff_tables
        yield "gather_pages", self.gather
        yield "paged_attention", self.attend
        yield "promote_tail", self.promote
        yield "page_sketch", self.page_sketch
        yield "page_summary", self.page_summary

    def append(self) -> None:
        new = self._new_tokens()
        where = new.host_slots, self.device_kv, new.tail_slots
        append_tokens(new.k, new.v, self.host_kv, *where, impl=RECORDED)

    def sketch_score(self) -> None:
        layout = build_algorithm(HiSparseConfig(algorithm="sketch")).layout(self.spec)
        # Which channels of a page are detailed decides which banks of shared memory are read.
        few = torch.zeros(64, self.spec.num_kv_heads, layout.num_bytes, dtype=torch.uint8)
        keys = torch.randn(64, 16, *self.host_kv.k.shape[1::2], generator=self.generator)
        page_sketch(keys.bfloat16(), few, torch.arange(64), layout, impl="reference")
        # On a GPU PyTorch's memory begins at multiples of 512 bytes.
        room = torch.zeros(64 * few.numel() + 512, dtype=torch.uint8)
        start = -room.data_ptr() % 512
        sketches = room[start : start + 64 * few.numel()].view(4096, *few.shape[1:])
        sketches.copy_(few.repeat(64, 1, 1))
        spec, tails = self.spec, (StoredKV(*self.device_kv), self.tails, self.tail_lens)
        appends = scores_new_tokens(spec.num_q_heads, spec.num_kv_heads)
        tail = TailPages(*tails, self._new_tokens() if appends else None)
        sketch_score(
            self.query, sketches, self.table, self.num_pages, layout, tail=tail, impl=RECORDED
        )

    def page_score(self) -> None:
        summaries, scales = self._summaries()
        page_score(self.query, summaries, self.table, self.num_pages, scales=scales, impl=RECORDED)

    def select(self) -> None:
        shape = (self.batch, self.spec.num_q_heads, self.pages)
        scores = torch.randn(shape, generator=self.generator)
        rest = torch.zeros(shape[:2])
        forced = torch.zeros(self.batch, self.pages, dtype=torch.bool)
        rule = SelectRule(heads=self.heads, max_pages=self.selected)
        select(scores, self.num_pages, rule, forced=forced, rest=rest, impl=RECORDED)

    def diff_tables(self) -> None:
        diff_tables(*self.missing(), page_size=16, impl=RECORDED)

    def missing(self) -> tuple[Selection, DecodeRows, RowState]:
        """Selections of which a part is missing, their rows, and the tables of these."""
        rows, state = self._rows()
        missing = round(MISSES * self.selected)
        chosen = state.slot_pages[:, 7 : 7 + self.selected].sort(1).values.clone()
        chosen[:, -missing:] = self.pages - missing + torch.arange(missing, dtype=_I32)
        lengths = torch.full((self.rows,), self.selected, dtype=_I32)
        return Selection(chosen, lengths), rows, state

    def gather(self) -> None:
        missing = round(MISSES * self.selected)
        sources = torch.full((self.rows, self.selected), -1, dtype=_I32)
        targets = sources.clone()
        sources[:, :missing] = self._numbers(self.rows, missing, below=4096)
        every = torch.arange(self.rows, dtype=_I32)[:, None] * (_SLOTS + 1)
        targets[:, :missing] = every + torch.arange(missing, dtype=_I32)
        gather_pages(
            self.host_kv, sources, self.device_kv, targets, heads=self.heads, impl=RECORDED
        )

    def attend(self) -> None:
        table = torch.arange(self.selected + 1, dtype=_I32) + self.tails[:, None] - _SLOTS
        lens = torch.full((self.rows,), (self.selected + 1) * 16 - 1, dtype=_I32)
        kv, rule = StoredKV(*self.device_kv), AttentionRule(0.1)
        query = self.query.view(self.rows, -1, self.spec.head_dim)
        paged_attention(query, kv, table, lens, rule=rule, impl=RECORDED)

    def promote(self) -> None:
        rows, state = self._rows()
        filled = torch.ones(self.rows, dtype=torch.bool)
        promote_tail(
            rows.rows, self.num_pages - 1, filled, rows.capacity, state, self.tails.clone(),
            pools=TailPools(self.device_kv.k, None, self.spec.num_kv_heads), impl=RECORDED,
        )  # fmt: skip

    def page_sketch(self) -> None:
        layout = build_algorithm(HiSparseConfig(algorithm="sketch")).layout(self.spec)
        sketches = torch.zeros(4096, self.spec.num_kv_heads, layout.num_bytes, dtype=torch.uint8)
        keys, pages = self._full_pages()
        page_sketch(keys, sketches, pages, layout, impl=RECORDED)

    def page_summary(self) -> None:
        keys, pages = self._full_pages()
        summaries, scales = self._summaries()
        page_summary(keys, summaries, pages, scales=scales, impl=RECORDED)

    def _numbers(self, *shape: int, below: int) -> Tensor:
        return torch.randint(1, below, shape, dtype=_I32, generator=self.generator)

    def _pool(self, pages: int, heads: int) -> PagedKV:
        spec = self.spec
        k = torch.zeros(pages, heads, 16, spec.head_dim, dtype=spec.dtype)
        return PagedKV(k, k[..., : spec.v_head_dim] if self.latent else torch.zeros_like(k))

    def _new_tokens(self) -> NewTokens:
        k = torch.zeros(self.batch, self.spec.num_kv_heads, self.spec.head_dim).bfloat16()
        v = k[..., : self.spec.v_head_dim] if self.latent else k.clone()
        slots = self._numbers(self.batch, below=4096 * 16).long(), self.tails.long() * 16 + 14
        return NewTokens(k, v, StoredKV(*self.host_kv), *slots)

    def _full_pages(self) -> tuple[Tensor, Tensor]:
        keys = torch.randn(
            self.batch, 16, self.spec.num_kv_heads, self.spec.head_dim, generator=self.generator
        )
        return keys.bfloat16(), torch.arange(1, self.batch + 1)

    def _summaries(self) -> tuple[Tensor, Tensor]:
        """Of ``quest`` with its defaults: four ranges in eight bits."""
        spec = self.spec
        shape = (4096, 4, spec.num_kv_heads, 2 * spec.head_dim)
        return torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.ones(shape[:-1])

    def _rows(self) -> tuple[DecodeRows, RowState]:
        self.generator.manual_seed(0)
        held = torch.stack(
            [torch.randperm(self.pages - 64, generator=self.generator)[:_SLOTS] for _ in self.tails]
        ).int()
        order = torch.stack(
            [torch.randperm(_SLOTS, generator=self.generator) for _ in self.tails]
        ).int()
        devices = torch.arange(_SLOTS, dtype=_I32) + self.tails[:, None] - _SLOTS
        slots = torch.zeros(self.rows, self.pages + 1, dtype=_I32)
        places = torch.arange(_SLOTS, dtype=_I32).expand_as(held)
        slots.scatter_(1, held.long(), places)
        rows = DecodeRows(
            torch.arange(self.rows),
            torch.full((self.rows,), _SLOTS, dtype=_I32),
            torch.tensor([self.rows], dtype=_I32),
            self.table,
            self.num_pages,
            self.tails,
            self.tail_lens,
            counts=torch.zeros(3, dtype=torch.int64),
        )
        return rows, RowState(held, order, devices, slots)
