"""Queries and writes of blocks."""

import asyncio
import random
import secrets
import string
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from hisparse.errors import quoted
from hisparse.kvcm.blocks import end_session
from hisparse.kvcm.state import SERVING, WRITING, Block, File, Group, Instance, Session, State
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.token_hash import block_keys
from hisparse.kvcm.wire import PROTO, ServiceError

MAX_KEYS: Final = 1 << 15
MAX_TOKENS: Final = 1 << 20
#: Tokens that are hashed in a thread, so that other requests get their turn.
_MANY_TOKENS: Final = 1 << 14
_EMPTY_SESSION_S: Final = 10.0
_MAX_SESSION_S: Final = 86_400.0
#: Parts of blocks that one request may name.
_MAX_LOCATIONS: Final = 1 << 20
_ID: Final = string.ascii_lowercase + string.digits
#: How often a storage of each type is chosen, of several that have a block; others: 3.
_WEIGHTS: Final = {PROTO.StorageType["ST_NFS"]: 5}
#: The type that a strategy asks for, and whether it may be another.
_STRATEGIES: Final = {
    PROTO.CachePreferStrategy[f"CPS_{word}_{name}"]: (PROTO.StorageType[f"ST_{of}"], may_differ)
    for word, may_differ in (("ALWAYS", False), ("PREFER", True))
    for name, of in (
        ("3FS", "3FS"), ("MOONCAKE", "MOONCAKE"), ("TAIR_MEMPOOL", "TAIRMEMPOOL"),
        ("VCNS_3FS", "VCNS_3FS"),
    )
}  # fmt: skip


def _invalid(message: str) -> ServiceError:
    return ServiceError("INVALID_ARGUMENT", message)


def _failed(message: str) -> ServiceError:
    return ServiceError("INTERNAL_ERROR", message)


async def keys_of(request: Any, instance: Instance) -> Sequence[int]:
    """The keys of a request, or those of its tokens.

    Raises:
        ServiceError: INVALID_ARGUMENT: neither, or too many.
    """
    keys, tokens = request.block_keys, request.token_ids
    for name, values, most in (("block_keys", keys, MAX_KEYS), ("token_ids", tokens, MAX_TOKENS)):
        if len(values) > most:
            raise _invalid(f"{name}: got {len(values)}, expected at most {most}")
    size = instance.info.block_size
    if keys:
        found = list(keys)
    elif not tokens:
        raise _invalid("block_keys and token_ids: got none, expected one of them")
    elif size < 1:
        raise _invalid(f"block_size of the instance: got {size}, expected at least 1 for token_ids")
    elif len(tokens) < _MANY_TOKENS:
        found = block_keys(tokens, size)
    else:
        found = await asyncio.to_thread(block_keys, list(tokens), size)
    most = _MAX_LOCATIONS // len(instance.spec_sizes)
    if len(found) > most:
        raise _invalid(f"keys: got {len(found)}, expected at most {most} with the instance's specs")
    return found


def masked(mask: Any, count: int) -> Iterator[bool]:
    """Whether each of ``count`` blocks is in a ``BlockMask``; those beyond its end are not."""
    if mask.WhichOneof("info") == "offset":
        return (at < mask.offset for at in range(count))
    values = mask.bool_masks.values
    return (at < len(values) and values[at] for at in range(count))


def finder(instance: Instance) -> Callable[[int], Block | None]:
    """A function that finds a key's block in storages that are available, in any state.

    Of several blocks one that serves is chosen, by chance.
    """
    shelves = [blocks for storage, blocks in instance.blocks.items() if storage.available]
    if len(shelves) == 1:
        return shelves[0].get

    def find(key: int) -> Block | None:
        found = [blocks[key] for blocks in shelves if key in blocks]
        found = [x for x in found if x.status == SERVING] or found[:1]
        weights = [_WEIGHTS.get(x.file.storage.type, 3) for x in found]
        return random.choices(found, weights)[0] if found else None

    return find


def use(blocks: Sequence[Block | None]) -> None:
    """Make blocks the last used; the first of them is used last, since the others need it."""
    now = time.time()
    for block in reversed(blocks):
        if block is not None:
            block.time = now
            block.uses += 1
            block.instance.blocks[block.file.storage].move_to_end(block.key)


def prefix_match(instance: Instance, keys: Sequence[int], mask: Any) -> list[Block]:
    """The blocks of all keys that are not masked, up to the first that does not serve."""
    found = []
    find = finder(instance)
    if mask.WhichOneof("info") is not None:
        hidden = masked(mask, len(keys))
        keys = [key for key, is_hidden in zip(keys, hidden, strict=True) if not is_hidden]
    for key in keys:
        block = find(key)
        if block is None or block.status != SERVING:
            break
        found.append(block)
    use(found)
    return found


def batch_get(instance: Instance, keys: Sequence[int]) -> list[Block | None]:
    """The block of each key, None where none serves."""
    found = _serving(instance, keys)
    use(found)
    return found


def _serving(instance: Instance, keys: Sequence[int]) -> list[Block | None]:
    blocks = map(finder(instance), keys)
    return [x if x is not None and x.status == SERVING else None for x in blocks]


