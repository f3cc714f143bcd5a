"""The order in which a forward pass happens; no tensor maths of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import BackendAdapter
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.cache import SparseKVCacheManager
from hisparse.engine.decode import DecodeAttention, DecodePart, SelectionObserver
from hisparse.engine.extensions.prefetch import LayerSpeculation, StepSpeculation
from hisparse.engine.extensions.tail_estimate import TailEstimate
from hisparse.engine.modes import DecodePlan, Ways
from hisparse.engine.prefill import Prefill
from hisparse.engine.representations import Representations
from hisparse.engine.step import (
    DecodeBatch,
    DecodeStep,
    PrefillBatch,
    PrefillChunk,
    SelectionPolicy,
)
from hisparse.errors import HiSparseError
from hisparse.types import IndexerInputs, PagedKV

__all__ = ["SparseCoordinator"]


class SparseCoordinator:
    """Leads algorithm, cache manager and adapter through every forward.

    The life of a request: ``on_request_begin``, then forwards that contain it (each one
    ``forward_begin``, ``attention`` for every layer in order, ``forward_end``), then
    ``on_request_end``.

    Args:
        policy: shapes of the model and what selections have to keep to.
        algorithm: what to keep.
        manager: where it is.
        adapter: how to attend.
        representations: what the algorithm and ``tail_estimate`` remember, zeros so far.
        min_sparse_context: contexts up to so many tokens are served dense.
        dense_layers: layers that are always dense.
        reuse_layers: layers that share a selection.
        tail_estimate: whether pages that are not selected are estimated by their means.
        speculate: whose query selects ahead: that of the step before, or the layer's own,
            predicted from what the layer before gets (:meth:`foresee`); None: nobody's.
        speculation_threshold: likeness to that query above which its selection is kept.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        algorithm: BaseSparseAlgorithm,
        manager: SparseKVCacheManager,
        adapter: BackendAdapter,
        representations: Representations,
        *,
        min_sparse_context: int = 0,
        dense_layers: frozenset[int] = frozenset(),
        reuse_layers: int = 1,
        tail_estimate: bool = False,
        speculate: Literal["step", "layer"] | None = None,
        speculation_threshold: float = 0.0,
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.manager = manager
        self.representations = representations
        tensors, indexes = representations.tensors, representations.indexes
        self._dense_layers = dense_layers
        self._plan = DecodePlan(
            policy,
            algorithm,
            min_sparse_context=min_sparse_context,
            dense_layers=dense_layers,
            reuse_layers=reuse_layers,
        )
        self._tail = TailEstimate(policy, adapter) if tail_estimate else None
        self._prefill = Prefill(policy, algorithm, manager, adapter, tensors, indexes, self._tail)
        counters, above = manager.counters, speculation_threshold
        #: Whether :meth:`foresee` may be called.
        self.foresees = speculate == "layer"
        self._decode = DecodeAttention(
            policy,
            algorithm,
            manager,
            adapter,
            tail=self._tail,
            of_steps=StepSpeculation(policy, above, tensors, counters)
            if speculate == "step"
            else None,
            of_layers=LayerSpeculation(policy, above, counters) if self.foresees else None,
            reuse_layers=reuse_layers,
            dense_layers=dense_layers,
        )
        self._batch: PrefillBatch | DecodeBatch | None = None
        self._step: DecodeStep | None = None
        self._parts: list[DecodePart] = []
        self._dense_parts: list[DecodePart] = []
        algorithm.initialize(tensors, policy)
        self._tail_slots: Tensor = torch.empty(0)
        self._filled: tuple[Tensor, Tensor] | None = None

    def observe(self, observer: SelectionObserver | None) -> None:
        """Let somebody see every selection; None: nobody any more."""
        self._decode.observer = observer

    def on_request_begin(self, slot: int, prompt_len: int = 0) -> None:
        """A request takes over a request slot. Safe while an earlier forward is running."""
        self.manager.begin(slot)
        self.representations.begin(slot)

    def on_request_end(self, slot: int) -> None:
        """A request is over. Safe while an earlier forward is running."""
        self.manager.end(slot)
        self.representations.end(slot)

    @property
    def not_capturable(self) -> str | None:
        """Why no decode step can be captured in a CUDA graph; None: steps can."""
        if self.algorithm.reads_host_keys:
            return f"algorithm {type(self.algorithm).__name__} reads keys in host memory"
        if self.manager.is_checked:
            return "checked is true, which reads every selection back"
        if self._decode.observer is not None:
            return "somebody looks at every selection"
        return None

    def prepare_replay(self, batch: DecodeBatch) -> bool:
        """What a captured decode step needs of the host, before each replay: resets, capacities
        and counts, which :meth:`forward_begin` sees to where nothing is captured.

        Args:
            batch: as the host knows it, without padding.

        Returns:
            False if the graph would not serve these requests as an eager step does, which then has
            to be begun: a dense context is too long for its row's device pages, whose number
            depends on what else runs, or a request is in slot 0, which is that of padding.
        """
        if self.not_capturable is not None or not batch.slots_cpu.all():
            return False
        ways, dense = self._start_decode(batch)
        if ways.staged.any() or (dense is not None and dense.staged.any()):
            return False
        self._plan.count(self.manager.counters, batch.seq_lens_cpu, ways, dense)
        return True

    def _start_decode(self, batch: DecodeBatch) -> tuple[Ways, Ways | None]:
        """Resets and capacities; who is attended how, in sparse layers and in always dense ones."""
        self.representations.apply_resets()
        slots, seq_lens = batch.slots_cpu, batch.seq_lens_cpu
        self.manager.start_forward(slots, seq_lens // self.policy.kv.page_size)
        capacities = self.manager.capacities(slots)
        return self._plan.ways(seq_lens, capacities), self._plan.dense_ways(seq_lens, capacities)

    def forward_begin(self, batch: PrefillBatch | DecodeBatch) -> None:
        """Apply pending resets and capacity changes, and prepare what all layers share.

        With a batch of static tensors (``num_real``) only the latter: operations on tensors, to be
        captured with the layers. Like them they do nothing for padding but in its own page.

        Raises:
            HiSparseError: such a batch, and :attr:`not_capturable`.
        """
        self._batch = batch
        if isinstance(batch, PrefillBatch):
            self._begin_prefill(batch)
        elif batch.num_real is None:
            ways, dense = self._start_decode(batch)
            self._plan.count(self.manager.counters, batch.seq_lens_cpu, ways, dense)
            self._step = step = self._make_step(batch)
            self._parts = self._split(step, ways)
            self._dense_parts = [] if dense is None else self._split(step, dense)
        else:
            self._begin_captured(batch)

    def _begin_prefill(self, batch: PrefillBatch) -> None:
        kv = self.policy.kv
        self.representations.apply_resets()
        slots, ends = np.array([(c.slot, c.end) for c in batch.chunks]).T
        self.manager.start_forward(slots, ends // kv.page_size)
        self.manager.counters.count_written(batch.host_slots.numel() * kv.token_bytes)
        self._step = None

    def _begin_captured(self, batch: DecodeBatch) -> None:
        """One part for all: who is dense is decided on the device."""
        if self.not_capturable is not None:
            raise HiSparseError(f"a decode step cannot be captured: {self.not_capturable}")
        self._step = step = self._make_step(batch)
        dense = self._plan.dense_requests(step, batch.seq_lens)
        self._parts = [
            DecodePart(
                step=step,
                attend=self._decode.attend_sparse,
                dense=dense,
                width=self._plan.width,
            )
        ]
        self._dense_parts = [DecodePart(step=step, attend=self._decode.attend_resident)]

    def _make_step(self, batch: DecodeBatch) -> DecodeStep:
        heads, size = self.policy.heads, self.policy.kv.page_size
        head = torch.arange(heads, device=batch.slots.device)
        rows = (batch.slots[:, None] * heads + head).flatten()
        position = batch.seq_lens - 1
        tail_lens = (position % size + 1).to(torch.int32)
        if batch.num_real is None:
            num_real_rows = torch.full((1,), rows.numel(), dtype=torch.int32, device=rows.device)
        else:
            num_real_rows = batch.num_real * heads
        step = DecodeStep(
            policy=self.policy,
            representations=self.representations.tensors,
            index=None,
            slots=batch.slots,
            rows=rows,
            num_pages=(position // size).to(torch.int32),
            seq_lens_cpu=batch.seq_lens_cpu,
            tail_lens=tail_lens,
            host_page_table=batch.host_page_table,
            capacity=self.manager.device.capacity[rows],
            num_real_rows=num_real_rows,
            tail_pages=self.manager.device.tail_pages[:, rows],
            tail_row_lens=tail_lens.repeat_interleave(heads),
            pages=self.manager,
            indexes=self.representations.indexes,
        )
        self._tail_slots = step.tail_pages.long() * size + (step.tail_row_lens - 1)
        self._filled = self._find_filled(batch, step)
        return step

    def _find_filled(self, batch: DecodeBatch, step: DecodeStep) -> tuple[Tensor, Tensor] | None:
        """``[R] bool``, rows whose tail page this step fills, and ``[B] int64``, the host pages of
        the tails that are full, else 0; None: the host knows that there are none.
        """
        heads, size = self.policy.heads, self.policy.kv.page_size
        full = step.tail_lens == size
        if batch.num_real is not None:
            full &= torch.arange(full.shape[0], device=full.device) < batch.num_real
        elif not (batch.seq_lens_cpu % size == 0).any():
            return None
        page = batch.host_page_table.gather(1, step.num_pages.long()[:, None])[:, 0]
        return full.repeat_interleave(heads), torch.where(full, page, 0).long()

    def _split(self, step: DecodeStep, ways: Ways) -> list[DecodePart]:
        decode = self._decode
        attends = (decode.attend_sparse, decode.attend_resident, decode.attend_staged)
        return [
            DecodePart(step=step if who.all() else step.take(who), attend=attend)
            for who, attend in zip(ways, attends, strict=True)
            if who.any()
        ]

    def attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None = None,
    ) -> Tensor:
        """Attention of one layer over what ``forward_begin`` was given.

        Args:
            layer_id: layer number, counted from the first layer of this rank.
            q: ``[T, Hq, D]``; T = B when decoding.
            k, v: ``[T, Hkv, D]``, of the tokens of this forward.
            indexer: what the model's own indexer made of them.

        Returns:
            ``[T, Hq, Dv]`` in the dtype of q.
        """
        batch, step = self._batch, self._step
        if isinstance(batch, PrefillBatch):
            return self._prefill.attention(layer_id, q, k, v, batch, indexer)
        assert batch is not None, "forward_begin comes before attention"
        assert step is not None, "a decode batch has a step"
        self.manager.append(layer_id, self._tail_slots[layer_id], batch.host_slots, k, v)
        parts = self._dense_parts if layer_id in self._dense_layers else self._parts
        out = self._decode.attention(layer_id, q, parts, indexer)
        if self._filled is not None:
            rows, host_pages = self._filled
            tail = self.manager.tail_pages(layer_id, step)
            keys, values = (x.transpose(1, 2) for x in tail)
            step = step if indexer is None else replace(step, indexer=indexer)
            self.algorithm.update_representations(keys, layer_id, host_pages, step)
            if self._tail is not None:
                self._tail.store(step.representations, layer_id, keys, values, host_pages)
            self.manager.promote_tail(layer_id, step, rows)
        self._decode.prefetch(layer_id, parts)
        return out

    def selects(self, layer_id: int) -> bool:
        """Whether a layer selects: neither dense, nor one that takes the selection of another."""
        return self._decode.selects(layer_id)

    def foresee(self, layer_id: int, q: Tensor) -> None:
        """Predict the queries of a layer of the decode step that has begun: they select for it.

        Args:
            layer_id: number of a layer that has not begun; nothing is done unless it
                :meth:`selects`.
            q: ``[B, Hq, D]``, near what it will be.
        """
        if self.selects(layer_id):
            self._decode.foresee(layer_id, q, self._parts)

    def remember(self, layer_id: int, chunk: PrefillChunk, k: Tensor, v: Tensor) -> None:
        """Representations of a chunk whose K and V ``[T, Hkv, D]`` are loaded, not computed.

        There are no queries to be seen, which only algorithms with a ``query_window`` miss.
        """
        self.representations.apply_resets()
        nobody = k.new_zeros(0, self.policy.kv.num_q_heads, k.shape[-1])
        self._prefill.summarize(layer_id, chunk, nobody, PagedKV(k, v))

    def forward_end(self) -> None:
        """The last layer is done."""
        if isinstance(self._batch, PrefillBatch):
            self.manager.warmed(c.slot for c in self._batch.chunks)
        self.manager.end_forward()
        self.manager.counters.publish()
