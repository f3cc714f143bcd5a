"""Random messages for every method: each gets a status, and the manager goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kvcm.manager import METHODS, Client, Manager, group, instance, running, wait_until
from tests.sizes import sized

#: Values that exist, so that requests reach further than their first check.
_NAMES = [
    "",
    "i",
    "default",
    "nfs_01",
    "g",
    "tp0",
    "one",
    "local",
    "LRU",
    "/tmp/kvcm-none/",
    "../x",
    "é",
    "\0",
]
_NUMBERS = [0, 1, 2, 3, 4, -1, 64, 1 << 20, (1 << 31) - 1, -(1 << 31)]
_LARGE = [*_NUMBERS, (1 << 63) - 1, -(1 << 63)]
_CODES = {
    "OK",
    "UNSUPPORTED",
    "INTERNAL_ERROR",
    "INVALID_ARGUMENT",
    "DUPLICATE_ENTITY",
    "REACH_MAX_ENTITY_CAPACITY",
    "INSTANCE_NOT_EXIST",
    "SERVER_NOT_LEADER",
}
#: An answer takes 1 s at most; more on a machine that does other things.
_LIMIT_S = 5.0


def _values(field: Any) -> st.SearchStrategy[Any]:
    kind = field.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return _messages(field.message_type)
    if kind == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([x.name for x in field.enum_type.values]) | st.integers(0, 99)
    if kind == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(_NAMES)
    if kind == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e300, "NaN", "Infinity"])
    return st.sampled_from(_LARGE if kind == FieldDescriptor.TYPE_INT64 else _NUMBERS)


def _messages(message: Any) -> st.SearchStrategy[dict[str, Any]]:
    """JSON of a message with some of its fields, of a oneof with at most one."""
    fields = {
        x.name: st.lists(_values(x), max_size=4) if x.is_repeated else _values(x)
        for x in message.fields
    }
    made = st.fixed_dictionaries({}, optional=fields)

    def one_of_each(found: dict[str, Any]) -> dict[str, Any]:
        for oneof in message.oneofs:
            for name in [x.name for x in oneof.fields if x.name in found][1:]:
                del found[name]
        return found

    return made.map(one_of_each)


@pytest.fixture(scope="module")
def small(forker: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("any")
    place = str(folder / "db")
    with running(forker, folder, store=place, capacity=1 << 16, debug_http=0) as manager:
        yield manager


def _answer(client: Client, service: str, method: str, request: dict[str, Any]) -> None:
    begin = time.monotonic()
    header = client.respond(service, method, request)["header"]
    assert time.monotonic() - begin < _LIMIT_S, (service, method)
    assert header["status"]["code"] in _CODES, header
    assert "Traceback" not in header["status"]["message"]
    unexpected = ("AttributeError", "KeyError", "TypeError", "ValueError", "IndexError", "Overflow")
    assert not any(x in header["status"]["message"] for x in unexpected), (method, header)


@pytest.mark.parametrize(("service", "method"), sorted(METHODS))
@settings(max_examples=sized(10, 300))
@given(data=st.data())
def test_every_message_has_an_answer(
    small: Manager, service: str, method: str, data: st.DataObject
) -> None:
    small.grpc.admin("updateLeaderElectorConfig", campaign_delay_time_ms=0)
    wait_until(lambda: small.grpc.admin("checkHealth")["is_leader"])  # After a leaderDemote.
    for request in (
        {"instance_group": group("g", storage_candidates=["nfs_01"])},
        {"storage": {"global_unique_name": "nfs_01", "nfs": {"root_path": f"{small.root}/"}}},
        {"storage_unique_name": "nfs_01"},
    ):
        name = {"instance_group": "createInstanceGroup", "storage": "addStorage"}
        small.grpc.respond("admin", name.get(next(iter(request)), "enableStorage"), request)
    small.grpc.respond("meta", "registerInstance", instance())
    request = data.draw(_messages(METHODS[service, method].request.DESCRIPTOR))
    client = small.http if data.draw(st.booleans()) else small.grpc
    _answer(client, service, method, request)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text() | st.sampled_from(["instance_id", "blockKeys", "block_mask"]), inner
        )
    ),
)


@settings(max_examples=sized(30, 1000))
@given(
    body=st.binary() | _JSON.map(json.dumps).map(str.encode),
    method=st.sampled_from(sorted(METHODS)),
)
def test_every_body_has_an_answer(small: Manager, body: bytes, method: tuple[str, str]) -> None:
    answer = small.http.session.post(small.http.url(*method), data=body, timeout=30)
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert answer.json()["header"]["status"]["code"] in _CODES
    else:
        assert answer.text == "{}"
