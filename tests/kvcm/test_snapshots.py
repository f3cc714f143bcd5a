"""Snapshots of the configuration: what one manager has, another gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kvcm.manager import Client, Manager, ManagerError, group, instance

Start = Callable[..., Manager]


def _taken(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.admin("genConfigSnapshot")["config_snapshot"])
    return found


def _load(client: Client, snapshot: dict[str, Any]) -> None:
    client.admin("loadConfigSnapshot", config_snapshot=json.dumps(snapshot))


def test_another_manager_is_configured_alike(managers: Start, tmp_path: Path) -> None:
    one, other = managers(), managers(store=str(tmp_path / "db"))
    client = one.http
    second = {"global_unique_name": "second", "nfs": {"root_path": f"{tmp_path}/second/"}}
    client.admin("addStorage", storage=second)
    client.admin("disableStorage", storage_unique_name="second")
    client.admin("createInstanceGroup", instance_group=group("g", version=7))
    client.register(instance_group="g")
    client.admin("addAccount", user_name="ann", password="secret")
    before = _taken(client)
    assert "ann" not in json.dumps(before)
    _load(other.grpc, before)
    assert _taken(other.http) == before
    other.kill()
    other.start()
    assert _taken(other.http) == before
    assert len(other.http.put([1])) == 1
    with pytest.raises(ManagerError, match="DUPLICATE_ENTITY"):
        other.http.register(block_size=9)


def test_what_is_there_changes_and_nothing_goes(managers: Start, tmp_path: Path) -> None:
    client = managers().http
    client.register()
    before = _taken(client)
    client.put([1])
    client.admin("createInstanceGroup", instance_group=group("later"))
    changed = group("default", version=5)
    client.admin("updateInstanceGroup", instance_group=changed, current_version=1)
    client.admin("disableStorage", storage_unique_name="nfs_01")
    assert client.match([1]) == []
    _load(client, before)
    assert len(client.match([1])) == 1
    found = {x["name"]: x for x in _taken(client)["instance_groups"]}
    (old,) = before["instance_groups"]
    assert found["default"] == old | {"version": "6"}
    assert found["later"]["version"] == "1"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.pop("storages"), "INVALID_ARGUMENT: config_snapshot: expected what"),
        (lambda x: x.update(storages=[1]), "INVALID_ARGUMENT: config_snapshot: expected what"),
        (lambda x: x["instances"].append(x["instances"][0]), "got a name twice in instances"),
        (lambda x: x["instances"][0].update(instance_group="h"), "INVALID_ARGUMENT|expected one"),
        (lambda x: x["instance_groups"][0].pop("cache_config"), "INVALID_ARGUMENT: cache_config"),
        (lambda x: x["storages"][0]["nfs"].update(root_path="/x/../y"), "INVALID_ARGUMENT: root"),
        (lambda x: x["storages"][0]["nfs"].update(root_path="/x/y/"), "expected force_update"),
        (lambda x: x["instances"][1].update(block_size=9), "INTERNAL_ERROR: .*block_size"),
    ],
)
def test_all_or_nothing(managers: Start, change: Callable[[Any], object], expected: str) -> None:
    client = managers().http
    client.register("there")
    client.put([1], "there")
    client.register("gone")
    snapshot = _taken(client)
    snapshot["instances"].reverse()
    client.admin("removeInstance", instance_id="gone")
    snapshot["instance_groups"].append(group("new"))
    before = _taken(client)
    change(snapshot)
    with pytest.raises(ManagerError, match=expected):
        _load(client, snapshot)
    assert _taken(client) == before
    assert client.match([1], "there")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"storages": 1}'])
def test_no_snapshot(client: Client, text: str) -> None:
    with pytest.raises(ManagerError, match="INVALID_ARGUMENT: config_snapshot: "):
        client.admin("loadConfigSnapshot", config_snapshot=text)


def test_a_loaded_instance_is_another_ones_too(managers: Start) -> None:
    one = managers().http
    one.register("a")
    other = managers().http
    _load(other, _taken(one))
    assert other.meta("getInstanceInfo", instance_id="a") | {"header": 0} == (
        one.meta("getInstanceInfo", instance_id="a") | {"header": 0}
    )
    other.meta("registerInstance", **instance("a"))
