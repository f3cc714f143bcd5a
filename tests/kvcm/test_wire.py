"""The wire: what every client of either transport may rely on."""

from __future__ import annotations

import json
import re

import grpc
import pytest
import requests

from hisparse.kvcm.server import MAX_BODY
from hisparse.kvcm.wire import PROTO
from tests.kvcm.manager import Client, Manager, instance


def _post(manager: Manager, method: str, body: bytes | str) -> requests.Response:
    return requests.post(manager.http.url("meta", method), data=body, timeout=30)


@pytest.fixture
def ready(shared: Manager) -> Manager:
    shared.http.register()
    return shared


@pytest.mark.parametrize(
    "body",
    [
        '{"instance_id": "i", "block_keys": [1], "query_type": "QT_BATCH_GET"}',
        '{"instanceId": "i", "blockKeys": ["1"], "queryType": 1}',
        '{"instance_id": "i", "block_keys": [1.0, "2"], "query_type": "1", "token_ids": null}',
        '{"instance_id": "i", "block_keys": [-9223372036854775808, 9223372036854775807], '
        '"query_type": "QT_BATCH_GET"}',
        '{"instance_id": "i", "block_keys": [1], "query_type": "QT_BATCH_GET", "new": {"a": [{}]},'
        ' "block_mask": {"bool_masks": {"offset": 0, "x": "y"}}}',
    ],
    ids=["snake_case", "lower_camel", "numbers", "64_bits", "unknown_fields"],
)
def test_requests_may_be_written_in_many_ways(ready: Manager, body: str) -> None:
    answer = _post(ready, "getCacheLocation", body)
    assert answer.status_code == 200
    assert answer.json()["header"]["status"]["code"] == "OK"
    assert answer.json()["locations"][0]["location_specs"] == [{"name": "tp0", "uri": ""}]


def test_an_unknown_name_of_an_enum_is_ignored(ready: Manager) -> None:
    body = '{"instance_id": "i", "block_keys": [1], "query_type": "QT_NEWER"}'
    status = _post(ready, "getCacheLocation", body).json()["header"]["status"]
    assert status["code"] == "INVALID_ARGUMENT"
    assert status["message"].startswith("query_type: got 0, expected one of: QT_BATCH_GET")


@pytest.mark.parametrize(
    "body",
    [
        "", "no JSON", "[]", "5", "null", '{"instance_id": 5}', '{"block_keys": 5}',
        '{"block_keys": [1.5]}', '{"block_keys": ["x"]}', '{"block_keys": [null]}',
        '{"block_keys": [9223372036854775808]}', '{"block_keys": [NaN]}', '{"sw_size": 4294967296}',
        '{"block_keys": [true]}', '{"block_mask": {"offset": 1, "bool_masks": {}}}',
        '{"trace_id": "\\ud800"}', '{"block_mask": 5}', '{"x": ' * 100_000, b"\xff{}",
    ],
    ids=lambda body: repr(body)[:30],
)  # fmt: skip
def test_what_is_no_request_is_an_error_of_http(ready: Manager, body: bytes | str) -> None:
    answer = _post(ready, "getCacheLocation", body)
    assert (answer.status_code, answer.text) == (400, "{}")


def test_paths_and_verbs(shared: Manager) -> None:
    url = shared.http.url("meta", "getCacheLocation")
    assert requests.get(url, timeout=30).status_code == 405
    assert _post(shared, "getNothing", "{}").status_code == 404
    assert _post(shared, "GetCacheLocation", "{}").status_code == 404
    assert _post(shared, "addStorage", "{}").status_code == 404  # AdminService's, another port.


def test_answers_print_defaults_names_and_64_bits_as_text(ready: Manager) -> None:
    ready.http.put([7])
    body = '{"trace_id": "t", "instance_id": "i", "block_keys": [7], "write_timeout_seconds": 1}'
    answer = _post(ready, "startWriteCache", body).json()
    assert re.fullmatch(r"t_\d{16}", answer["header"].pop("request_id"))
    assert re.fullmatch(r"[a-z0-9]{32}", answer.pop("write_session_id"))
    assert answer == {
        "header": {"status": {"code": "OK", "message": ""}, "tracer_result": ""},
        "block_mask": {"offset": 1},
        "locations": [],
    }
    info = ready.http.meta("getInstanceInfo", instance_id="i")["instance_info"]
    assert info["location_spec_infos"] == [{"name": "tp0", "size": "64"}]
    assert info["model_deployment"] == {
        "model_name": "m", "dtype": "bfloat16", "use_mla": False, "tp_size": 1, "dp_size": 0,
        "lora_name": "", "pp_size": 0, "extra": "", "user_data": "",
    }  # fmt: skip
    group = ready.http.admin("getInstanceGroup", name="default")["instance_group"]
    assert group["quota"] == {"capacity": str(1 << 30), "quota_config": []}
    assert group["cache_config"]["reclaim_strategy"]["trigger_strategy"] == {
        "used_size": "0",
        "used_percentage": 0.8,
    }
    assert group["cache_config"]["data_storage_strategy"] == "CPS_PREFER_3FS"


