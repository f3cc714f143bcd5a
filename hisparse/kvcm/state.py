"""What the manager knows, in memory: storages, groups, instances, blocks, write sessions.

Each object has a number and one record in the store, from which a restart builds the state.
"""

from __future__ import annotations

import asyncio
import heapq
import struct
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hisparse.kvcm.accounts import Account
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.store import Writer
from hisparse.kvcm.wire import PROTO

#: States of a block. A new block is writable until its session ends; a deleted one waits for
#: readers that found it before.
WRITING: Final = 2
SERVING: Final = 3
DELETING: Final = 4
STATUS_NAMES: Final = {WRITING: "CLS_WRITING", SERVING: "CLS_SERVING", DELETING: "CLS_DELETING"}

#: Number, key, instance, storage, time; status, place, parts, length of the file's name.
BLOCK_FORMAT: Final = struct.Struct("<qqqqdBHHB")
#: Deadline, instance; the session's id and its blocks come next.
SESSION_FORMAT: Final = struct.Struct("<dq32s")


class File:
    """Blocks that share a file, or one file for each of their parts.

    Args:
        name: the last part of the path.
        storage: where it is.
    """

    __slots__ = ("blocks", "name", "storage")

    def __init__(self, name: str, storage: Storage) -> None:
        self.name = name
        self.storage = storage
        self.blocks = 0  #: how many are left


class Block:
    """One location of a block of an instance.

    Args:
        number: of its record.
        key: signed, 64 bits.
        instance: whose it is.
        file: where it is.
        place: in the file, in blocks.
        parts: index in the instance's ``parts``.
        status: one of the states above.
        time: seconds since 1970: of the last use, or when a deleted one may go.
    """

    __slots__ = (
        "file", "instance", "key", "number", "parts", "place", "status", "time", "uses", "wire",
    )  # fmt: skip

    def __init__(
        self, number: int, key: int, instance: Instance, file: File, place: int, parts: int,
        status: int, time: float,
    ) -> None:  # fmt: skip
        self.number = number
        self.key = key
        self.instance = instance
        self.file = file
        self.place = place
        self.parts = parts
        self.status = status
        self.time = time
        self.uses = 0  #: reads
        self.wire: bytes | None = None  #: its CacheLocation, once somebody asked

    @property
    def size(self) -> int:
        """Bytes of all its parts."""
        return self.instance.sizes[self.parts]

    @property
    def paths(self) -> list[str]:
        """The file of each of its parts."""
        instance, file = self.instance, self.file
        parts = instance.parts[self.parts]
        return [file.storage.path(instance.id, spec, file.name) for spec in parts]

    def record(self, status: int, time: float) -> bytes:
        """What the store keeps of it, in a state that it is about to have."""
        return b"B" + self.packed(status, time)

    def packed(self, status: int, time: float) -> bytes:
        """The same without its kind, as a session has it."""
        name = self.file.name.encode()
        numbers = BLOCK_FORMAT.pack(
            self.number, self.key, self.instance.number, self.file.storage.number, time,
            status, self.place, self.parts, len(name),
        )  # fmt: skip
        return numbers + name

    def encode(self) -> bytes:
        """Its serialized ``CacheLocation``."""
        if self.wire is None:
            self.wire = self.location(self.instance.parts[self.parts]).SerializeToString()
        return self.wire

    def location(self, names: Iterable[str]) -> Any:
        """Its ``CacheLocation`` with some of its parts."""
        instance, file = self.instance, self.file
        parts = instance.parts[self.parts]
        location = PROTO.CacheLocation(type=file.storage.type, spec_size=len(parts))
        for name in names:
            size = instance.spec_sizes[name]
            uri = file.storage.uri(instance.id, name, file.name, self.place, size)
            location.location_specs.add(name=name, uri=uri)
        return location


class Instance:
    """Engines that can read each other's blocks.

    Args:
        number: of its record.
        info: an ``InstanceInfo`` of the admin protocol.
        group: whose quota it shares.
        removed: whether it is gone but for files that are still to be deleted.
    """

    def __init__(self, number: int, info: Any, group: Group, removed: bool = False) -> None:
        self.number = number
        self.info = info
        self.group = group
        self.removed = removed
        self.id: str = info.instance_id
        self.spec_sizes: dict[str, int] = {x.name: x.size for x in info.location_spec_infos}
        groups = {x.name: tuple(x.spec_names) for x in info.location_spec_groups}
        #: Names of parts that are written together: all, then each spec group's.
        self.parts = [tuple(self.spec_sizes), *groups.values()]
        self.parts_of = {name: at for at, name in enumerate(groups, start=1)}
        self.sizes = [sum(self.spec_sizes[name] for name in names) for names in self.parts]
        #: Blocks by key, of each storage; those of the longest unused first.
        self.blocks: dict[Storage, OrderedDict[int, Block]] = {}
        missing = PROTO.CacheLocation(spec_size=len(self.spec_sizes))
        for name in self.spec_sizes:
            missing.location_specs.add(name=name)
        self.num_bytes = 0  #: of all blocks
        self.num_leaving = 0  #: blocks that wait for deletion
        self.needed = 0  #: keys for which the last refused write found no room
        self.used = time.time()  #: when a request named it
        self.missing: bytes = missing.SerializeToString()  #: the location of a miss

    @property
    def num_keys(self) -> int:
        """Blocks in any state."""
        return sum(map(len, self.blocks.values()))

    def record(self) -> bytes:
        """What the store keeps of it."""
        return b"I" + bytes((self.removed,)) + bytes(self.info.SerializeToString())