def last_window(instance: Instance, keys: Sequence[int], size: int) -> list[Block | None]:
    """The last ``size`` neighbours that all serve; None for all other keys.

    Raises:
        ServiceError: INVALID_ARGUMENT: there are fewer keys.
    """
    if not 1 <= size <= len(keys):
        raise _invalid(f"sw_size: got {size}, expected 1 to the number of keys, {len(keys)}")
    found = _serving(instance, keys)
    run = 0
    for at in range(len(keys) - 1, -1, -1):
        run = run + 1 if found[at] is not None else 0
        if run == size:
            window = found[at : at + size]
            use(window)
            return [None] * at + window + [None] * (len(keys) - at - size)
    return [None] * len(keys)


def start_write(
    state: State, instance: Instance, keys: Sequence[int], groups: Sequence[str], seconds: int
) -> tuple[Session, list[bool]]:
    """Choose locations for the keys that have none.

    Args:
        state: of the manager; not changed but for room that is asked for.
        instance: that writes.
        keys: of a request. A key that comes twice gets one location.
        groups: names of spec groups, one for each key; or empty: all parts.
        seconds: that the write may take; a day at most.

    Returns:
        A session that has not begun, and for each key whether it exists.

    Raises:
        ServiceError: the request is invalid, or there is no room.
    """
    if groups and len(groups) != len(keys):
        text = f"got {len(groups)}, expected one for each of {len(keys)} block_keys"
        raise _invalid(f"location_spec_group_names: {text}")
    unknown = set(groups) - set(instance.parts_of)
    if unknown:
        choices = ", ".join(instance.parts_of) or "none"
        text = f"got {quoted(min(unknown))}, expected one of: {choices}"
        raise _failed(f"location_spec_group_names: {text}")
    find, taken = finder(instance), set[int]()
    exists, new = [], []
    for at, key in enumerate(keys):
        present = key in taken or find(key) is not None
        exists.append(present)
        if not present:
            taken.add(key)
            new.append((key, instance.parts_of[groups[at]] if groups else 0))
    now = time.time()
    blocks = _allocate(state, instance, new, now) if new else []
    deadline = now + (min(seconds, _MAX_SESSION_S) if new else _EMPTY_SESSION_S)
    name = "".join(random.SystemRandom().choices(_ID, k=32))
    return Session(name, state.new_number(), instance, blocks, deadline), exists


def _allocate(
    state: State, instance: Instance, new: Sequence[tuple[int, int]], now: float
) -> list[Block]:
    """Blocks of new keys (key, parts) in one storage. Files are named as no files before."""
    group = instance.group
    most = group.config.cache_config.meta_indexer_config.max_key_count
    if instance.num_keys + len(new) > most:
        instance.needed = len(new)
        text = f"{instance.num_keys} keys and {len(new)} new ones, expected at most {most}"
        raise _failed(f"max_key_count: got {text}")
    size = sum(instance.sizes[parts] for _, parts in new)
    storage = _choose(state, group, size)
    batch = secrets.token_hex(8)
    blocks, open_files = [], dict[int, tuple[File, int]]()
    for key, parts in new:
        file, place = open_files.get(parts, (None, 0))
        if file is None or place == storage.blocks_per_file:
            file, place = File(f"{key & (1 << 64) - 1:x}_{batch}", storage), 0
        open_files[parts] = file, place + 1
        number = state.new_number()
        blocks.append(Block(number, key, instance, file, place, parts, WRITING, now))
    return blocks


def _choose(state: State, group: Group, size: int) -> Storage:
    """The storage for so many bytes, by the group's strategy and quotas."""
    capacity, used = group.config.quota.capacity, group.used.total()
    if used + size > capacity:
        group.needed = max(group.needed, size)
        raise _failed(f"quota: got {used} bytes and {size} new ones, expected at most {capacity}")
    candidates = []
    for name in group.config.storage_candidates:
        storage = state.storages.get(name)
        if storage is None or not storage.available:
            continue
        quota = group.quota_of(storage.type)
        if quota is None or group.used[storage.type] + size <= quota:
            candidates.append(storage)
        else:
            group.needed = max(group.needed, size)
    wanted, or_other = _STRATEGIES.get(group.config.cache_config.data_storage_strategy, (0, True))
    for storage in candidates:
        if storage.type == wanted:
            return storage
    if not candidates or not or_other:
        names = ", ".join(group.config.storage_candidates)
        raise _failed(f"storage: got no candidate with room, expected one of: {names}")
    return candidates[0]


async def finish_write(state: State, instance: Instance, name: str, mask: Any) -> None:
    """End a write. A mask that does not fit ends it too, without a block.

    Args:
        instance: that writes.
        name: of the session.
        mask: ``BlockMask`` of the locations that are whole.

    Raises:
        ServiceError: no such session, or the mask does not fit.
    """
    if not name or mask.WhichOneof("info") is None:
        raise _invalid("write_session_id and success_blocks: got nothing, expected values")
    session = state.sessions.get(name)
    if session is None or session.instance is not instance or session.deadline <= time.time():
        raise _failed(f"write_session_id: got {quoted(name)}, expected one that goes on")
    del state.sessions[name]
    count = len(session.blocks)
    if mask.WhichOneof("info") == "offset":
        fits = 0 <= mask.offset <= count
        length = mask.offset
    else:
        length = len(mask.bool_masks.values)
        fits = length == count
    good = []
    if fits:
        flags = masked(mask, count)
        good = [x for x, is_good in zip(session.blocks, flags, strict=True) if is_good]
    await end_session(state, session, good)
    if not fits:
        raise _invalid(f"success_blocks: got {length}, expected {count} as locations were given")