def test_an_error_has_no_other_fields_than_an_empty_answer(ready: Manager) -> None:
    answer = ready.http.respond("meta", "registerInstance", {"trace_id": "x"})
    assert answer["storage_configs"] == ""
    answer = ready.http.respond("meta", "getInstanceInfo", {"instance_id": "none"})
    assert set(answer) == {"header", "instance_group"}


def test_storages_are_told_as_json_in_a_text(ready: Manager) -> None:
    found = ready.grpc.meta("registerInstance", **instance())
    assert json.loads(found["storage_configs"]) == [
        {
            "type": "file",
            "is_available": True,
            "global_unique_name": "nfs_01",
            "storage_spec": {"root_path": f"{ready.root}/", "key_count_per_file": 1},
        }
    ]


def test_the_bytes_of_a_request_are_those_of_the_interface() -> None:
    """Fields 2, 3 and 6 of StartWriteCacheRequest, written by hand."""
    request = PROTO.StartWriteCacheRequest(
        instance_id="i", block_keys=[1, 300], write_timeout_seconds=30
    )
    assert request.SerializeToString() == b"\x12\x01i" + b"\x1a\x03\x01\xac\x02" + b"\x30\x1e"
    location = PROTO.CacheLocation.FromString(b"\x08\x04\x10\x01\x1a\x07\x0a\x02tp\x12\x01u")
    assert (location.type, location.spec_size) == (PROTO.StorageType["ST_NFS"], 1)
    assert [(x.name, x.uri) for x in location.location_specs] == [("tp", "u")]


def test_long_messages_pass_and_longer_ones_are_refused(client: Client, ready: Manager) -> None:
    long = "x" * (5 << 20)
    found = client.respond("meta", "getInstanceInfo", {"instance_id": "i", "trace_id": long})
    assert found["header"]["request_id"].startswith(long)
    too_long = {"trace_id": "x" * MAX_BODY}
    if client is ready.http:
        answer = requests.post(client.url("meta", "getInstanceInfo"), json=too_long, timeout=30)
        assert (answer.status_code, answer.text) == (413, "{}")
    else:
        with pytest.raises(grpc.RpcError) as raised:
            client.respond("meta", "getInstanceInfo", too_long)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("field", "most"), [("block_keys", 1 << 15), ("token_ids", 1 << 20)])
def test_lists_have_limits(client: Client, name: str, field: str, most: int) -> None:
    request = {"instance_id": name, "query_type": "QT_PREFIX_MATCH"}
    assert client.meta("getCacheLocation", **request, **{field: [1] * most})["locations"] == []
    answer = client.respond("meta", "getCacheLocation", request | {field: [1] * (most + 1)})
    assert answer["header"]["status"] == {
        "code": "INVALID_ARGUMENT",
        "message": f"{field}: got {most + 1}, expected at most {most}",
    }


def test_both_services_on_one_port(managers: object) -> None:
    manager = managers(apart=False)  # type: ignore[operator]
    assert manager.ports["rpc"] == manager.ports["admin_rpc"]
    assert manager.ports["http"] == manager.ports["admin_http"]
    for client in (manager.http, manager.grpc):
        assert client.meta("registerInstance", **instance())["storage_configs"] != ""
        assert client.admin("checkHealth")["is_leader"]


def test_random_bytes_end_no_connection(shared: Manager) -> None:
    call = grpc.insecure_channel(f"127.0.0.1:{shared.ports['rpc']}").unary_unary(
        "/kv_cache_manager.proto.meta.MetaService/StartWriteCache", None, None
    )
    with pytest.raises(grpc.RpcError):
        call(b"\xff\xff\xff", timeout=30)
    with pytest.raises(grpc.RpcError):
        call(b"\x12\x02\xff\xff", timeout=30)  # No UTF-8.
    shared.grpc.register()
