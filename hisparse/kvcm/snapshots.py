"""Configuration snapshots: storages, groups and instances as JSON; neither accounts nor blocks."""

import json
from typing import Any

from google.protobuf.json_format import Error, MessageToDict, ParseDict

from hisparse.errors import one_line, quoted
from hisparse.kvcm.registry import Registry, check_group, check_same, instance_info, invalid
from hisparse.kvcm.state import Group, Instance, State
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.wire import PROTO


def _to_dict(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    return found


def take_snapshot(state: State) -> str:
    """The configuration of a manager."""
    instances = []
    for instance in state.instances.values():
        fields = _to_dict(instance.info)
        fields["instance_group"] = fields.pop("instance_group_name")
        instances.append(fields)
    found = {
        "storages": [_to_dict(x.config) | {"enabled": x.enabled} for x in state.storages.values()],
        "instance_groups": [_to_dict(x.config) for x in state.groups.values()],
        "instances": instances,
    }
    return json.dumps(found, separators=(",", ":"))


async def load_snapshot(state: State, registry: Registry, text: str) -> None:
    """Add what a snapshot has and the manager has not, and configure the rest as it says.

    All of it or nothing is done, and nothing is removed. Instances that are there stay as they are;
    the version of a group that changes grows.

    Raises:
        ServiceError: it is no snapshot, or does not fit.
    """
    async with registry.lock:
        storages, groups, instances = _read(text)
        changes: list[Storage | Group | Instance] = []
        moving: dict[Storage, bool] = {}  # No write begins below the old root.
        for config, enabled in storages:
            known = state.storages.get(config.global_unique_name)
            storage = Storage(known.number if known else state.new_number(), config, enabled)
            if known is not None:
                registry.check_move(known, storage)
                if known.moves_to(storage):
                    moving[known] = known.enabled
            changes.append(storage)
        after = dict(state.groups)
        for config in groups:
            check_group(config)
            group = state.groups.get(config.name)
            if group is not None and group.config != config:
                config.version = max(config.version, group.config.version + 1)
            group = Group(group.number if group else state.new_number(), config)
            after[config.name] = group
            changes.append(group)
        for request in instances:
            info = instance_info(request)
            there = state.instances.get(info.instance_id)
            if there is not None:
                check_same(there.info, info)
                continue
            name = info.instance_group_name
            if name not in after:
                raise invalid(f"instance_group: got {quoted(name)}, expected one that there is")
            info.quota_group_name = after[name].config.global_quota_group_name
            changes.append(Instance(state.new_number(), info, after[name]))
        for storage in moving:
            storage.enabled = False
        try:
            await state.writer.write({x.number: x.record() for x in changes})
        except OSError:
            for storage, enabled in moving.items():
                storage.enabled = enabled
            raise
        for change in changes:
            _apply(state, change)


def _read(text: str) -> tuple[list[tuple[Any, bool]], list[Any], list[Any]]:
    """Configurations of storages and whether they are enabled, of groups, requests of instances."""
    try:
        found = json.loads(text)
        enabled = [bool(x.pop("enabled")) for x in found["storages"]]
        configs = [ParseDict(x, PROTO.StorageConfig()) for x in found["storages"]]
        groups = [ParseDict(x, PROTO.InstanceGroup()) for x in found["instance_groups"]]
        instances = [
            ParseDict(x, PROTO.RegisterInstanceRequest(), ignore_unknown_fields=True)
            for x in found["instances"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Error) as error:
        expected = "expected what genConfigSnapshot returns"
        raise invalid(f"config_snapshot: {expected}: {one_line(error)}") from None
    for kind, names in (
        ("storages", [x.global_unique_name for x in configs]),
        ("instance_groups", [x.name for x in groups]),
        ("instances", [x.instance_id for x in instances]),
    ):
        if len(set(names)) < len(names):
            raise invalid(f"config_snapshot: got a name twice in {kind}, expected different ones")
    return list(zip(configs, enabled, strict=True)), groups, instances


def _apply(state: State, change: Storage | Group | Instance) -> None:
    if isinstance(change, Storage):
        known = state.storages.setdefault(change.name, change)
        known.configure(change.config)
        known.enabled = change.enabled
    elif isinstance(change, Group):
        state.groups.setdefault(change.config.name, change).config = change.config
    else:
        change.group = state.groups[change.group.config.name]
        state.instances[change.id] = change