class Group:
    """Instances that share quotas.

    Args:
        number: of its record.
        config: an ``InstanceGroup`` of the admin protocol.
    """

    def __init__(self, number: int, config: Any) -> None:
        self.number = number
        self.config = config
        #: Bytes by type of storage: of all blocks, and of those that wait for deletion.
        self.used: Counter[int] = Counter()
        self.leaving: Counter[int] = Counter()
        self.needed = 0  #: bytes for which the last refused write found no room

    def record(self) -> bytes:
        """What the store keeps of it."""
        return b"G" + bytes(self.config.SerializeToString())

    @property
    def delay(self) -> float:
        """Seconds from a block's removal to its deletion."""
        strategy = self.config.cache_config.reclaim_strategy
        return float(max(0, strategy.delay_before_delete_ms) / 1000)

    def quota_of(self, storage_type: int) -> int | None:
        """Bytes that may lie in storages of a type; None: no limit but the whole group's."""
        for quota in self.config.quota.quota_config:
            if quota.storage_type == storage_type:
                return int(quota.capacity)
        return None


@dataclass
class Session:
    """A write that has begun.

    Attributes:
        id: 32 letters and digits.
        number: of its record.
        instance: whose blocks it writes.
        blocks: what it was given, in the order of the locations.
        deadline: seconds since 1970.
    """

    id: str
    number: int
    instance: Instance
    blocks: list[Block]
    deadline: float

    def record(self) -> bytes:
        """What the store keeps of it; its blocks have no other record."""
        head = SESSION_FORMAT.pack(self.deadline, self.instance.number, self.id.encode())
        return b"".join((b"W", head, *(x.packed(x.status, x.time) for x in self.blocks)))


@dataclass
class State:
    """All objects.

    Attributes:
        writer: keeps their records.
        storages: by unique name.
        groups: by name.
        instances: by id.
        accounts: of administrators, by name.
        sessions: writes that have begun, by id.
        deadlines: of sessions, soonest first; some of them have ended.
        leaving: when to delete which blocks, soonest first; the number breaks ties.
        late: when to delete which files once more, soonest first: their writers were too slow, and
            may write them still.
        was_read: whether blocks were since their use was kept.
        usage: numbers of the records of that.
        last_number: of a record.
        lock: of who changes storages, groups, instances or accounts.
        counters: by the name of a metric and the name of a method, "" for none.
        gauges: the same.
    """

    writer: Writer
    storages: dict[str, Storage] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    deadlines: list[tuple[float, str]] = field(default_factory=list)
    leaving: list[tuple[float, int, Sequence[Block]]] = field(default_factory=list)
    late: deque[tuple[float, Storage, set[str]]] = field(default_factory=deque)
    was_read: bool = False
    usage: list[int] = field(default_factory=list)
    last_number: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    counters: Counter[tuple[str, str]] = field(default_factory=Counter)
    gauges: dict[tuple[str, str], float] = field(default_factory=dict)

    def new_number(self) -> int:
        """The number of a new record."""
        self.last_number += 1
        return self.last_number

    def add(self, block: Block) -> None:
        """Count a block and make it findable."""
        storage, group = block.file.storage, block.instance.group
        block.file.blocks += 1
        block.instance.blocks.setdefault(storage, OrderedDict())[block.key] = block
        group.used[storage.type] += block.size
        block.instance.num_bytes += block.size
        if block.status == DELETING:
            self._count_leaving(block, 1)

    def drop(self, block: Block) -> None:
        """Undo :meth:`add`."""
        storage, group = block.file.storage, block.instance.group
        block.file.blocks -= 1
        del block.instance.blocks[storage][block.key]
        group.used[storage.type] -= block.size
        block.instance.num_bytes -= block.size
        if block.status == DELETING:
            self._count_leaving(block, -1)

    def _count_leaving(self, block: Block, count: int) -> None:
        block.instance.num_leaving += count
        block.instance.group.leaving[block.file.storage.type] += count * block.size

    def holds(self, block: Block) -> bool:
        """Whether it is still there: a storage may have been removed in between."""
        blocks = block.instance.blocks.get(block.file.storage)
        return blocks is not None and blocks.get(block.key) is block

    def set_status(self, block: Block, status: int, time: float) -> None:
        """Change a block's state, and make it the last used."""
        if not self.holds(block):
            return
        self._count_leaving(block, (status == DELETING) - (block.status == DELETING))
        block.status, block.time = status, time
        block.instance.blocks[block.file.storage].move_to_end(block.key)

    def open(self, session: Session) -> None:
        """Let a write go on until its deadline."""
        self.sessions[session.id] = session
        heapq.heappush(self.deadlines, (session.deadline, session.id))

    def leave(self, blocks: Sequence[Block], due: float) -> None:
        """Delete blocks, which are DELETING, at a time in seconds since 1970."""
        if blocks:
            heapq.heappush(self.leaving, (due, self.new_number(), blocks))
