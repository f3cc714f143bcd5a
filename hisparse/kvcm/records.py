"""What the store keeps of the state, and the state that a store has."""

import asyncio
import json
import struct
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import Final

from hisparse.kvcm.accounts import Account
from hisparse.kvcm.state import (
    BLOCK_FORMAT,
    DELETING,
    SESSION_FORMAT,
    Block,
    File,
    Group,
    Instance,
    Session,
    State,
)
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.store import Store, Writer
from hisparse.kvcm.wire import PROTO

#: Blocks of a record of their use; bytes of each: number, time, uses.
_USED_BLOCKS: Final = 1 << 14
_USED_BYTES: Final = 24


async def save_usage(state: State) -> None:
    """Keep when blocks were read and how often: the next manager reclaims in the same order."""
    if not state.was_read:
        return
    state.was_read = False
    values = []
    for instance in list(state.instances.values()):
        for shelf in list(instance.blocks.values()):
            blocks = [block for block in shelf.values() if block.uses]
            for at in range(0, len(blocks), _USED_BLOCKS):
                part = blocks[at : at + _USED_BLOCKS]
                values.append(await asyncio.to_thread(_pack_usage, part))
    numbers = state.usage + [state.new_number() for _ in range(len(values) - len(state.usage))]
    state.usage = numbers[: len(values)]
    gone: dict[int, bytes | None] = dict.fromkeys(numbers)
    await state.writer.write(gone | dict(zip(numbers, values, strict=False)))


def _pack_usage(blocks: list[Block]) -> bytes:
    columns = [x.number for x in blocks], [x.time for x in blocks], [x.uses for x in blocks]
    count = len(blocks)
    return b"U" + struct.pack(f"<{count}q{count}d{count}q", *chain(*columns))


def _use_again(state: State, blocks: list[Block], records: list[tuple[int, bytes]]) -> None:
    """Blocks were used last when these records say so, if they say later."""
    found: dict[int, tuple[float, int]] = {}
    for number, value in records:
        count = len(value) // _USED_BYTES
        columns = struct.unpack_from(f"<{count}q{count}d{count}q", value, 1)
        numbers, times, uses = (columns[i * count : (i + 1) * count] for i in range(3))
        found |= zip(numbers, zip(times, uses, strict=True), strict=True)
        state.usage.append(number)
    for block in blocks:
        if block.number in found:
            time, block.uses = found[block.number]
            if block.status != DELETING:
                block.time = max(block.time, time)


class _Reader:
    """Reads blocks from records.

    Args:
        state: with its storages.
        instances: also those that are removed.
    """

    def __init__(self, state: State, instances: Iterable[Instance]) -> None:
        self._instances = {x.number: x for x in instances}
        self._storages = {x.number: x for x in state.storages.values()}
        self._files: dict[tuple[int, str], File] = {}

    def blocks(self, value: bytes, at: int) -> Iterator[Block]:
        """Blocks of a record, but those whose storage has been removed."""
        while at < len(value):
            fields = BLOCK_FORMAT.unpack_from(value, at)
            number, key, instance, storage, time, status, place, parts, length = fields
            at += BLOCK_FORMAT.size + length
            if instance not in self._instances or storage not in self._storages:
                continue
            name = value[at - length : at].decode()
            file = self._files.get((storage, name))
            if file is None:
                file = self._files[storage, name] = File(name, self._storages[storage])
            yield Block(number, key, self._instances[instance], file, place, parts, status, time)

    def session(self, number: int, value: bytes) -> Session | None:
        """The session of a record, unless its instance has been removed."""
        deadline, instance, name = SESSION_FORMAT.unpack_from(value, 1)
        if instance not in self._instances:
            return None
        blocks = list(self.blocks(value, 1 + SESSION_FORMAT.size))
        return Session(name.decode(), number, self._instances[instance], blocks, deadline)


def restore(store: Store) -> State:
    """The state that a store has. Writes and deletions that had begun go on.

    The store stays this manager's meanwhile; it is closed if that fails.
    """
    state = State(Writer(store))
    try:
        _read(state, store)
    except BaseException:
        state.writer.close()
        raise
    return state


def _read(state: State, store: Store) -> None:
    records: dict[int, list[tuple[int, bytes]]] = {kind: [] for kind in b"SGIBWAU"}
    for number, value in store.load():
        records[value[0]].append((number, value))
        state.last_number = max(state.last_number, number)
    for number, value in records[b"S"[0]]:
        config, flags = PROTO.StorageConfig.FromString(value[2:]), value[1]
        storage = Storage(number, config, bool(flags & 1), bool(flags & 2))
        state.storages[storage.name] = storage
    for number, value in records[b"G"[0]]:
        group = Group(number, PROTO.InstanceGroup.FromString(value[1:]))
        state.groups[group.config.name] = group
    for _, value in records[b"A"[0]]:
        account = Account(**json.loads(value[1:]))
        state.accounts[account.name] = account
    instances = []
    for number, value in records[b"I"[0]]:
        info = PROTO.InstanceInfo.FromString(value[2:])
        group = state.groups.get(info.instance_group_name) or Group(0, PROTO.InstanceGroup())
        instances.append(Instance(number, info, group, removed=bool(value[1])))
    state.instances = {x.id: x for x in instances if not x.removed}
    reader = _Reader(state, instances)
    blocks = [block for _, value in records.pop(b"B"[0]) for block in reader.blocks(value, 1)]
    for number, value in records[b"W"[0]]:
        session = reader.session(number, value)
        if session is not None:
            state.open(session)
            state.last_number = max(state.last_number, *(x.number for x in session.blocks), 0)
            blocks += session.blocks
    _use_again(state, blocks, records[b"U"[0]])
    # Of blocks that were written together, the last of a prefix is the first to go.
    lost: dict[int, bytes | None] = {}
    for block in sorted(blocks, key=lambda x: (x.time, -x.number)):
        # If the store failed, the record of a deleted block is there; its key may have a new one.
        there = block.instance.blocks.get(block.file.storage)
        other = there.get(block.key) if there else None
        if other is not None:
            lost[min(block.number, other.number)] = None
            if other.number > block.number:
                continue
            state.drop(other)
        state.add(block)
    left = (x for x in blocks if x.status == DELETING and x.number not in lost)
    gone = sorted(left, key=lambda x: x.time)
    for due, each in groupby(gone, key=lambda x: x.time):
        state.leave(list(each), due)
    store.write(lost | {x.number: None for x in instances if x.removed and not x.num_keys})
