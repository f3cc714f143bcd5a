"""What each method of MetaService and AdminService does with a request.

Names of functions are those of the methods in snake_case. Each fills the response; an error is
raised.
"""

import json
import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

from hisparse.errors import quoted
from hisparse.kvcm import cache
from hisparse.kvcm.blocks import begin_session, remove_blocks, trim
from hisparse.kvcm.election import Node
from hisparse.kvcm.metrics import metrics
from hisparse.kvcm.registry import Registry, invalid, require
from hisparse.kvcm.snapshots import load_snapshot, take_snapshot
from hisparse.kvcm.state import STATUS_NAMES, Block, Instance, State
from hisparse.kvcm.storages import describe
from hisparse.kvcm.wire import PROTO, ServiceError

_QUERY = PROTO.QueryType
_TRIM = PROTO.TrimStrategy
_LEVELS = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL")
_PACKAGE = "hisparse.kvcm"
_MAX_DELAY_MS = 86_400_000


def _add_locations(
    locations: Any, blocks: Iterable[Block | None], instance: Instance, names: Iterable[str] = ()
) -> None:
    """Add the location of each block, with all parts or those of these names."""
    wanted = set(names)
    add = locations.add
    for block in blocks:
        if not wanted:
            add().MergeFromString(instance.missing if block is None else block.encode())
            continue
        if block is not None:
            parts = [x for x in instance.parts[block.parts] if x in wanted]
            location = block.location(parts)
        else:
            location = PROTO.CacheLocation.FromString(instance.missing)
            kept = [x for x in location.location_specs if x.name in wanted]
            del location.location_specs[:]
            location.location_specs.extend(kept)
        add().MergeFrom(location)


