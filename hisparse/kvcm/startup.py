"""The storage and the group of instances that a new manager begins with."""

import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import Error, ParseDict

from hisparse.errors import ConfigError, one_line
from hisparse.kvcm.registry import check_numbers
from hisparse.kvcm.storages import MASTER, MASTER_FIELD, TYPES
from hisparse.kvcm.wire import PROTO, ServiceError

#: The types of start-up files to those of the protocol; those that quotas may name too.
_FIELDS = {scheme: field for field, (scheme, _) in TYPES.items()}
_NUMBERS = {scheme: number for scheme, number in TYPES.values()} | {
    "vcns_hf3fs": PROTO.StorageType["ST_VCNS_3FS"],
    "pace": PROTO.StorageType["ST_TAIRMEMPOOL"],
}


def default_startup(root: Path, capacity: int) -> tuple[Any, Any]:
    """A ``StorageConfig`` and an ``InstanceGroup``.

    Args:
        root: folder of the blocks' files, which all engines mount.
        capacity: bytes.
    """
    storage = {
        "type": "file",
        "global_unique_name": "nfs_01",
        "storage_spec": {"root_path": str(root), "key_count_per_file": 1},
    }
    group = {
        "name": "default",
        "storage_candidates": ["nfs_01"],
        "global_quota_group_name": "default_quota_group",
        "max_instance_count": 10_000,
        "quota": {"capacity": capacity},
        "cache_config": {
            "reclaim_strategy": {
                "storage_unique_name": "nfs_01",
                "reclaim_policy": 1,
                "trigger_strategy": {"used_percentage": 0.8},
                "delay_before_delete_ms": 1000,
            },
            "cache_prefer_strategy": 2,
            "meta_indexer_config": {
                "max_key_count": 10_000_000,
                "meta_storage_backend_config": {"storage_type": "local"},
                "meta_cache_policy_config": {"type": "LRU", "capacity": 10_000},
            },
        },
        "version": 1,
    }
    return _read({"storage_config": storage, "instance_group": group})


def load_startup(path: Path) -> tuple[Any, Any]:
    """The same from a start-up file of Tair KVCache Manager.

    Raises:
        ConfigError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        return _read(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, Error, ServiceError) as error:
        text = f"startup-config: got {path}, expected storage_config and instance_group as JSON"
        raise ConfigError(f"{text}: {one_line(error)}") from None


def _read(found: Any) -> tuple[Any, Any]:
    given, group = found["storage_config"], found["instance_group"]
    field = _FIELDS.get(given["type"])
    if field is None:
        raise ValueError(f"type: got {given['type']!r}, expected one of: {', '.join(_FIELDS)}")
    spec = dict(given["storage_spec"])
    if MASTER in spec:
        spec[MASTER_FIELD] = spec.pop(MASTER)
    storage = {"global_unique_name": given["global_unique_name"], field: spec}
    cache = group["cache_config"]
    cache["data_storage_strategy"] = cache.pop("cache_prefer_strategy", 0)
    for quota in group["quota"].get("quota_config", ()):
        quota["storage_type"] = _NUMBERS[quota["storage_type"]]
    config = ParseDict(group, PROTO.InstanceGroup())
    check_numbers(config)
    return ParseDict(storage, PROTO.StorageConfig()), config
