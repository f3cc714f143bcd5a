"""Random requests over both transports, beside a dictionary that does the same.

The manager is killed and started again in between: its store has to have all that it acknowledged.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from tests.kvcm.manager import Client, Forker, Manager, ManagerError, wait_until
from tests.sizes import sized

_ALL = [x * 0x1234567890ABCDEF // 2 for x in range(-6, 7)]
_KEYS = st.lists(st.sampled_from(_ALL), min_size=1, max_size=8)
_PARTS = {"": ("tp0", "tp1"), "one": ("tp1",)}
_BLOCK = 3

_forkers: list[Forker] = []


@pytest.fixture(scope="module", autouse=True)
def _forker(forker: Forker) -> Any:
    _forkers.append(forker)
    yield
    _forkers.clear()


def _hash_by_hand(tokens: list[int]) -> list[int]:
    """Keys of blocks of ``_BLOCK`` tokens: plain arithmetic of C++'s int64."""
    import numpy as np

    state, keys = np.int64(0), []
    with np.errstate(over="ignore"):
        for count, token in enumerate(tokens, start=1):
            mixed = np.uint64(np.int64(token).view(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
            mixed = mixed + (state << np.int64(12)).view(np.uint64)
            mixed = mixed + (state >> np.int64(32)).view(np.uint64)
            state = state ^ mixed.view(np.int64)
            if count % _BLOCK == 0:
                keys.append(int(state))
    return keys


class Managed(RuleBasedStateMachine):
    """A manager, and what it should say."""

    sessions = Bundle("sessions")

    @initialize(per_file=st.integers(0, 3), served=st.sets(st.sampled_from(_ALL)))
    def start(self, per_file: int, served: set[int]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.manager = Manager(
            _forkers[0], self.folder, store=str(self.folder / "db"), blocks_per_file=per_file
        )
        self.manager.http.register(
            "i",
            block_size=_BLOCK,
            location_spec_infos=[{"name": "tp0", "size": 10}, {"name": "tp1", "size": 30}],
            location_spec_groups=[{"name": "one", "spec_names": ["tp1"]}],
        )
        self.states: dict[int, str] = {}
        self.locations: dict[int, Any] = {}
        self.calls = 0
        if served:
            begun = self.client.write(list(served))
            self.client.finish(begun, [True] * len(served))
            self.states |= dict.fromkeys(served, "SERVING")
            self.locations |= zip(served, begun["locations"], strict=True)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.kill()
            shutil.rmtree(self.folder)

    @property
    def client(self) -> Client:
        self.calls += 1
        return self.manager.grpc if self.calls % 2 else self.manager.http

    def expect_gone(self, keys: list[int]) -> None:
        """Keys are deleted at once where there is no delay, but not in the same call."""
        if keys:
            wait_until(lambda: set(self.client.states(keys)) == {"NOT_FOUND"})
        for key in keys:
            self.states.pop(key, None)

    # -- Writes ---------------------------------------------------------------------------------

    @rule(target=sessions, keys=_KEYS, group=st.sampled_from(["", "one"]))
    def write(self, keys: list[int], group: str) -> Any:
        groups = [group] * len(keys) if group else []
        found = self.client.meta(
            "startWriteCache", instance_id="i", block_keys=keys, write_timeout_seconds=1000,
            location_spec_group_names=groups,
        )  # fmt: skip
        new = [x for x in dict.fromkeys(keys) if x not in self.states]
        exists = [key in self.states or key in keys[:at] for at, key in enumerate(keys)]
        mask = found["block_mask"]
        if "offset" in mask:
            values = [at < mask["offset"] for at in range(len(keys))]
        else:
            values = mask["bool_masks"]["values"]
            assert values != sorted(values, reverse=True)
        assert values == exists
        assert len(found["locations"]) == len(new)
        for key, location in zip(new, found["locations"], strict=True):
            assert location["type"] == "ST_NFS"
            assert [x["name"] for x in location["location_specs"]] == list(_PARTS[group])
            assert location["spec_size"] == len(_PARTS[group])
            self.states[key] = "WRITING"
            self.locations[key] = location
        uris = [x["uri"] for y in self.locations.values() for x in y["location_specs"]]
        assert len(uris) == len(set(uris))
        return found["write_session_id"], new

    @rule(session=consumes(sessions), data=st.data(), prefix=st.booleans())
    def finish(self, session: tuple[str, list[int]], data: st.DataObject, prefix: bool) -> None:
        name, keys = session
        count = len(keys)
        good = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        mask: dict[str, Any] = {"bool_masks": {"values": good}}
        if prefix:
            mask = {"offset": sum(good)}
            good = sorted(good, reverse=True)
        self.client.meta(
            "finishWriteCache", instance_id="i", write_session_id=name, success_blocks=mask
        )
        self.states |= {key: "SERVING" for key, x in zip(keys, good, strict=True) if x}
        self.expect_gone([key for key, x in zip(keys, good, strict=True) if not x])
        with pytest.raises(ManagerError, match="INTERNAL_ERROR"):
            self.client.meta(
                "finishWriteCache", instance_id="i", write_session_id=name, success_blocks=mask
            )

    @rule(keys=_KEYS)
    def write_and_let_expire(self, keys: list[int]) -> None:
        new = [x for x in keys if x not in self.states]
        self.client.write(keys, seconds=0)
        self.expect_gone(new)

    # -- Queries --------------------------------------------------------------------------------

    def _miss(self, names: tuple[str, ...] = ("tp0", "tp1")) -> Any:
        specs = [{"name": x, "uri": ""} for x in names]
        return {"type": "ST_UNSPECIFIED", "spec_size": 2, "location_specs": specs}

    def _location(self, key: int) -> Any:
        return self.locations[key] if self.states.get(key) == "SERVING" else self._miss()

    def query(self, keys: list[int], kind: str, **more: Any) -> Any:
        return self.client.meta(
            "getCacheLocation", instance_id="i", block_keys=keys, query_type=kind, **more
        )["locations"]

    @rule(keys=_KEYS, skipped=st.integers(-1, 9), bools=st.none() | st.lists(st.booleans()))
    def prefix_match(self, keys: list[int], skipped: int, bools: list[bool] | None) -> None:
        if bools is None:
            mask: dict[str, Any] = {"offset": skipped}
            asked = keys[max(0, skipped) :]
        else:
            mask = {"bool_masks": {"values": bools}}
            asked = [x for at, x in enumerate(keys) if not (at < len(bools) and bools[at])]
        hits = []
        for key in asked:
            if self.states.get(key) != "SERVING":
                break
            hits.append(self.locations[key])
        assert self.query(keys, "QT_PREFIX_MATCH", block_mask=mask) == hits

    @rule(tokens=st.lists(st.integers(-3, 1 << 40), max_size=10))
    def write_and_match_tokens(self, tokens: list[int]) -> None:
        if not tokens:
            return
        keys = _hash_by_hand(tokens)
        begun = self.client.meta(
            "startWriteCache", instance_id="i", token_ids=tokens, write_timeout_seconds=9
        )
        self.client.finish(begun, [True] * len(begun["locations"]))
        for at, key in enumerate(x for x in dict.fromkeys(keys) if x not in self.states):
            self.states[key], self.locations[key] = "SERVING", begun["locations"][at]
        found = self.client.meta(
            "getCacheLocation", instance_id="i", token_ids=tokens, query_type="QT_PREFIX_MATCH"
        )["locations"]
        assert found == [self.locations[key] for key in keys]

    @rule(keys=_KEYS, names=st.sampled_from([[], ["tp1"], ["tp1", "x"], ["x"]]))
    def batch_get(self, keys: list[int], names: list[str]) -> None:
        def kept(location: Any) -> Any:
            specs = [x for x in location["location_specs"] if not names or x["name"] in names]
            return location | {"location_specs": specs}

        found = self.query(
            keys, "QT_BATCH_GET", block_mask={"offset": 3}, location_spec_names=names
        )
        assert found == [kept(self._location(key)) for key in keys]

    @rule(keys=_KEYS, data=st.data())
    def last_window(self, keys: list[int], data: st.DataObject) -> None:
        size = data.draw(st.integers(1, len(keys)))
        served = [self.states.get(key) == "SERVING" for key in keys]
        begins = [at for at in range(len(keys) - size + 1) if all(served[at : at + size])]
        window = range(begins[-1], begins[-1] + size) if begins else range(0)
        expected = [
            self.locations[key] if at in window else self._miss() for at, key in enumerate(keys)
        ]
        assert self.query(keys, "QT_REVERSE_ROLL_SW_MATCH", sw_size=size) == expected

    @rule(keys=_KEYS)
    def states_of(self, keys: list[int]) -> None:
        assert self.client.states(keys) == [self.states.get(x, "NOT_FOUND") for x in keys]

    # -- The rest -------------------------------------------------------------------------------

    @rule(keys=_KEYS, service=st.sampled_from(["meta", "admin"]))
    def remove(self, keys: list[int], service: str) -> None:
        getattr(self.client, service)("removeCache", instance_id="i", block_keys=keys)
        self.expect_gone([x for x in keys if self.states.get(x) == "SERVING"])

    @rule()
    def trim(self) -> None:
        self.client.meta("trimCache", instance_id="i", strategy="TS_REMOVE_ALL_CACHE")
        self.expect_gone([x for x, state in self.states.items() if state == "SERVING"])

    @rule()
    def disable_and_enable(self) -> None:
        keys = list(self.states)
        self.client.admin("disableStorage", storage_unique_name="nfs_01")
        if keys:
            assert set(self.client.states(keys)) == {"NOT_FOUND"}
        self.client.admin("enableStorage", storage_unique_name="nfs_01")

    @rule(kill=st.booleans())
    def start_again(self, kill: bool) -> None:
        if kill:
            self.manager.kill()
        else:
            self.manager.stop()
        self.manager.start()

    @rule()
    def count(self) -> None:
        sizes = {1: 30, 2: 40}
        blocks = [self.locations[key]["spec_size"] for key in self.states]
        expected = sum(sizes[x] for x in blocks)
        assert self.client.metric("cache_manager_instance.key_count") == len(blocks)
        assert self.client.metric("cache_manager_instance.byte_size") == expected
        ratio = self.client.metric("cache_manager_group.usage_ratio", instance_group="default")
        assert ratio == pytest.approx(expected / (1 << 30))


TestManaged = pytest.mark.sweeps(Managed.TestCase)
Managed.TestCase.settings = settings(
    max_examples=sized(4, 60), stateful_step_count=sized(25, 40), deadline=None
)