class _Common:
    """What both services have.

    Args:
        node: the manager. Methods that need its state are called only while it leads.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def _state(self) -> State:
        assert self._node.state is not None
        return self._node.state

    @property
    def _registry(self) -> Registry:
        assert self._node.registry is not None
        return self._node.registry

    async def register_instance(self, request: Any, response: Any) -> None:
        await self._registry.register(request)
        response.header.status.message = "registered"

    async def get_instance_info(self, request: Any, response: Any) -> None:
        require(request, "instance_id")
        instance = self._registry.instance(request.instance_id)
        response.instance_info.CopyFrom(instance.info)

    async def get_cache_meta(self, request: Any, response: Any) -> None:
        instance = self._registry.instance(request.instance_id)
        blocks = list(map(cache.finder(instance), await cache.keys_of(request, instance)))
        for block, location in zip(blocks, map(_encoded(instance), blocks), strict=True):
            response.locations.add().MergeFromString(location)
            found = {"id": "", "status": "CLS_NOT_FOUND"}
            if block is not None:
                found = {"id": block.file.name[-8:], "status": STATUS_NAMES[block.status]}
            response.metas.append(json.dumps(found, separators=(",", ":")))

    async def remove_cache(self, request: Any, response: Any) -> None:
        instance = self._registry.instance(request.instance_id)
        keys = set(await cache.keys_of(request, instance))
        found = [
            blocks[key]
            for storage, blocks in instance.blocks.items()
            for key in keys
            if storage.available and key in blocks
        ]
        await remove_blocks(self._state, found, instance.group.delay)


def _encoded(instance: Instance) -> Any:
    return lambda block: instance.missing if block is None else block.encode()


class MetaService(_Common):
    """What engines call."""

    async def register_instance(self, request: Any, response: Any) -> None:
        instance = await self._registry.register(request)
        names = instance.group.config.storage_candidates
        known = [self._state.storages[x] for x in names if x in self._state.storages]
        response.storage_configs = describe(known)
        response.header.status.message = "registered"

    async def get_instance_info(self, request: Any, response: Any) -> None:
        await super().get_instance_info(request, response)
        response.instance_group = response.instance_info.instance_group_name

    async def get_cache_location(self, request: Any, response: Any) -> None:
        instance = self._registry.instance(request.instance_id)
        keys = await cache.keys_of(request, instance)
        blocks: list[Block | None]
        asked = len(keys)
        if request.query_type == _QUERY["QT_PREFIX_MATCH"]:
            blocks = [*cache.prefix_match(instance, keys, request.block_mask)]
            if request.HasField("block_mask"):
                asked -= sum(cache.masked(request.block_mask, asked))
            self._state.gauges["manager.prefix_match_len", ""] = float(len(blocks))
        elif request.query_type == _QUERY["QT_BATCH_GET"]:
            blocks = cache.batch_get(instance, keys)
        elif request.query_type == _QUERY["QT_REVERSE_ROLL_SW_MATCH"]:
            blocks = cache.last_window(instance, keys, request.sw_size)
        else:
            choices = ", ".join(name for name, number in _QUERY.items() if number)
            raise invalid(f"query_type: got {request.query_type}, expected one of: {choices}")
        self._state.was_read = True
        self._state.gauges["manager.request_key_count", ""] = float(len(keys))
        self._state.counters["manager.query_key_counter", ""] += asked
        self._state.counters["manager.hit_key_counter", ""] += sum(map(bool, blocks))
        _add_locations(response.locations, blocks, instance, request.location_spec_names)

    async def start_write_cache(self, request: Any, response: Any) -> None:
        instance = self._registry.instance(request.instance_id)
        keys = await cache.keys_of(request, instance)
        session, exists = cache.start_write(
            self._state, instance, keys, request.location_spec_group_names,
            request.write_timeout_seconds,
        )  # fmt: skip
        await begin_session(self._state, session)
        self._state.counters["data_storage.create_keys_counter", ""] += len(session.blocks)
        response.write_session_id = session.id
        count = sum(exists)
        if all(exists[:count]):
            response.block_mask.offset = count
        else:
            response.block_mask.bool_masks.values.extend(exists)
        _add_locations(response.locations, session.blocks, instance)

    async def finish_write_cache(self, request: Any, response: Any) -> None:
        instance = self._registry.instance(request.instance_id)
        await cache.finish_write(
            self._state, instance, request.write_session_id, request.success_blocks
        )

    async def trim_cache(self, request: Any, response: Any) -> None:
        instance = self._registry.instance(request.instance_id)
        if request.strategy in (_TRIM["TS_REMOVE_ALL_META"], _TRIM["TS_TIMESTAMP"]):
            raise ServiceError("UNSUPPORTED", "strategy: expected TS_REMOVE_ALL_CACHE")
        if request.strategy != _TRIM["TS_REMOVE_ALL_CACHE"]:
            raise invalid(f"strategy: got {request.strategy}, expected TS_REMOVE_ALL_CACHE")
        await trim(self._state, instance)


class AdminService(_Common):
    """What administrators call."""

    async def add_storage(self, request: Any, response: Any) -> None:
        require(request, "storage")
        await self._registry.add_storage(request.storage)

    async def enable_storage(self, request: Any, response: Any) -> None:
        require(request, "storage_unique_name")
        await self._registry.enable(request.storage_unique_name, True)

    async def disable_storage(self, request: Any, response: Any) -> None:
        require(request, "storage_unique_name")
        await self._registry.enable(request.storage_unique_name, False)

    async def remove_storage(self, request: Any, response: Any) -> None:
        require(request, "storage_unique_name")
        await self._registry.remove_storage(request.storage_unique_name)

    async def update_storage(self, request: Any, response: Any) -> None:
        require(request, "storage")
        await self._registry.update_storage(request.storage, request.force_update)

    async def list_storage(self, request: Any, response: Any) -> None:
        response.storage.extend(x.config for x in self._state.storages.values())

    async def create_instance_group(self, request: Any, response: Any) -> None:
        require(request, "instance_group")
        await self._registry.create_group(request.instance_group)

    async def update_instance_group(self, request: Any, response: Any) -> None:
        require(request, "instance_group")
        await self._registry.update_group(request.instance_group, request.current_version)

    async def remove_instance_group(self, request: Any, response: Any) -> None:
        require(request, "name")
        await self._registry.remove_group(request.name)

    async def get_instance_group(self, request: Any, response: Any) -> None:
        require(request, "name")
        response.instance_group.CopyFrom(self._registry.group(request.name).config)

    async def get_cache_meta(self, request: Any, response: Any) -> None:
        require(request, "instance_id")
        await super().get_cache_meta(request, response)

    async def remove_cache(self, request: Any, response: Any) -> None:
        require(request, "instance_id")
        await super().remove_cache(request, response)

    async def remove_instance(self, request: Any, response: Any) -> None:
        require(request, "instance_id")
        await self._registry.remove_instance(request.instance_group, request.instance_id)

    async def list_instance_info(self, request: Any, response: Any) -> None:
        require(request, "instance_group_name")
        name = request.instance_group_name
        found = [x.info for x in self._state.instances.values()]
        response.instance_info.extend(x for x in found if x.instance_group_name == name)

    async def add_account(self, request: Any, response: Any) -> None:
        await self._registry.add_account(request)

    async def delete_account(self, request: Any, response: Any) -> None:
        require(request, "user_name")
        await self._registry.delete_account(request.user_name)

    async def list_account(self, request: Any, response: Any) -> None:
        for account in self._state.accounts.values():
            response.accounts.add(user_name=account.name, role=account.role)

    async def gen_config_snapshot(self, request: Any, response: Any) -> None:
        response.config_snapshot = take_snapshot(self._state)

    async def load_config_snapshot(self, request: Any, response: Any) -> None:
        require(request, "config_snapshot")
        await load_snapshot(self._state, self._registry, request.config_snapshot)

    # -- Answered by each manager, also if another one leads --------------------------------------

    async def get_metrics(self, request: Any, response: Any) -> None:
        response.timestamp = int(time.time() * 1000)
        for name, value, tags in metrics(self._node):
            metric = response.metrics.add(metric_name=name)
            if isinstance(value, int):
                metric.metric_value.int_value = value
            else:
                metric.metric_value.float_value = value
            for key, text in tags.items():
                metric.metric_tags.add(tag_key=key, tag_value=text)

    async def check_health(self, request: Any, response: Any) -> None:
        response.is_leader = self._node.lease_left > 0
        response.is_health = True
        response.elector_last_loop_time_ms = int(self._node.looked * 1000)

    async def get_manager_cluster_info(self, request: Any, response: Any) -> None:
        response.self_node_id = self._node.name
        response.leader_node_id = self._node.leader
        if (left := self._node.lease_left) > 0:
            response.self_leader_expiration_time = int((time.time() + left) * 1e6)

    async def leader_demote(self, request: Any, response: Any) -> None:
        self._node.demote()

    async def get_leader_elector_config(self, request: Any, response: Any) -> None:
        response.campaign_delay_time_ms = int(self._node.delay_s * 1000)

    async def update_leader_elector_config(self, request: Any, response: Any) -> None:
        delay = request.campaign_delay_time_ms
        if not 0 <= delay <= _MAX_DELAY_MS:
            raise invalid(f"campaign_delay_time_ms: got {delay}, expected 0 to {_MAX_DELAY_MS}")
        self._node.delay_s = delay / 1000

    async def update_logger(self, request: Any, response: Any) -> None:
        level, module = request.log_level.upper(), request.module_name or _PACKAGE
        if level not in _LEVELS:
            choices = ", ".join(_LEVELS)
            raise invalid(f"log_level: got {quoted(request.log_level)}, expected one of: {choices}")
        if module not in sys.modules or not f"{module}.".startswith(f"{_PACKAGE}."):
            raise invalid(f"module_name: got {quoted(module)}, expected {_PACKAGE} or below")
        logging.getLogger(module).setLevel(level)
