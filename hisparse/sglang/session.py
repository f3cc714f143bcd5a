"""State that the hooks, the KV pool and the backend of one scheduler process share."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from hisparse.cache.allocate import NodeRanks
from hisparse.cache.counters import CacheStats
from hisparse.engine.build import EngineSetup
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.errors import HiSparseError
from hisparse.memory.sizing import resize

logger = logging.getLogger("hisparse")

T = TypeVar("T")


@dataclass(kw_only=True)
class ServerSession:
    """Configuration and sizes of one rank, and the state of its current forward.

    SGLang creates the pools from it, after the model is loaded. A feature adds an object of its own
    with :meth:`add`, and its hooks find it with :meth:`get`.

    Attributes:
        setup: the settings and sizes; :meth:`resize` lowers them.
        layer_ids: SGLang's number of each layer of the pool, ascending; empty: from 0 on.
        ranks: the processes of this node.
        request_slots: request slots beyond those of running requests.
        begins_on_alloc: whether a request begins when SGLang gives it a slot.
        pool: the KV pool; None until SGLang makes it. Another one would be that of a draft model.
        backend: the attention backend; None until SGLang makes it.
        req_to_token_pool: SGLang's ``ReqToTokenPool``.
        slots_cpu: ``[B] int64``, request slots of the next forward, on the host.
        requests: SGLang's ``Req`` of the next forward.
        num_decoding: how many of them decode in a forward with chunks of prompts; the last ones.
        chunked_request_id: id of the request with a prompt that continues after the next forward.
        publishers: take the statistics when the metrics are published.
    """

    setup: EngineSetup
    layer_ids: Sequence[int] = ()
    ranks: NodeRanks | None = None
    request_slots: int = 0
    begins_on_alloc: bool = True
    pool: Any = None
    backend: Any = None
    req_to_token_pool: Any = None
    slots_cpu: torch.Tensor | None = None
    requests: Sequence[Any] = ()
    num_decoding: int = 0
    chunked_request_id: str | None = None
    publishers: list[Callable[[CacheStats], None]] = field(default_factory=list)
    _states: dict[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layer_ids = self.layer_ids or range(self.setup.spec.num_layers)

    @property
    def coordinator(self) -> SparseCoordinator:
        """The engine of the attention backend, which SGLang makes before caches and requests."""
        coordinator: SparseCoordinator = self.backend.coordinator
        return coordinator

    def resize(self, kv_tokens: int, max_requests: int) -> None:
        """Lower the sizes; see :func:`hisparse.memory.sizing.resize`."""
        sizing = resize(self.setup.sizing, kv_tokens=kv_tokens, max_requests=max_requests)
        self.setup = replace(self.setup, sizing=sizing)

    def add(self, state: object) -> None:
        """Keep the object of a feature, one of each class."""
        self._states[type(state)] = state

    def get(self, cls: type[T]) -> T | None:
        """The object of a feature; None: the server does not have the feature."""
        return self._states.get(cls)

    def end_requests(self, slots: Iterable[int]) -> None:
        """End the requests in ``slots``: their device pages become free."""
        for slot in slots:
            self.coordinator.on_request_end(slot)
        self.backend.metrics.report(now=True)


#: SGLang calls the hooks without a context argument, so each process has one session.
_session: ServerSession | None = None


def start_session(session: ServerSession) -> None:
    """Make ``session`` this process's session."""
    global _session
    _session = session


def current_session() -> ServerSession | None:
    """This process's session, or None before the pools are sized or without hisparse."""
    return _session


def require_session() -> ServerSession:
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
    """Log an error of hisparse as one line: SGLang only prints a traceback and ends the server."""
    try:
        yield
    except HiSparseError as error:
        logger.error("hisparse: error: %s", error)
        raise


def current_state(cls: type[T]) -> T | None:
    """The object of a feature in this process's session; None: there is none."""
    return None if _session is None else _session.get(cls)
