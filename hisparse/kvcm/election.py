"""Which of several managers of one store answers: the one that has the store, their leader.

The others wait for it. They take over when the leader ends, or is not heard of for a lease.
"""

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from hisparse.errors import ConfigError, one_line
from hisparse.kvcm.blocks import delete_due, expire_sessions, probe_storages
from hisparse.kvcm.reclaim import reclaim
from hisparse.kvcm.records import restore, save_usage
from hisparse.kvcm.registry import Registry
from hisparse.kvcm.state import Group, State
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.store import Store
from hisparse.kvcm.wire import ServiceError

_LOG: Final = logging.getLogger(__name__)
#: What a leader does in the background, and seconds between two looks for work.
_WORK: Final = (
    (expire_sessions, 0.05), (delete_due, 0.05), (reclaim, 0.05), (probe_storages, 1.0),
    (save_usage, 60.0),
)  # fmt: skip
#: Seconds between two looks whether there is another leader.
_LOOK_S: Final = 0.2


class Node:
    """One manager.

    Args:
        store: of all of them.
        startup: ``StorageConfig`` and ``InstanceGroup`` of a store that has neither yet.

    Attributes:
        name: ``<address>:<HTTP port of administrators>_<16 letters>``.
        leader: name of the leader that was seen last; it may be unknown: "".
        looked: when; seconds since 1970.
        delay_s: for which it leaves the lead to others after :meth:`demote`.
        counters: by the name of a metric and the name of a method, "" for none.
        gauges: the same.
        running: requests.
        state: of the store; None: another manager has it.
        registry: changes the state's configuration.
    """

    def __init__(self, store: Store, startup: tuple[Any, Any]) -> None:
        self.name = ""
        self.leader = ""
        self.looked = time.time()
        self.delay_s = 10.0
        self.counters: Counter[tuple[str, str]] = Counter()
        self.gauges: dict[tuple[str, str], float] = {}
        self.running: set[asyncio.Task[Any]] = set()
        self.state: State | None = None
        self.registry: Registry | None = None
        self._store = store
        self._startup = startup
        self._demoted = False
        self._pause = 0.0  # Until then others may lead.
        self._working: list[asyncio.Task[None]] = []

    @property
    def lease_left(self) -> float:
        """Seconds for which it surely leads."""
        return 0.0 if self.state is None or self._demoted else self.state.writer.lease_left

    def check(self) -> None:
        """Refuse a request that the leader alone answers; else raise SERVER_NOT_LEADER."""
        if self.lease_left <= 0:
            raise self.not_leader()

    def not_leader(self) -> ServiceError:
        """Says who the leader is."""
        leader = self.leader if self.leader != self.name else ""
        text = f"got {self.name}, expected the leader: {leader or 'not known yet'}"
        return ServiceError("SERVER_NOT_LEADER", f"manager: {text}")

    def demote(self) -> None:
        """Stop to lead; requests that run are answered."""
        self.check()
        self._demoted = True

    async def campaign(self) -> None:
        """Try to become the leader.

        Raises:
            ConfigError: the store cannot be opened, or read.
            OSError: it fails.
        """
        self.leader = await asyncio.to_thread(self._store.acquire, self.name)
        self.looked = time.time()
        if self.leader != self.name:
            return
        try:
            state = await asyncio.to_thread(restore, self._store)
        except OSError:
            raise
        except Exception as error:  # Redis and SQLite have exceptions of their own.
            raise ConfigError(f"store: got {one_line(error)}, expected its records") from error
        gc.freeze()
        try:
            await self._begin(state)
        except BaseException:
            state.writer.close()
            raise
        self.lead(state)
        self._working = [asyncio.create_task(_repeat(*work, state)) for work in _WORK]

    def lead(self, state: State) -> None:
        """Answer from a state."""
        state.counters, state.gauges = self.counters, self.gauges
        self.state, self.registry = state, Registry(state)

    async def _begin(self, state: State) -> None:
        storage, config = self._startup
        if not state.storages and not state.groups:
            found = Storage(state.new_number(), storage, True)
            group = Group(state.new_number(), config)
            await state.writer.write({found.number: found.record(), group.number: group.record()})
            state.storages[found.name], state.groups[config.name] = found, group
            return
        known, has = state.storages.get(storage.global_unique_name), state.groups.get(config.name)
        if not (known and has and known.config == storage and has.config == config):
            text = "the store has other storages or groups than the command line says; they count"
            print(f"kvcm: {text}", file=sys.stderr)

    async def run(self) -> None:
        """Lead while the store is this manager's, and try to get it otherwise; for ever."""
        told = ""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if self.state is None and time.monotonic() >= self._pause:
                    await self.campaign()
                elif self._demoted or (self.state is not None and self.state.writer.lost):
                    await self.step_down()
                    self._pause = time.monotonic() + self.delay_s * self._demoted
                    self._demoted = False
            except (ConfigError, ServiceError, OSError) as error:
                if told != (told := one_line(error)):  # Not five times a second.
                    _LOG.error("%s", told)
            self.looked = time.time()

    async def step_down(self) -> None:
        """Answer the requests that run, then give up the store."""
        while self.running:
            await asyncio.wait(self.running)
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        if self.state is not None:
            state, self.state, self.registry, self.leader = self.state, None, None, ""
            with contextlib.suppress(OSError):  # The store says so to whoever leads next.
                await save_usage(state)
            await asyncio.to_thread(state.writer.close)
            gc.unfreeze()


async def _repeat(work: Callable[[State], Awaitable[None]], period_s: float, state: State) -> None:
    while True:
        try:
            await work(state)
        except OSError as error:
            _LOG.error("%s: %s", work.__name__, one_line(error))
        except Exception:
            _LOG.exception("%s failed", work.__name__)
        await asyncio.sleep(period_s)
