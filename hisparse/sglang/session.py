"""State that the hooks, the KV pool and the backend of one scheduler process share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hisparse.cache.shared_memory import NodeRanks
from hisparse.engine.build import EngineSetup
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.restored import TransferredRequests
from hisparse.errors import HiSparseError
from hisparse.sglang.features.storage.counters import StorageCounters

__all__ = ["Session", "current_session", "errors_logged", "require_session", "start_session"]

logger = logging.getLogger("hisparse")


@dataclass(kw_only=True)
class Session(EngineSetup):
    """Configuration and sizes of one rank, and the state of its current forward.

    SGLang creates the pools from it, after the model is loaded.

    Attributes:
        layer_ids: SGLang's number of each layer of the pool, ascending; empty: from 0 on.
        ranks: the processes of this node.
        model: SGLang's model.
        model_config: the model's configuration, of transformers.
        model_settings: its settings that differ from defaults.
        adapter_key: takes SGLang's id of a LoRA adapter; the adapter's name in keys of pages. None:
            the server has no storage.
        storage: counts what the storage below host memory does; None: the server has none.
        swap_out: takes SGLang's ``Req`` before a retraction frees its host slots.
        storage_rests: whether the storage is not used: until a flush of all ranks, since the pages
            in host memory may be of other weights.
        fingerprint: of this rank's model, taken at its last flush; "": an update began since.
        weight_updater: SGLang's manager of updates; None: none has begun.
        slots_cpu: ``[B] int64``, request slots of the next forward, on the host.
        requests: SGLang's ``Req`` of the next forward.
        num_decoding: how many of them decode in a forward with chunks of prompts; the last ones.
        chunked_request_id: id of the request with a prompt that continues after the next forward.
        req_to_token_pool: SGLang's ``ReqToTokenPool``.
        coordinator: the engine; None until the attention backend is built.
        accept_drafts: takes ``[T]``, host slots of the accepted drafts of all requests.
        accept_chains: takes ``[B]``, how many tokens of each request's chain are accepted.
        has_pool: whether the KV pool is built; another one would be that of a draft model.
        report_metrics: publishes the metrics.
        arrived: the requests that another server has prefilled; None: this server prefills.
        extra_slots: request slots of a decode server for requests that are on their way.
        can_replay: whether a CUDA graph can serve SGLang's forward batch, which is then prepared.
    """

    layer_ids: Sequence[int] = ()
    ranks: NodeRanks | None = None
    model: Any = None
    model_config: Any = None
    model_settings: Mapping[str, object] = field(default_factory=dict)
    adapter_key: Callable[[str], str] | None = None
    storage: StorageCounters | None = None
    swap_out: Callable[[Any], None] = lambda request: None
    storage_rests: bool = True
    fingerprint: str = ""
    weight_updater: Any = None
    slots_cpu: torch.Tensor | None = None
    requests: Sequence[Any] = ()
    num_decoding: int = 0
    chunked_request_id: str | None = None
    req_to_token_pool: Any = None
    coordinator: SparseCoordinator | None = None
    arrived: TransferredRequests | None = None
    extra_slots: int = 0
    accept_drafts: Callable[[torch.Tensor], None] = lambda accepted: None
    accept_chains: Callable[[torch.Tensor], None] = lambda lengths: None
    has_pool: bool = False
    report_metrics: Callable[[], None] = lambda: None
    can_replay: Callable[[Any], bool] = lambda forward_batch: False

    def __post_init__(self) -> None:
        self.layer_ids = self.layer_ids or range(self.spec.num_layers)

    def note_update(self, updater: Any) -> None:
        """Let the storage rest until a flush: host memory has K and V of the old weights.

        Args:
            updater: SGLang's ``SchedulerWeightUpdaterManager``, whose update begins, goes on or
                ends. It may fail midway, and weights may come by RDMA until it ends.
        """
        if self.storage is not None and self.fingerprint:
            logger.warning(
                "hisparse: storage: an update of the weights began; the store is not used until a "
                "flush after its end (/flush_cache, unless the update flushes itself)"
            )
        self.storage_rests, self.fingerprint, self.weight_updater = True, "", updater

    @property
    def update_is_open(self) -> bool:
        """Whether SGLang waits for more weights: from ``begin`` to ``end_weight_update``."""
        return self.weight_updater is not None and self.weight_updater._session is not None

    def arrive(self, slot: int, start: int, length: int) -> None:
        """Begin a request that another server has prefilled.

        Args:
            slot: request slot.
            start: position of the first token that arrived; those before were here.
            length: tokens of the request.
        """
        assert self.coordinator is not None and self.arrived is not None, "a decode server"
        size = self.spec.page_size
        slots: torch.Tensor = self.req_to_token_pool.req_to_token[slot]
        pages = slots[start : length // size * size : size] // size
        self.coordinator.on_request_begin(slot)
        self.arrived.add(slot, pages.cpu().long())

    def end_requests(self, slots: Iterable[int]) -> None:
        """End the requests in ``slots``: their device pages become free."""
        assert self.coordinator is not None, "the backend is built before requests run"
        for slot in slots:
            self.coordinator.on_request_end(slot)
        self.report_metrics()


#: SGLang calls the hooks without a context argument, so each process has one session.
_session: Session | None = None


def start_session(session: Session) -> None:
    """Make ``session`` this process's session."""
    global _session
    _session = session


def current_session() -> Session | None:
    """This process's session, or None before the pools are sized or without hisparse."""
    return _session


def require_session() -> Session:
    """This process's session.

    Raises:
        HiSparseError: the pools are not sized yet.
    """
    if _session is None:
        raise HiSparseError(
            "SGLang: got a KV pool or an attention backend before its size, expected "
            "KVCacheConfigurator._profile_available_bytes to run first; start the server with "
            "--attention-backend hisparse"
        )
    return _session


@contextmanager
def errors_logged() -> Iterator[None]:
    """Log an error of hisparse as one line: SGLang ends the server with a traceback alone."""
    try:
        yield
    except HiSparseError as error:
        logger.error("hisparse: error: %s", error)
        raise
