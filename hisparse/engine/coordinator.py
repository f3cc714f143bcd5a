"""Controls the order of a forward pass; contains no tensor maths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.exact_pages import ExactPages
from hisparse.engine.arrived import ArrivedRequests
from hisparse.engine.contract import call
from hisparse.engine.decode import SelectionObserver
from hisparse.engine.decode_layer import DecodeLayer
from hisparse.engine.drafts import VerifyBatch
from hisparse.engine.extensions.base import overriding
from hisparse.engine.loaded import Build, LoadedPages
from hisparse.engine.metrics import CacheStats
from hisparse.engine.modes import ModeMasks
from hisparse.engine.parts import EngineParts
from hisparse.engine.prefill import Prefill
from hisparse.engine.step import (
    DecodeBatch,
    DecodeForward,
    MixedBatch,
    PrefillBatch,
    PrefillChunk,
    divide,
)
from hisparse.engine.verify import Verification
from hisparse.errors import HiSparseError
from hisparse.types import IndexerInputs, PagedKV

__all__ = ["SparseCoordinator"]


class SparseCoordinator:
    """Calls algorithm, cache manager, adapter and extensions in order in every forward.

    The lifecycle of a request: ``on_request_begin``, then its forwards (each one
    ``forward_begin``, ``attention`` for every layer in order, ``forward_end``), then
    ``on_request_end``.

    Args:
        parts: see :func:`hisparse.engine.build.build`.

    Attributes:
        policy, algorithm, manager, representations, extensions: the parts.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.policy = parts.policy
        self.algorithm = parts.algorithm
        self.manager = parts.manager
        self.representations = parts.representations
        self.extensions = parts.extensions
        self._storing = overriding("store_pages", parts.extensions)
        self._before_step = overriding("before_step", parts.extensions)
        self._after_step = overriding("after_step", parts.extensions)
        self._modes = parts.modes
        self._window = parts.policy.kv.window
        self._decode = DecodeLayer(parts)
        self._prefill = Prefill(parts)
        self._prefill_batch: PrefillBatch | None = None
        self._step: DecodeForward | None = None
        self._verification: Verification | None = None
        self._replayed = False
        self._exact: ExactPages | None = None
        self._arrived: ArrivedRequests | None = None

    def share_pages(self) -> tuple[ExactPages, LoadedPages]:
        """Follow which pages a store may take, and build representations of those that it gave.

        Called once, before the first request, by a server that has a store.
        """
        manager, size = self.manager, self.policy.kv.page_size
        num_pages, device = manager.host.num_pages, manager.device.device
        num_slots = manager.device.capacity.shape[0] // manager.device.heads
        self._exact = ExactPages(num_pages, size, num_slots, self._modes.is_dense, device)
        loaded = LoadedPages(manager, self._build_loaded(), num_pages, size)
        self._prefill.loaded = loaded
        return self._exact, loaded

    def receive_requests(self) -> ArrivedRequests:
        """Serve requests that another server has prefilled; called once, before the first."""
        self._arrived = ArrivedRequests(self.manager, self._build_loaded())
        return self._arrived

    def stored_entries(self) -> dict[str, Tensor]:
        """What a store keeps of pages beside K and V, by name, ``[L, host pages, ...]``.

        An indexer's keys are no function of K and V. All else is built again after a load.
        """
        own = self.algorithm.representations(self.policy) if self.algorithm.indexer else {}
        return {n: tensor for n, tensor in self.representations.of_pages.items() if n in own}

    def rebuilt_entries(self) -> dict[str, Tensor]:
        """What a load has to build from K and V unless a store has it, ``[L, host pages, ...]``.

        Empty if nothing is built, or if requests have state that only building fills.
        """
        algorithm, kept = self.algorithm, self.representations
        own = algorithm.query_window or algorithm.host_token_bytes(self.policy.kv)
        if algorithm.indexer or own or not kept.only_of_pages or not self.policy.kv.full_layers:
            return {}
        return dict(kept.of_pages)

    def _build_loaded(self) -> Build | None:
        """Builds the representations that no store keeps; None: it keeps them all."""
        if not self.algorithm.indexer:
            return self.build_representations
        return self._prefill.store_extensions if self._storing else None

    def observe(self, observer: SelectionObserver | None) -> None:
        """Set the selection callback, or None to remove it."""
        self._decode.attention.observer = observer

    def on_request_begin(self, slot: int) -> None:
        """Start a request in a request slot. Safe while an earlier forward is running."""
        self.manager.residency.begin(slot)
        self.representations.begin(slot)
        if self._exact is not None:
            self._exact.begin(slot)

    def on_request_end(self, slot: int) -> None:
        """End the request of a slot. Safe while an earlier forward is running."""
        self.manager.residency.end(slot)
        self.representations.end(slot)
        if self._arrived is not None:
            self._arrived.drop(slot)

    def on_pages_replaced(self, slot: int) -> None:
        """Tell that a request may have other host pages for its computed tokens.

        A server that keeps prefixes replaces pages that two requests have both computed. Safe
        while an earlier forward is running.
        """
        self.manager.residency.replace_pages(slot)

    def on_page_copied(self, source: int, target: int) -> None:
        """Tell that host page ``target`` got the K and V of ``source``."""
        if self._exact is not None:
            self._exact.copy(source, target)

    @property
    def not_capturable(self) -> str | None:
        """The reason why decode steps cannot be captured in a CUDA graph; None: they can."""
        if self.algorithm.reads_host_keys:
            return f"algorithm {type(self.algorithm).__name__} reads keys in host memory"
        if self.manager.checked:
            return "checked is true, which reads every selection back"
        if self._decode.attention.observer is not None:
            return "selections are observed"
        return None

    def prepare_capture(self) -> None:
        """End the replayed step: a capture would otherwise take its end into the graph."""
        self._end_step(complete=self._replayed)

    def prepare_replay(self, batch: DecodeBatch) -> bool:
        """Run the host's part of a captured decode step: resets, capacities, counts.

        Args:
            batch: the real requests, without padding.

        Returns:
            False if the graph cannot serve these requests; begin an eager step instead. Reasons: a
            dense context exceeds its row's device pages (their number depends on concurrent
            requests), a request has just arrived, or one uses slot 0, the slot of the padding.
        """
        if self.not_capturable is not None or not batch.slots_cpu.all():
            return False
        if self._arrived is not None and self._arrived.any_of(batch.slots_cpu.tolist()):
            return False
        self._end_step(complete=self._replayed)
        self._start_forward(batch.slots_cpu, batch.seq_lens_cpu)
        masks, dense = self._decide_modes(batch)
        if masks.staged.any() or (dense is not None and dense.staged.any()):
            return False
        self._count(batch, masks, dense)
        self._replayed = True
        return True

    def _start_forward(self, slots: np.ndarray, seq_lens: np.ndarray) -> None:
        """Apply resets, and fit capacities to contexts of ``seq_lens [B]`` after this forward."""
        self.representations.apply_resets()
        self.manager.start_forward(slots, seq_lens // self.policy.kv.page_size)

    def _decide_modes(self, batch: DecodeBatch) -> tuple[ModeMasks, ModeMasks | None]:
        """The modes of a step in sparse layers and in dense layers, by the capacities now."""
        slots, seq_lens = batch.slots_cpu, batch.seq_lens_cpu
        self.manager.residency.drop_replaced(slots, batch.host_page_table)
        if self._exact is not None:
            self._exact.decode(slots, seq_lens, batch.host_page_table)
        held = self.manager.residency.held(slots)
        return self._modes.of(seq_lens, held), self._modes.of_dense_layers(seq_lens, held)

    def _count(self, batch: DecodeBatch, masks: ModeMasks, dense: ModeMasks | None) -> None:
        """Count a step and tell the extensions of it."""
        self._modes.count(self.manager.counters, batch.seq_lens_cpu, masks, dense)
        for extension in self._before_step:
            call(extension.before_step, None, batch.slots_cpu, batch.seq_lens_cpu, masks.sparse)

    def _end_step(self, *, complete: bool) -> None:
        """Tell the extensions that the last step has ended."""
        self._replayed = False
        for extension in self._after_step:
            call(extension.after_step, None, complete=complete)

    def forward_begin(self, batch: PrefillBatch | DecodeBatch | MixedBatch | VerifyBatch) -> None:
        """Apply pending resets and capacity changes, and prepare the data that all layers share.

        A batch with static tensors (``num_real``) is only prepared, by tensor operations that can
        be captured together with the layers. Padding writes only to its own page. In a mixed batch,
        every request is served as in a forward of its own kind.

        Raises:
            HiSparseError: the batch is static, and steps are :attr:`not_capturable`.
        """
        self._prefill_batch = self._step = self._verification = None
        if isinstance(batch, DecodeBatch) and batch.num_real is not None:
            self._begin_captured(batch)
            return
        # Before requests that begin reset the state of those that ended.
        self._end_step(complete=self._replayed)
        if isinstance(batch, DecodeBatch):
            self._start_forward(batch.slots_cpu, batch.seq_lens_cpu)
            self._step = self._decode_step(batch)
            if self._arrived is not None:
                self._arrived.begin(batch)
        elif isinstance(batch, PrefillBatch):
            self._start_forward(*batch.contexts)
            self._begin_prefill(batch)
        elif isinstance(batch, VerifyBatch):
            self._begin_verification(batch)
        else:
            self._begin_mixed(batch.prefill, batch.decode)

    def _begin_mixed(self, prefill: PrefillBatch, decode: DecodeBatch) -> None:
        """Fit capacities once to the requests of both parts, then prepare each part."""
        both = zip(prefill.contexts, (decode.slots_cpu, decode.seq_lens_cpu), strict=True)
        self._start_forward(*map(np.concatenate, both))
        self._begin_prefill(prefill)
        self._step = self._decode_step(decode)

    def _begin_prefill(self, batch: PrefillBatch) -> None:
        slots, _ = batch.contexts
        self.manager.residency.drop_replaced(slots, [c.host_pages for c in batch.chunks])
        for chunk in batch.chunks:
            self.manager.residency.keep_pages(chunk.slot, chunk.host_pages)
            if self._exact is not None:
                self._exact.prefill(chunk.start, chunk.host_pages)
        if self._prefill.loaded is not None:
            self._prefill.loaded.begin(batch.chunks)
        num_bytes = batch.num_tokens * self.manager.host.format.token_bytes
        self.manager.counters.add("written_bytes", num_bytes)
        self._prefill_batch = batch

    def _decode_step(self, batch: DecodeBatch) -> DecodeForward:
        masks, dense = self._decide_modes(batch)
        self._count(batch, masks, dense)
        step = self._new_step(batch)
        dense_parts = () if dense is None else divide(step.whole, dense)
        return replace(step, parts=divide(step.whole, masks), dense_parts=dense_parts)

    def _begin_verification(self, batch: VerifyBatch) -> None:
        self._start_forward(batch.slots_cpu, batch.longest)
        held = self.manager.residency.held(batch.slots_cpu)
        steps = list(batch.steps(self._modes.runs(batch.lengths, held)))
        forwards = [self._decode_step(batch.decode_batch(step)) for step in steps]
        self._verification = Verification(
            batch, steps, forwards, self.manager, self.representations
        )

    def _begin_captured(self, batch: DecodeBatch) -> None:
        """Prepare one part for all requests; the device decides which ones are dense."""
        if self.not_capturable is not None:
            raise HiSparseError(
                f"a decode step cannot be captured: {self.not_capturable}; expected an eager step"
            )
        step = self._new_step(batch)
        whole = step.whole
        dense = self._modes.dense_requests(whole.view.num_pages, batch.seq_lens)
        self._step = replace(
            step,
            parts=(replace(whole, dense=dense, captured=True),),
            dense_parts=(replace(whole, mode="resident", captured=True),),
        )

    def _new_step(self, batch: DecodeBatch) -> DecodeForward:
        return DecodeForward.of(batch, self.policy, self.manager, self.representations)

    def attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer over the batch of ``forward_begin``.

        Args:
            layer_id: layer number, counted from the first layer of this rank.
            q: ``[T, Hq, D]``; T = B when decoding. A mixed batch has the tokens of its chunks
                first.
            k, v: ``[T, Hkv, D]``, K and V of this forward's tokens.
            indexer: outputs of the model's own indexer for these tokens.
            sinks: ``[Hq]``, for each query head the logit of a key without a value, which joins
                the softmax; None: none does.

        Returns:
            ``[T, Hq, Dv]`` in the dtype of q.
        """
        if self._verification is not None:
            run = partial(self._decode.run, sinks=sinks)
            return self._verification.attention(layer_id, q, k, v, indexer, run)
        prefill, step = self._prefill_batch, self._step
        if prefill is None:
            assert step is not None, "forward_begin comes before attention"
            if self._arrived is not None:
                self._arrived.prepare(layer_id)
            return self._decode.run(layer_id, q, k, v, step, indexer, sinks)
        if step is None:
            return self._prefill.attention(layer_id, q, k, v, prefill, indexer, sinks)
        chunks, rows = slice(prefill.num_tokens), slice(prefill.num_tokens, None)
        of_chunks, of_rows = (indexer and indexer.take(part) for part in (chunks, rows))
        new = self._prefill.attention(
            layer_id, q[chunks], k[chunks], v[chunks], prefill, of_chunks, sinks
        )
        next_tokens = self._decode.run(layer_id, q[rows], k[rows], v[rows], step, of_rows, sinks)
        return torch.cat([new, next_tokens])

    def build_representations(
        self,
        layer_id: int,
        chunk: PrefillChunk,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None = None,
    ) -> None:
        """Build representations of a chunk from loaded K and V ``[T, Hkv, D]``.

        Loaded chunks have no queries; only algorithms with a ``query_window`` need them. An
        algorithm that asks the model's indexer needs its outputs for these tokens. A layer with a
        window has no representations.
        """
        self.representations.apply_resets()
        if self._window(layer_id):
            return
        no_queries = k.new_zeros(0, self.policy.kv.num_q_heads, k.shape[-1])
        self._prefill.summarize(layer_id, chunk, no_queries, PagedKV(k, v), indexer)

    def forward_end(self) -> None:
        """End the forward after its last layer: join side work, publish counters."""
        if self._prefill_batch is not None:
            self.manager.residency.mark_warm(c.slot for c in self._prefill_batch.chunks)
        self.manager.end_forward()
        self._end_step(complete=True)
        self.manager.counters.publish()

    def accept_drafts(self, last: np.ndarray) -> None:
        """Keep each chain up to token ``last [B]``, the last accepted one, and undo all others."""
        if self._verification is not None:
            self._verification.accept(last)
            self._verification = None

    def forward_abort(self) -> None:
        """End a forward that a layer's exception ended; its requests must not go on."""
        self._verification = None
        self._prefill.abort()
        self.manager.end_forward()
        self._end_step(complete=False)

    def stats(self) -> CacheStats:
        """Totals since the start, as of the last forward that the device has finished."""
        return CacheStats.of(
            self.manager.counters.totals(),
            page_tokens=self.policy.kv.page_size,
            page_bytes=self.manager.device.page_bytes,
            extensions={n: text for x in self.extensions for n, text in x.counters.items()},
            layers=self.manager.counters.layers(),
        )
