"""Controls the order of a forward pass; contains no tensor maths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from hisparse.cache.counters import CacheStats
from hisparse.cache.shareable_pages import ShareablePages
from hisparse.engine.contract import call
from hisparse.engine.decode import DecodeLayer, SelectionObserver
from hisparse.engine.extensions.base import Components, Extension, overriding
from hisparse.engine.modes import RequestChoices
from hisparse.engine.prefill import Prefill
from hisparse.engine.received import Build, RestoredPages, TransferredRequests
from hisparse.types import IndexerInputs

#: ``(layer_id, q, k, v, indexer, sinks)``: attention of one layer, as
#: :meth:`SparseCoordinator.attention` describes.
AttendLayer = Callable[[int, Tensor, Tensor, Tensor, IndexerInputs | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class Forward:
    """A batch that has begun.

    Attributes:
        attention: attention of one layer.
        end: called after the last layer.
        accept: called with the last accepted token ``[B]`` of each chain of drafts.
    """

    attention: AttendLayer
    end: Callable[[], None] = lambda: None
    accept: Callable[[np.ndarray], None] = lambda last: None


class Batch(Protocol):
    """The requests of a forward. It decides how they run."""

    @property
    def num_tokens(self) -> int:
        """T, tokens of the forward."""
        ...

    def begin(self, engine: SparseCoordinator) -> Forward:
        """Prepare the data that all layers share."""
        ...


class SparseCoordinator:
    """Calls algorithm, cache manager, adapter and extensions in order in every forward.

    The lifecycle of a request: ``on_request_begin``, then its forwards (each one
    ``forward_begin``, ``attention`` for every layer in order, ``forward_end``), then
    ``on_request_end``.

    Args:
        components: see :func:`hisparse.engine.build.build`.
        extensions: by name, in the order of their hooks.

    Attributes:
        policy, algorithm, manager, representations, modes: the components.
        extensions: as given.
        choices: counts what is decided for each request.
        decode: runs the layers of decode steps.
        prefill: runs the layers of prefills.
        shareable: which pages a store may take, or None without a store.
        restored: pages that came from a store, or None without a store.
        transferred: requests that another server has prefilled, or None if no server does.
        replayed: whether the last forward was a captured step.
    """

    def __init__(self, components: Components, extensions: Mapping[str, Extension]) -> None:
        self.policy = components.policy
        self.algorithm = components.algorithm
        self.manager = components.manager
        self.representations = components.representations
        self.modes = components.modes
        self.extensions = extensions
        num_slots = len(self.manager.residency.capacities.live)
        self.choices = RequestChoices(self.manager.counters, num_slots)
        ordered = tuple(extensions.values())
        self.decode = DecodeLayer(components, ordered)
        self.prefill = Prefill(components, ordered)
        self.shareable: ShareablePages | None = None
        self.restored: RestoredPages | None = None
        self.transferred: TransferredRequests | None = None
        self.replayed = False
        self._before_step = overriding("before_step", ordered)
        self._after_step = overriding("after_step", ordered)
        self._forward: Forward | None = None

    def share_pages(self) -> tuple[ShareablePages, RestoredPages]:
        """Follow which pages a store may take, and build representations of those that it gave.

        Called once, before the first request, by a server that has a store.
        """
        manager, size = self.manager, self.policy.kv.page_size
        num_pages, device = manager.host.num_pages, manager.device.device
        num_slots = manager.device.capacity.shape[0] // manager.device.heads
        self.shareable = ShareablePages(num_pages, size, num_slots, self.modes.is_dense, device)
        self.restored = RestoredPages(manager, self._build_restored())
        return self.shareable, self.restored

    def receive_requests(self) -> TransferredRequests:
        """Serve requests that another server has prefilled; called once, before the first."""
        self.transferred = TransferredRequests(self.manager, self._build_restored())
        return self.transferred

    def stored_entries(self) -> dict[str, Tensor]:
        """What a store keeps of pages beside K and V, by name, ``[layers, host pages, ...]``.

        The layers are those with an indexer: its keys cannot be computed from K and V. The rest is
        built again after a load. :class:`Representation` gives shapes and dtypes.
        """
        return self.representations.of_model

    def rebuilt_entries(self) -> dict[str, Tensor]:
        """What a load has to build from K and V unless a store has it, ``[L, host pages, ...]``.

        :class:`Representation` gives shapes and dtypes. Empty if nothing is built, or if requests
        have state that only building fills.
        """
        kept = self.representations
        by_query = self.algorithm.query_window or not kept.only_of_pages
        if kept.of_model or by_query or not self.policy.kv.full_layers:
            return {}
        return kept.of_pages

    def _build_restored(self) -> Mapping[int, Build]:
        """By layer, builds the representations that no store keeps; empty if it keeps them all."""
        kept = self.representations.of_model
        if kept and not overriding("store_pages", self.extensions.values()):
            return {}
        # Of the prefill: what holds the coordinator would keep all memory until a collection.
        build: Build = self.prefill.store_extensions if kept else self.prefill.build_representations
        return dict.fromkeys(self.policy.kv.full_layers, build)

    def observe(self, observer: SelectionObserver | None) -> None:
        """Set the selection callback, or None to remove it."""
        self.decode.observer = observer

    def on_request_begin(self, slot: int) -> None:
        """Start a request in a request slot. Safe while an earlier forward is running."""
        self.choices.begin(slot)
        self.on_request_shortened(slot)

    def on_request_shortened(self, slot: int) -> None:
        """Forget device pages and the algorithm's state of a request that has lost tokens."""
        self.manager.residency.begin(slot)
        self.representations.begin(slot)
        if self.shareable is not None:
            self.shareable.begin(slot)

    def on_request_end(self, slot: int) -> None:
        """End the request of a slot. Safe while an earlier forward is running."""
        self.manager.residency.end(slot)
        if self.transferred is not None:
            self.transferred.drop(slot)

    def on_pages_replaced(self, slot: int) -> None:
        """Tell that a request may have other host pages for its computed tokens.

        A server that keeps prefixes replaces pages that two requests have both computed. Safe
        while an earlier forward is running.
        """
        self.manager.residency.replace_pages(slot)

    def on_page_copied(self, source: int, target: int) -> None:
        """Tell that host page ``target`` got the K and V of ``source``."""
        if self.shareable is not None:
            self.shareable.copy(source, target)

    @property
    def not_capturable(self) -> str | None:
        """The reason why decode steps cannot be captured in a CUDA graph, or None if they can."""
        if self.manager.checked:
            return "checked is true, which reads every selection back"
        if self.decode.observer is not None:
            return "selections are observed"
        return None

    def prepare_capture(self) -> None:
        """End the replayed step: a capture would otherwise take its end into the graph."""
        self._end_step(complete=self.replayed)

    def start_forward(self, slots: np.ndarray, seq_lens: np.ndarray) -> None:
        """End a replayed step, apply resets, and fit capacities to what follows.

        Args:
            slots: ``[B] int64``, request slots.
            seq_lens: ``[B] int64``, tokens of each request after the forward.
        """
        # Before requests that begin reset the state of those that ended.
        self._end_step(complete=self.replayed)
        self.decode.raise_host_error()
        self.representations.apply_resets()
        self.manager.start_forward(slots, seq_lens // self.policy.kv.page_size)

    def before_step(self, slots: np.ndarray, seq_lens: np.ndarray, sparse: np.ndarray) -> None:
        """Tell the extensions of a step; ``[B]`` each, see :meth:`Extension.before_step`."""
        for extension in self._before_step:
            call(extension.before_step, None, slots, seq_lens, sparse)

    def _end_step(self, *, complete: bool) -> None:
        """Tell the extensions that the last step has ended."""
        self.replayed = False
        for extension in self._after_step:
            call(extension.after_step, None, complete=complete)

    def forward_begin(self, batch: Batch) -> None:
        """Apply pending resets and capacity changes, and prepare the data that all layers share.

        Raises:
            HiSparseError: the batch is to be captured, and steps are :attr:`not_capturable`.
        """
        self._forward = None
        self._forward = batch.begin(self)

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
            q: ``[T, Hq, D]`` in the model's dtype; T = B when decoding. A mixed batch has the
                tokens of its chunks first.
            k, v: ``[T, Hkv, D]``, model's dtype, K and V of this forward's tokens.
            indexer: outputs of the model's own indexer for these tokens.
            sinks: ``[Hq]``, any float dtype, for each query head the logit of a key without a
                value, which joins the softmax; None: none does.

        Returns:
            ``[T, Hq, Dv]`` in the dtype of q.
        """
        assert self._forward is not None, "forward_begin comes before attention"
        return self._forward.attention(layer_id, q, k, v, indexer, sinks)

    def forward_end(self) -> None:
        """End the forward after its last layer: join side work, publish counters."""
        if self._forward is not None:
            self._forward.end()
        self.manager.end_forward()
        self._end_step(complete=True)
        self.manager.counters.publish()

    def accept_drafts(self, last: np.ndarray) -> None:
        """Keep each chain up to token ``last [B]``, the last accepted one, and undo all others."""
        if self._forward is not None:
            self._forward.accept(last)
            self._forward = None

    def forward_abort(self) -> None:
        """End a forward that a layer's exception ended; its requests must not go on."""
        self._forward = None
        self.manager.end_forward()
        self._end_step(complete=False)

    def stats(self) -> CacheStats:
        """Totals since the start, as of the last forward that the device has finished."""
        return self.manager.counters.stats(
            page_tokens=self.policy.kv.page_size, page_bytes=self.manager.device.page_bytes
        )
