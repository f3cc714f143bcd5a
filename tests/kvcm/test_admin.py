"""Storages, groups and instances; what is configured survives a manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kvcm.manager import (
    Client,
    Manager,
    ManagerError,
    group,
    instance,
    path_of,
    store_bytes,
    uris,
    wait_until,
)

Start = Callable[..., Manager]


def _add(client: Client, name: str, root: Path) -> None:
    storage = {"global_unique_name": name, "nfs": {"root_path": f"{root}/"}}
    client.admin("addStorage", storage=storage)


def test_groups_have_versions(client: Client, name: str) -> None:
    made = f"group-{name}"
    client.admin("createInstanceGroup", instance_group=group(made))
    newer = group(made, version=5, user_data="new")
    client.admin("updateInstanceGroup", instance_group=newer, current_version=1)
    found = client.admin("getInstanceGroup", name=made)["instance_group"]
    assert (found["version"], found["user_data"]) == ("5", "new")
    client.meta("registerInstance", **(instance(f"in-{name}") | {"instance_group": made}))
    listed = client.admin("listInstanceInfo", instance_group_name=made)["instance_info"]
    assert [x["instance_id"] for x in listed] == [f"in-{name}"]
    with pytest.raises(ManagerError, match="got 1 instances, expected none"):
        client.admin("removeInstanceGroup", name=made)
    with pytest.raises(ManagerError, match="expected the instance's"):
        client.admin("removeInstance", instance_group="default", instance_id=f"in-{name}")
    client.admin("removeInstance", instance_group=made, instance_id=f"in-{name}")
    client.admin("removeInstanceGroup", name=made)


def test_a_disabled_storage_is_neither_read_nor_written(managers: Start, tmp_path: Path) -> None:
    manager = managers()
    client = manager.http
    _add(client, "other", tmp_path / "other")
    both = group("both", storage_candidates=["nfs_01", "other"])
    client.admin("createInstanceGroup", instance_group=both)
    client.register(instance_group="both")
    (first,) = client.put([1])
    assert first.startswith(f"file://nfs_01{manager.root}/i/tp0/1_")
    client.admin("disableStorage", storage_unique_name="nfs_01")
    assert client.match([1]) == []
    assert client.states([1]) == ["NOT_FOUND"]
    (second,) = client.put([1])
    assert second.startswith(f"file://other{tmp_path}/other/i/tp0/1_")
    client.admin("enableStorage", storage_unique_name="nfs_01")
    seen = {client.match([1])[0] for _ in range(100)}
    assert seen == {first, second}
    client.admin("disableStorage", storage_unique_name="nfs_01")
    client.admin("disableStorage", storage_unique_name="other")
    with pytest.raises(ManagerError, match="no candidate with room, .*: nfs_01, other"):
        client.write([2])
    told = client.meta("registerInstance", **(instance() | {"instance_group": "both"}))
    assert told["storage_configs"].count('"is_available":false') == 2


def test_a_removed_storage_forgets_its_blocks(managers: Start) -> None:
    manager = managers()
    client = manager.http
    client.register()
    (uri,) = client.put([1])
    store_bytes(uri, b"x" * 64)
    begun = client.write([2])
    client.admin("removeStorage", storage_unique_name="nfs_01")
    assert client.admin("listStorage")["storage"] == []
    assert client.states([1, 2]) == ["NOT_FOUND"] * 2
    with pytest.raises(ManagerError, match="INTERNAL_ERROR"):
        client.finish(begun, [True])
    assert path_of(uri).read_bytes() == b"x" * 64
    assert client.metric("cache_manager_group.usage_ratio") == 0


def test_a_storage_moves_only_by_force(managers: Start, tmp_path: Path) -> None:
    client = managers().http
    client.register()
    (uri,) = client.put([1])
    same = {"root_path": f"{tmp_path}/files/", "key_count_per_file": 3}
    client.admin("updateStorage", storage={"global_unique_name": "nfs_01", "nfs": same})
    assert client.match([1]) == [uri]
    begun = client.write([2, 3, 4, 5])
    assert [x.partition("?")[2] for x in uris(begun)] == [
        f"blkid={x}&size=64" for x in (0, 1, 2, 0)
    ]
    moved = {"global_unique_name": "nfs_01", "nfs": {"root_path": f"{tmp_path}/moved/"}}
    with pytest.raises(ManagerError, match="expected force_update"):
        client.admin("updateStorage", storage=moved)
    client.admin("updateStorage", storage=moved, force_update=True)
    assert client.match([1]) == []
    assert client.put([1])[0].startswith(f"file://nfs_01{tmp_path}/moved/")


def test_a_file_system_of_another_type(managers: Start, tmp_path: Path) -> None:
    client = managers().grpc
    mounted = {"mountpoint": f"{tmp_path}/mnt", "root_dir": "kv", "cluster_name": "c"}
    client.admin("addStorage", storage={"global_unique_name": "fs", "threefs": mounted})
    both = group("both", storage_candidates=["nfs_01", "fs"])
    client.admin("createInstanceGroup", instance_group=both)
    client.register(instance_group="both")
    begun = client.write([-1])
    assert begun["locations"][0]["type"] == "ST_3FS"
    assert uris(begun)[0].startswith(f"hf3fs://fs{tmp_path}/mnt/kv/i/tp0/ffffffffffffffff_")


def test_removing_an_instance_deletes_its_files(managers: Start) -> None:
    client = managers().http
    client.register()
    uris = client.put(list(range(200)))
    for uri in uris:
        store_bytes(uri, b"x" * 64)
    begun = client.write([1000])
    client.admin("removeInstance", instance_id="i")
    with pytest.raises(ManagerError, match="INSTANCE_NOT_EXIST"):
        client.finish(begun, [True])
    client.register(block_size=9)
    assert client.match([0]) == []
    wait_until(lambda: not any(path_of(uri).exists() for uri in uris))
    wait_until(lambda: client.metric("cache_manager_group.usage_ratio") == 0)


def test_configuration_survives(managers: Start, tmp_path: Path) -> None:
    manager = managers(store=str(tmp_path / "kvcm.db"))
    client = manager.http
    _add(client, "other", tmp_path / "other")
    client.admin("disableStorage", storage_unique_name="other")
    _add(client, "third", tmp_path / "third")
    client.admin("removeStorage", storage_unique_name="third")
    client.admin("createInstanceGroup", instance_group=group("made"))
    newer = group("made", version=2, storage_candidates=["nfs_01", "other"])
    client.admin("updateInstanceGroup", instance_group=newer, current_version=1)
    client.register(instance_group="made")
    client.register("gone")
    client.admin("removeInstance", instance_id="gone")

    def known() -> list[object]:
        told = manager.http.meta("registerInstance", **(instance() | {"instance_group": "made"}))
        return [
            manager.http.admin("listStorage")["storage"],
            told["storage_configs"],
            manager.http.admin("getInstanceGroup", name="made")["instance_group"],
            manager.http.admin("listInstanceInfo", instance_group_name="made")["instance_info"],
            manager.http.admin("listInstanceInfo", instance_group_name="default")["instance_info"],
        ]

    before = known()
    manager.kill()
    manager.start()
    assert known() == before
    assert before[-1] == []


def test_metrics_have_the_names_of_upstream(client: Client, name: str) -> None:
    client.put([1, 2, 3], name)
    assert client.metric("cache_manager_instance.key_count", instance_id=name) == 3
    assert client.metric("cache_manager_instance.byte_size", instance_id=name) == 3 * 64
    before = client.metric("service.query_counter", api_name="StartWriteCache")
    client.write([9], name, seconds=0)
    assert client.metric("service.query_counter", api_name="StartWriteCache") == before + 1
    assert client.metric("service.query_rt_us", api_name="StartWriteCache") > 1
    client.respond("meta", "getInstanceInfo", {})
    errors = client.metric("service.error_counter", api_name="GetInstanceInfo")
    client.respond("meta", "getInstanceInfo", {})
    assert client.metric("service.error_counter", api_name="GetInstanceInfo") == errors + 1


def test_a_group_has_a_limit_of_instances(managers: Start, tmp_path: Path) -> None:
    """The longest unused one without blocks makes room; engines register again."""
    manager = managers(store=str(tmp_path / "db"))
    client = manager.http
    client.admin("createInstanceGroup", instance_group=group("few", max_instance_count=3))

    def names() -> list[str]:
        found = client.admin("listInstanceInfo", instance_group_name="few")["instance_info"]
        return [x["instance_id"] for x in found]

    for name in ("a", "b", "c"):
        client.register(name, instance_group="few")
    client.put([1], "a")
    client.match([1], "b")
    client.register("d", instance_group="few")
    assert names() == ["a", "b", "d"]
    with pytest.raises(ManagerError, match="INSTANCE_NOT_EXIST"):
        client.match([1], "c")
    client.put([1], "b")
    client.put([1], "d")
    for service, code in (("meta", "REACH_MAX_ENTITY_CAPACITY"), ("admin", "INTERNAL_ERROR")):
        with pytest.raises(ManagerError, match=f"{code}: max_instance_count: got 3 instances"):
            getattr(client, service)(
                "registerInstance", **instance("e") | {"instance_group": "few"}
            )
    client.register("a", instance_group="few")
    client.register("e")  # Another group's.
    manager.kill()
    manager.start()
    client = manager.http
    assert names() == ["a", "b", "d"]
