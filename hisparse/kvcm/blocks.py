"""From one state of a block to the next: written, served, removed, deleted.

The store has a state before clients see it, so a manager that is killed forgets nothing that it
acknowledged.
"""

import asyncio
import heapq
import time
from collections.abc import Sequence
from typing import Final

from hisparse.kvcm.state import DELETING, SERVING, Block, File, Instance, Session, State
from hisparse.kvcm.storages import Storage, probe

#: Blocks that are removed or deleted before other requests get their turn.
AT_ONCE: Final = 4096
#: Seconds until files that could not be deleted are tried again.
_RETRY_S: Final = 5.0
#: Seconds after which files of a write that expired are deleted once more.
_LATE_S: Final = 60.0


async def begin_session(state: State, session: Session) -> None:
    """Keep new blocks, which are WRITING, and let them be written.

    Raises:
        OSError: the store failed, and may have the session; it expires.
    """
    record = session.record()
    # The first of a prefix is the last to be reclaimed.
    for block in reversed(session.blocks):
        state.add(block)
    state.open(session)
    try:
        await state.writer.write({session.number: record})
    except OSError:
        session.deadline = 0.0
        if state.sessions.get(session.id) is session:
            state.open(session)
        raise


async def end_session(state: State, session: Session, good: Sequence[Block]) -> None:
    """End a write.

    Args:
        state: has the session no more.
        session: to end.
        good: blocks that are whole, which serve from now on; the others are deleted.

    Raises:
        OSError: the store failed; the session goes on.
    """
    now = time.time()
    whole = set(map(id, good))
    bad = [block for block in session.blocks if id(block) not in whole]
    changes: dict[int, bytes | None] = {x.number: x.record(SERVING, now) for x in good}
    changes |= {x.number: x.record(DELETING, now) for x in bad}
    try:
        await state.writer.write({session.number: None, **changes})
    except OSError:
        state.open(session)
        raise
    for block in reversed(good):
        state.set_status(block, SERVING, now)
    for block in bad:
        state.set_status(block, DELETING, now)
    state.leave(bad, now)
    if session.instance.removed:  # In between.
        await remove_blocks(state, good, session.instance.group.delay)


async def remove_blocks(state: State, blocks: Sequence[Block], delay: float) -> list[Block]:
    """Hide blocks at once, and delete them after a delay.

    Args:
        blocks: those that serve are removed.
        delay: seconds.

    Returns:
        What is removed.

    Raises:
        OSError: the store failed; the blocks serve.
    """
    due = time.time() + delay
    before = {block: block.time for block in blocks if block.status == SERVING}
    if not before:
        return []
    for block in before:
        state.set_status(block, DELETING, due)
    try:
        await state.writer.write({x.number: x.record(DELETING, due) for x in before})
    except OSError:
        for block, used in before.items():
            state.set_status(block, SERVING, used)
        raise
    state.leave(list(before), due)
    return list(before)


async def trim(state: State, instance: Instance) -> None:
    """Remove all blocks of an instance that serve."""
    for blocks in list(instance.blocks.values()):
        serving = [block for block in blocks.values() if block.status == SERVING]
        for at in range(0, len(serving), AT_ONCE):
            await remove_blocks(state, serving[at : at + AT_ONCE], instance.group.delay)


async def expire_sessions(state: State) -> None:
    """End writes whose time is over; their blocks are deleted."""
    now = time.time()
    while state.deadlines and state.deadlines[0][0] <= now:
        _, name = heapq.heappop(state.deadlines)
        session = state.sessions.pop(name, None)
        if session is not None:
            state.counters["cache_manager.write_location_expire_size", ""] += len(session.blocks)
            await end_session(state, session, [])
            paths = {path for block in session.blocks for path in block.paths}
            if paths:
                storage = session.blocks[0].file.storage
                state.late.append((now + _LATE_S, storage, paths))


async def delete_due(state: State) -> None:
    """Delete blocks whose delay is over. Only then may their keys be written again.

    A file goes with the last of its blocks.
    """
    while state.late and state.late[0][0] <= time.time():
        _, storage, paths = state.late.popleft()
        if left := set(await asyncio.to_thread(storage.delete, paths)):
            state.late.append((time.time() + _LATE_S, storage, left))
    while state.leaving and state.leaving[0][0] <= time.time():
        _, _, blocks = heapq.heappop(state.leaving)
        for at in range(0, len(blocks), AT_ONCE):
            await _delete(state, [x for x in blocks[at : at + AT_ONCE] if state.holds(x)])


async def _delete(state: State, blocks: list[Block]) -> None:
    left = {block.file: block.file.blocks for block in blocks}
    paths: dict[Storage, dict[str, File]] = {}
    for block in blocks:
        left[block.file] -= 1
        if not left[block.file]:
            found = paths.setdefault(block.file.storage, {})
            found |= dict.fromkeys(block.paths, block.file)
    kept = set[File]()
    for storage, found in paths.items():
        failed = await asyncio.to_thread(storage.delete, found)
        kept |= {found[path] for path in failed}
    gone = [block for block in blocks if block.file not in kept and state.holds(block)]
    state.leave([x for x in blocks if x.file in kept], time.time() + _RETRY_S)
    changes: dict[int, bytes | None] = {block.number: None for block in gone}
    for block in gone:
        state.drop(block)
        if block.instance.removed and not block.instance.num_keys:
            changes[block.instance.number] = None
    try:
        await state.writer.write(changes)
    except OSError:
        # Their records are left: they are deleted when the manager starts again.
        state.counters["schedule_plan_executor.failed_delete_count", ""] += len(gone)
    state.counters["cache_reclaimer.block_del_count", ""] += len(gone)


async def probe_storages(state: State) -> None:
    """Disable storages that cannot be used, and enable those that can again."""
    await asyncio.gather(*map(probe, state.storages.values()))
    async with state.lock:
        new = [x for x in state.storages.values() if x.worked and not x.is_kept]
        if new:
            await state.writer.write({x.number: x.record() for x in new})
        for storage in new:
            storage.is_kept = True
