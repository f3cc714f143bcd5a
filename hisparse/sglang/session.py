"""What one scheduler process knows of its engine, for the hooks, the KV pool and the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.engine.build import EngineSetup
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.errors import HiSparseError

__all__ = ["Session", "current", "session", "start"]


@dataclass(kw_only=True)
class Session(EngineSetup):
    """Decisions of one rank, made once the model is loaded and before the pools are built.

    Attributes:
        slots_cpu: request slots of the forward that is being prepared, ``[B]`` on the host.
        unfinished: id of the request whose prompt continues after that forward.
        req_to_token_pool: SGLang's table of request slots.
        coordinator: the engine; None until the attention backend is built.
        report: publishes the metrics.
    """

    slots_cpu: torch.Tensor | None = None
    unfinished: str | None = None
    req_to_token_pool: Any = None
    coordinator: SparseCoordinator | None = None
    report: Callable[[], None] = lambda: None

    def end_requests(self, slots: Iterable[int]) -> None:
        """The requests in these slots are over."""
        assert self.coordinator is not None, "requests run once the backend is built"
        for slot in slots:
            self.coordinator.on_request_end(slot)
        self.report()


#: SGLang's hooks are functions without a context of ours: a process has one session.
_session: Session | None = None


def start(new: Session) -> None:
    """Make ``new`` this process's session."""
    global _session
    _session = new


def current() -> Session | None:
    """This process's session; None before the pools are sized, or without hisparse."""
    return _session


def session() -> Session:
    """This process's session; an error before the pools are sized."""
    if _session is None:
        raise HiSparseError("the KV pool was built before its size was known")
    return _session
