"""The code of each error of either service, over both transports."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kvcm.manager import Client, ManagerError, group, instance


def _code(client: Client, service: str, method: str, request: dict[str, Any]) -> str:
    status = client.respond(service, method, request)["header"]["status"]
    assert status["code"] == "OK" or status["message"], status
    assert "\n" not in status["message"]
    code: str = status["code"]
    return code


def _without(request: dict[str, Any], path: str) -> dict[str, Any]:
    """A request without a field, ``"a.b"`` for one of a part."""
    head, _, rest = path.partition(".")
    return {
        name: (_without(value, rest) if rest else None) if name == head else value
        for name, value in request.items()
        if name != head or rest
    }


_KEYS = {"block_keys": [1, 2]}


@pytest.mark.parametrize(
    ("method", "request_of_one"),
    [
        ("getCacheLocation", _KEYS | {"query_type": 2}),
        ("getCacheMeta", _KEYS),
        ("startWriteCache", _KEYS),
        ("finishWriteCache", {"write_session_id": "x", "success_blocks": {"offset": 1}}),
        ("removeCache", _KEYS),
        ("trimCache", {"strategy": "TS_REMOVE_ALL_CACHE"}),
    ],
)
def test_an_instance_that_nobody_registered(
    client: Client, method: str, request_of_one: dict[str, Any]
) -> None:
    for name in ("", "never"):
        request = request_of_one | {"instance_id": name}
        assert _code(client, "meta", method, request) == "INSTANCE_NOT_EXIST"


def test_info_of_no_instance(client: Client) -> None:
    for name, code in (("", "INVALID_ARGUMENT"), ("never", "INSTANCE_NOT_EXIST")):
        assert _code(client, "meta", "getInstanceInfo", {"instance_id": name}) == code
    assert _code(client, "admin", "getInstanceInfo", {"instance_id": "never"}) == "INTERNAL_ERROR"


@pytest.mark.parametrize(
    "path",
    [
        "instance_group", "instance_id", "model_deployment", "model_deployment.model_name",
        "model_deployment.dtype", "location_spec_infos",
    ],
)  # fmt: skip
def test_a_registration_that_lacks_something(client: Client, path: str) -> None:
    for service in ("meta", "admin"):
        request = _without(instance("new"), path)
        assert _code(client, service, "registerInstance", request) == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"instance_group": "never"}, "INTERNAL_ERROR"),
        ({"location_spec_infos": [{"size": 1}]}, "INVALID_ARGUMENT"),
        ({"location_spec_infos": [{"name": "a", "size": -1}]}, "INVALID_ARGUMENT"),
        ({"location_spec_infos": [{"name": "a"}, {"name": "a"}]}, "INVALID_ARGUMENT"),
        ({"location_spec_groups": [{"name": "g", "spec_names": ["x"]}]}, "INVALID_ARGUMENT"),
        *(({"instance_id": x}, "INVALID_ARGUMENT") for x in ("..", "a/../b", "/a", "a?b", "a b")),
        *(
            ({"location_spec_infos": [{"name": x}]}, "INVALID_ARGUMENT")
            for x in ("../a", "a#b", "a\0b", "x" * 201)
        ),
    ],
)
def test_a_registration_that_cannot_be(client: Client, change: dict[str, Any], code: str) -> None:
    assert _code(client, "meta", "registerInstance", instance("new") | change) == code


def test_registering_again(client: Client, name: str) -> None:
    same = instance(name)
    model = same["model_deployment"]
    for request, code in (
        (same, "OK"),
        (same | {"model_deployment": model | {"user_data": "other"}}, "OK"),
        (same | {"model_deployment": model | {"model_name": "other"}}, "DUPLICATE_ENTITY"),
        (same | {"block_size": 5}, "DUPLICATE_ENTITY"),
        (same | {"location_spec_infos": [{"name": "tp0", "size": 65}]}, "DUPLICATE_ENTITY"),
        (
            same | {"location_spec_groups": [{"name": "g", "spec_names": ["tp0"]}]},
            "DUPLICATE_ENTITY",
        ),
    ):
        assert _code(client, "meta", "registerInstance", request) == code
    other = same | {"block_size": 5}
    assert _code(client, "admin", "registerInstance", other) == "INTERNAL_ERROR"


@pytest.mark.parametrize(
    ("method", "request_of_one", "code"),
    [
        ("getCacheLocation", _KEYS, "INVALID_ARGUMENT"),
        ("getCacheLocation", _KEYS | {"query_type": 77}, "INVALID_ARGUMENT"),
        *(
            ("getCacheLocation", _KEYS | {"query_type": 3, "sw_size": x}, "INVALID_ARGUMENT")
            for x in (-1, 0, 3)
        ),
        ("getCacheLocation", {"query_type": 2}, "INVALID_ARGUMENT"),
        ("getCacheMeta", {}, "INVALID_ARGUMENT"),
        ("removeCache", {}, "INVALID_ARGUMENT"),
        ("startWriteCache", {}, "INVALID_ARGUMENT"),
        ("startWriteCache", _KEYS | {"location_spec_group_names": ["g"]}, "INVALID_ARGUMENT"),
        ("startWriteCache", _KEYS | {"location_spec_group_names": ["g"] * 2}, "INTERNAL_ERROR"),
        ("finishWriteCache", {"success_blocks": {"offset": 0}}, "INVALID_ARGUMENT"),
        ("finishWriteCache", {"write_session_id": "x"}, "INVALID_ARGUMENT"),
        ("finishWriteCache", {"write_session_id": "x", "success_blocks": {}}, "INVALID_ARGUMENT"),
        (
            "finishWriteCache",
            {"write_session_id": "x", "success_blocks": {"offset": 0}},
            "INTERNAL_ERROR",
        ),
        ("trimCache", {}, "INVALID_ARGUMENT"),
        ("trimCache", {"strategy": "TS_REMOVE_ALL_META"}, "UNSUPPORTED"),
        ("trimCache", {"strategy": "TS_TIMESTAMP"}, "UNSUPPORTED"),
    ],
)
def test_requests_that_cannot_be(
    client: Client, name: str, method: str, request_of_one: dict[str, Any], code: str
) -> None:
    request = request_of_one | {"instance_id": name}
    assert _code(client, "meta", method, request) == code


def test_sessions_that_do_not_go_on(client: Client, name: str) -> None:
    def finish(begun: dict[str, Any], mask: dict[str, Any], who: str = name) -> str:
        request = {"instance_id": who, "success_blocks": mask}
        session = {"write_session_id": begun["write_session_id"]}
        return _code(client, "meta", "finishWriteCache", request | session)

    begun = client.write([1, 2], name)
    other = f"{name}-other"
    client.register(other)
    assert finish(begun, {"offset": 2}, other) == "INTERNAL_ERROR"
    assert finish(begun, {"offset": 2}) == "OK"
    assert finish(begun, {"offset": 2}) == "INTERNAL_ERROR"
    for mask in ({"offset": 3}, {"offset": -1}, {"bool_masks": {"values": [True]}}):
        begun = client.write([3, 4], name)
        assert finish(begun, mask) == "INVALID_ARGUMENT"
        assert finish(begun, {"offset": 2}) == "INTERNAL_ERROR"
        # Upstream would leave them WRITING.
        client.put([5], name)
        while len(client.write([3, 4], name, seconds=0)["locations"]) < 2:
            pass
        while client.states([3, 4], name) != ["NOT_FOUND"] * 2:
            pass
    begun = client.write([6], name, seconds=0)
    assert finish(begun, {"offset": 1}) == "INTERNAL_ERROR"
    empty = client.write([1, 2], name)
    assert empty["locations"] == []
    assert finish(empty, {"bool_masks": {"offset": 0}}) == "OK"


_ADMIN_ERRORS = [
    ("addStorage", {}, "INVALID_ARGUMENT"),
    ("addStorage", {"storage": {"nfs": {"root_path": "/a/"}}}, "INVALID_ARGUMENT"),
    ("addStorage", {"storage": {"global_unique_name": "s"}}, "INVALID_ARGUMENT"),
    *(
        ("addStorage", {"storage": {"global_unique_name": "s", "nfs": {"root_path": x}}},
         "INVALID_ARGUMENT")
        for x in ("", "relative/", "/", "/a/../b", "/a?b")
    ),
    ("addStorage", {"storage": {"global_unique_name": "s/t", "nfs": {"root_path": "/a/"}}},
     "INVALID_ARGUMENT"),
    ("addStorage", {"storage": {"global_unique_name": "s", "nfs": {"root_path": "/a/",
     "key_count_per_file": 5000}}}, "INVALID_ARGUMENT"),
    ("addStorage", {"storage": {"global_unique_name": "s", "mooncake": {"protocol": "tcp"}}},
     "INVALID_ARGUMENT"),
    ("addStorage", {"storage": {"global_unique_name": "nfs_01", "nfs": {"root_path": "/a/"}}},
     "INTERNAL_ERROR"),
    ("updateStorage", {"storage": {"global_unique_name": "s", "nfs": {"root_path": "/a/"}}},
     "INTERNAL_ERROR"),
    *(
        (f"{verb}Storage", {"storage_unique_name": x}, code)
        for verb in ("enable", "disable", "remove")
        for x, code in (("", "INVALID_ARGUMENT"), ("never", "INTERNAL_ERROR"))
    ),
    ("createInstanceGroup", {}, "INVALID_ARGUMENT"),
    ("createInstanceGroup", {"instance_group": group("default")}, "INTERNAL_ERROR"),
    ("updateInstanceGroup", {"instance_group": group("never", version=2), "current_version": 1},
     "INTERNAL_ERROR"),
    ("updateInstanceGroup", {"instance_group": group("default", version=2), "current_version": 0},
     "INTERNAL_ERROR"),
    ("updateInstanceGroup", {"instance_group": group("default"), "current_version": 1},
     "INTERNAL_ERROR"),
    *(
        (f"{verb}InstanceGroup", {"name": x}, code)
        for verb in ("get", "remove")
        for x, code in (("", "INVALID_ARGUMENT"), ("never", "INTERNAL_ERROR"))
    ),
    ("getCacheMeta", _KEYS, "INVALID_ARGUMENT"),
    ("getCacheMeta", _KEYS | {"instance_id": "never"}, "INTERNAL_ERROR"),
    ("removeCache", _KEYS, "INVALID_ARGUMENT"),
    ("removeInstance", {}, "INVALID_ARGUMENT"),
    ("removeInstance", {"instance_id": "never"}, "INTERNAL_ERROR"),
    ("listInstanceInfo", {}, "INVALID_ARGUMENT"),
    ("listInstanceInfo", {"instance_group_name": "never"}, "OK"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "request_of_one", "code"), _ADMIN_ERRORS)
def test_administration(
    client: Client, method: str, request_of_one: dict[str, Any], code: str
) -> None:
    assert _code(client, "admin", method, request_of_one) == code


@pytest.mark.parametrize(
    ("share", "code"), [(-0.1, "INVALID_ARGUMENT"), ("NaN", "INVALID_ARGUMENT"), (3.2, "OK")]
)
def test_a_share_of_a_quota(client: Client, name: str, share: object, code: str) -> None:
    made = group(f"share-{name}")
    made["cache_config"]["reclaim_strategy"]["trigger_strategy"] = {"used_percentage": share}
    assert _code(client, "admin", "createInstanceGroup", {"instance_group": made}) == code


@pytest.mark.parametrize(
    "path",
    [
        "max_instance_count", "quota.capacity", "cache_config.meta_indexer_config.max_key_count",
        "cache_config.reclaim_strategy.trigger_strategy.used_size",
        *(f"cache_config.reclaim_strategy.{x}" for x in ("trigger_period_seconds",
          "reclaim_step_size", "reclaim_step_percentage", "delay_before_delete_ms")),
    ],
)  # fmt: skip
def test_negative_numbers(client: Client, path: str) -> None:
    made = part = group("negative")
    *parents, last = path.split(".")
    for name in parents:
        part = part[name]
    part[last] = -1
    with pytest.raises(ManagerError, match=f"INVALID_ARGUMENT: {last}: got -1, expected at least"):
        client.admin("createInstanceGroup", instance_group=made)


def test_a_negative_quota_of_a_type(client: Client) -> None:
    quotas = [{"storage_type": "ST_NFS", "capacity": -1}]
    made = group("negative", quota={"capacity": 1, "quota_config": quotas})
    assert _code(client, "admin", "createInstanceGroup", {"instance_group": made}) == (
        "INVALID_ARGUMENT"
    )


@pytest.mark.parametrize(
    "path",
    [
        "name", "storage_candidates", "global_quota_group_name", "cache_config",
        "cache_config.data_storage_strategy", "cache_config.reclaim_strategy.storage_unique_name",
        "cache_config.meta_indexer_config.meta_storage_backend_config.storage_type",
        "cache_config.meta_indexer_config.meta_cache_policy_config.type",
    ],
)  # fmt: skip
def test_a_group_that_lacks_something(client: Client, path: str) -> None:
    request = {"instance_group": _without(group("new"), path)}
    assert _code(client, "admin", "createInstanceGroup", request) == "INVALID_ARGUMENT"
