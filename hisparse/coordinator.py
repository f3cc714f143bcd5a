"""The order in which a forward pass happens; no tensor maths of its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import BackendAdapter
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.batch import DecodeBatch, DecodeStep, PrefillBatch, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.decode import AttendPart, DecodeAttention
from hisparse.prefill import Prefill

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
        representations: name to ``[L, host pages, ...]``.
        min_sparse_context: contexts up to so many tokens are served dense.
        dense_layers: layers that are always dense.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        algorithm: BaseSparseAlgorithm,
        manager: SparseKVCacheManager,
        adapter: BackendAdapter,
        representations: Mapping[str, Tensor],
        *,
        min_sparse_context: int = 0,
        dense_layers: frozenset[int] = frozenset(),
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.manager = manager
        self.representations = dict(representations)
        self._min_sparse_context = min_sparse_context
        self._dense_layers = dense_layers
        self._prefill = Prefill(policy, algorithm, manager, adapter, representations)
        self._decode = DecodeAttention(policy, algorithm, manager, adapter)
        self._batch: PrefillBatch | DecodeBatch | None = None
        self._step: DecodeStep | None = None
        self._parts: list[tuple[DecodeStep, AttendPart]] = []
        self._dense_parts: list[tuple[DecodeStep, AttendPart]] = []
        self._tail_slots: Tensor = torch.empty(0)
        self._filled: tuple[Tensor, Tensor] | None = None

    def on_request_begin(self, slot: int, prompt_len: int = 0) -> None:
        """A request takes over a request slot. Safe while an earlier forward is running."""
        self.manager.begin(slot)

    def on_request_end(self, slot: int) -> None:
        """A request is over. Safe while an earlier forward is running."""
        self.manager.end(slot)

    def forward_begin(self, batch: PrefillBatch | DecodeBatch) -> None:
        """Apply pending resets and capacity changes, and prepare what all layers share."""
        self._batch = batch
        size = self.policy.kv.page_size
        if isinstance(batch, PrefillBatch):
            slots, ends = np.array([(c.slot, c.end) for c in batch.chunks]).T
            self.manager.start_forward(slots, ends // size)
            self._step = None
        else:
            self.manager.start_forward(batch.slots_cpu, batch.seq_lens_cpu // size)
            self._step = self._make_step(batch)
            self._plan_parts(batch, self._step)

    def _make_step(self, batch: DecodeBatch) -> DecodeStep:
        heads, size = self.policy.heads, self.policy.kv.page_size
        head = torch.arange(heads, device=batch.slots.device)
        rows = (batch.slots[:, None] * heads + head).flatten()
        position = batch.seq_lens - 1
        tail_lens = (position % size + 1).to(torch.int32)
        step = DecodeStep(
            policy=self.policy,
            representations=self.representations,
            index=None,
            rows=rows,
            num_pages=(position // size).to(torch.int32),
            seq_lens_cpu=batch.seq_lens_cpu,
            tail_lens=tail_lens,
            host_page_table=batch.host_page_table,
            capacity=self.manager.device.capacity[rows],
            num_real_rows=torch.full((1,), rows.numel(), dtype=torch.int32, device=rows.device),
            tail_pages=self.manager.device.tail_pages[:, rows],
            tail_row_lens=tail_lens.repeat_interleave(heads),
        )
        self._tail_slots = step.tail_pages.long() * size + (step.tail_row_lens - 1)
        self._filled = None
        if (batch.seq_lens_cpu % size == 0).any():
            full = step.tail_lens == size
            page = batch.host_page_table.gather(1, step.num_pages.long()[:, None])[:, 0]
            self._filled = full.repeat_interleave(heads), torch.where(full, page, 0).long()
        return step

    def _plan_parts(self, batch: DecodeBatch, step: DecodeStep) -> None:
        """Who attends how: the choice depends on each request's own length alone."""
        size, decode = self.policy.kv.page_size, self._decode
        budget = (self.policy.max_pages + 1) * size
        seq_lens = batch.seq_lens_cpu
        fits = self.manager.capacities(batch.slots_cpu) >= (seq_lens - 1) // size
        beyond = seq_lens > budget
        dense = beyond & (seq_lens <= self._min_sparse_context)

        def parts(is_dense: np.ndarray) -> list[tuple[DecodeStep, AttendPart]]:
            ways: list[tuple[np.ndarray, AttendPart]] = [
                (~is_dense, decode.attend_sparse),
                (is_dense & fits, decode.attend_resident),
                (is_dense & ~fits, decode.attend_staged),
            ]
            return [(step if who.all() else step.take(who), how) for who, how in ways if who.any()]

        self._parts = parts(dense)
        self._dense_parts = parts(beyond) if self._dense_layers else []

    def attention(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one layer over what ``forward_begin`` was given.

        Args:
            layer_id: layer number, counted from the first layer of this rank.
            q: ``[T, Hq, D]``; T = B when decoding.
            k, v: ``[T, Hkv, D]``, of the tokens of this forward.

        Returns:
            ``[T, Hq, Dv]`` in the dtype of q.
        """
        batch, step = self._batch, self._step
        if isinstance(batch, PrefillBatch):
            return self._prefill.attention(layer_id, q, k, v, batch)
        assert batch is not None, "forward_begin comes before attention"
        assert step is not None, "a decode batch has a step"
        self.manager.append_tail(layer_id, self._tail_slots[layer_id], k, v)
        self.manager.write(layer_id, batch.host_slots, k, v)
        parts = self._dense_parts if layer_id in self._dense_layers else self._parts
        out = self._decode.attention(layer_id, q, parts)
        if self._filled is not None:
            rows, host_pages = self._filled
            keys = self.manager.tail_keys(layer_id, step)
            self.algorithm.update_representations(keys, layer_id, host_pages, step)
            self.manager.promote_tail(layer_id, step, rows)
        return out

    def forward_end(self) -> None:
        """The last layer is done."""
        if isinstance(self._batch, PrefillBatch):
            self.manager.warmed(c.slot for c in self._batch.chunks)
        self.manager.counters.publish()
