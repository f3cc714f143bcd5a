"""``hisparse kvcm replay``: formats, Tair's files and configuration, and what it recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import ConfigError
from hisparse.kvcm.optimizer.traces import Event, read_trace
from hisparse.trace.prefix import PrefixRequest, PrefixTrace, write_prefix
from scripts.make_plots import main
from tests.command import Command


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def event(kind: str, time_us: int, **rest: object) -> dict[str, object]:
    return {"type": kind, "source": "i1", "trigger_time_us": time_us, "id": "x"} | rest


def publisher_log(path: Path) -> Path:
    query = {"query_type": "prefix_match", "block_mask": 1, "sw_size": -1, "tokens": []}
    return write(
        path,
        event("GetCacheLocation", 10, keys=[7, -8, 9], **query),
        event("StartWriteCache", 20, write_session_id="a", keys=[7, -8, 9]),
        event("StartWriteCache", 30, write_session_id="b", keys=[7, 5]),
        event("FinishWriteCache", 40, write_session_id="a", success_block=0),
        event("FinishWriteCache", 41, write_session_id="lost", success_block=0),
        event("GetCacheLocation", 45, keys=[7], query_type="batch_get", block_mask=[]),
        event("Trim", 46),
        event("GetCacheLocation", 50, keys=[7, -8, 9, 4], **query),
        event("GetCacheLocation", 60, keys=[7, 5], **query | {"block_mask": [False, True, True]}),
        event("GetCacheLocation", 200_000, keys=[7, 5], **query | {"block_mask": 9}),
    )


def test_events_of_a_manager_are_reads_and_writes_at_their_end(tmp_path: Path) -> None:
    trace = read_trace(publisher_log(tmp_path / "a.log"))
    assert trace.format == "publisher_log"
    assert trace.instances == {"i1": 0}
    assert trace.events == [
        Event(10, 0, [0, 1, 2], 3, False, 1),
        Event(40, 0, [0, 1, 2], None),
        Event(50, 0, [0, 1, 2, 3], 4, False, 1),
        Event(60, 0, [0, 4], 2, False, [False, True]),
        Event(100_030, 0, [0, 4], None),
        Event(200_000, 0, [0, 4], 2, False, 2),
    ]
    assert trace.skipped == {
        "ends of writes without a start": 1, "queries 'batch_get'": 1, "events 'Trim'": 1,
    }  # fmt: skip


def test_the_keys_of_qwen_stand_for_a_block_alone(tmp_path: Path) -> None:
    line = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1, "output_length": 9}
    path = write(
        tmp_path / "a.jsonl",
        line | {"timestamp": 2.5, "input_length": 20, "hash_ids": [2, 1]},
        line | {"timestamp": 0.25, "input_length": 40, "hash_ids": [1, 1, 2]},
    )
    trace = read_trace(path)
    assert (trace.format, trace.block_size) == ("qwen_bailian", 16)
    assert trace.events == [
        Event(250_000, 0, [0, 1, 2], 3, tokens=40),
        Event(2_500_000, 0, [3, 4], 2, tokens=20),
    ]


def test_the_schema_of_the_optimizer_has_requests_reads_and_writes(tmp_path: Path) -> None:
    line = {"instance_id": "b", "trace_id": "t", "tokens": [], "keys": [1, 2]}
    query = {"query_type": "prefix_match", "block_mask": [], "sw_size": 0}
    request = {"input_len": 30, "output_len": 9, "total_keys": [1, 2, 3]}
    path = write(
        tmp_path / "a.jsonl",
        line | {"timestamp_us": 5} | query | request,
        line | {"timestamp_us": 6} | query,
        line | {"timestamp_us": 7},
        line | {"timestamp_us": 8} | query | request | {"query_type": "batch_get"},
    )
    trace = read_trace(path)
    assert trace.events == [
        Event(5, 0, [0, 1, 2], 2, tokens=30),
        Event(6, 0, [0, 1], 2, False, []),
        Event(7, 0, [0, 1], None),
    ]
    assert trace.skipped == {"queries 'batch_get'": 1}


def test_what_hisparse_recorded_is_replayed(tmp_path: Path, command: Command) -> None:
    requests = [
        PrefixRequest(0, 25, 1, (1, 2), None),
        PrefixRequest(1, 27, 1, (1, 2), 20),
        PrefixRequest(2000, 13, 1, (1,), 10),
    ]
    made = PrefixTrace(source="recorded", note="three", block_size=10, requests=requests)
    path = tmp_path / "a.jsonl"
    write_prefix(path, made)
    (about,) = command.json("kvcm", "replay", str(path), "--policy", "prefix_lru")["traces"]
    assert (about["reads"], about["blocks"], about["seconds"]) == (3, 2, 2.0)
    assert about["found_by_server"] == 30 / 40
    row = about["groups"][0]["points"][-1]
    assert row["capacity"] == 2
    assert row["hit_rate"] == 3 / 5
    assert row["token_hit_rate"] == 30 / 65
    said = " ".join(command("kvcm", "replay", str(path), "--ttl", "1,none").split())
    assert "mooncake: three. 3 reads in 2 s, 2 different blocks of 10 tokens." in said
    assert "The server found 75.0% of the prompt tokens." in said


def mooncake(path: Path) -> Path:
    lines = [(0, [1, 2]), (1, [1, 2, 3]), (2, [4]), (3, [1, 2, 3])]
    given = {"output_length": 1}
    return write(
        path,
        *(given | {"timestamp": t, "input_length": 100 * len(x), "hash_ids": x} for t, x in lines),
    )


def test_the_time_to_first_token_chooses_a_cache(tmp_path: Path, command: Command) -> None:
    """All rows by hand: 9 blocks of 100 tokens are asked for in 4 requests."""
    words = ["kvcm", "replay", str(mooncake(tmp_path / "a.jsonl")), "--policy", "prefix_lru"]
    words += ["--capacity", "2,3,4,9", "--block-size", "100"]
    group = command.json(*words, "--prefill-rate", "100", "--load-rate", "1000")["traces"][0][
        "groups"
    ][0]
    # Hits: 2 of 9 and then none, since 4 displaces 2; 2 and 2; 2 and 3.
    hits = [2 + 1, 2 + 2, 2 + 3, 2 + 3]
    assert [row["hit_rate"] for row in group["points"]] == pytest.approx([x / 9 for x in hits])
    costs = [(9 - x + x / 10) / 4 for x in hits]
    assert [row["cost"] for row in group["points"]] == pytest.approx(costs)
    assert [row["front"] for row in group["points"]] == [True, True, True, False]
    assert {row["cost_without_a_cache"] for row in group["points"]} == {9 / 4}
    assert group["unit"] == "s to the first token"
    assert group["recommendation"] == (
        "4 blocks with prefix_lru save 50% of the mean cost of a request: "
        "1.125 s to the first token instead of 2.25."
    )
    (about,) = command.json(*words)["traces"]
    assert about["groups"][0]["points"][0]["cost"] == 600 / 4
    assert about["groups"][0]["recommendation"].endswith("100 tokens computed instead of 225.")


def test_the_smallest_cache_that_saves_nearly_as_much_is_recommended(
    tmp_path: Path, command: Command
) -> None:
    lines = [[1]] * 99 + [[2]] + [[1]] * 5 + [[2]]
    given = {"output_length": 1, "input_length": 512}
    path = write(
        tmp_path / "a", *(given | {"timestamp": i, "hash_ids": x} for i, x in enumerate(lines))
    )
    (about,) = command.json("kvcm", "replay", str(path), "--capacity", "1,2")["traces"]
    assert about["groups"][0]["recommendation"].startswith(
        "1 blocks with lru save 96% of the mean cost of a request, 98% of what 2 save: "
    )
    path = write(tmp_path / "b", given | {"timestamp": 0, "hash_ids": [1]})
    assert "finds a block that the engine does not have itself." in " ".join(
        command("kvcm", "replay", str(path)).split()
    )


def test_a_result_can_be_drawn(tmp_path: Path, command: Command) -> None:
    words = ("kvcm", "replay", str(mooncake(tmp_path / "a.jsonl")), "--ttl", "1,none", "--json")
    (tmp_path / "result.json").write_text(command(*words))
    assert main(["capacity", str(tmp_path / "result.json"), str(tmp_path / "out.svg")]) == 0
    drawn = (tmp_path / "out.svg").read_text()
    assert all(word in drawn for word in (">lru<", ">prefix_lru, 1 s<", "hits, percent", "a.jsonl"))


def configuration(path: Path, **changes: Any) -> Path:
    def instance(name: str, policy: str) -> dict[str, Any]:
        params = {"sample_rate": 0.5}
        given = {"instance_id": name, "block_size": 16, "eviction_policy_type": policy}
        return given | {"eviction_policy_params": params}

    group = {"group_name": "g", "quota_capacity": 8, "used_percentage": 0.5, "storages": []}
    group |= {"instances": [instance("i1", "leaf_aware_lru"), instance("i2", "lru")]}
    params = {"eviction_mode": 3, "eviction_batch_size_per_instance": 2}
    given = {"trace_type": "publisher_log", "eviction_params": params, "instance_groups": [group]}
    path.write_text(json.dumps(given | changes))
    return path


def test_the_files_and_the_configuration_are_those_of_tair(
    tmp_path: Path, command: Command
) -> None:
    trace, config = publisher_log(tmp_path / "a.log"), configuration(tmp_path / "c.json")
    words = ["kvcm", "replay", str(trace), "--config", str(config)]
    (about,) = command.json(*words, "--out", str(tmp_path / "out"))["traces"]
    (row,) = about["groups"][0]["points"]
    assert (row["policy"], row["capacity"]) == ("leaf_aware_lru+lru", 4)
    assert row["instances"] == {"i1": row["hit_rate"]} == {"i1": 6 / 11}
    assert (tmp_path / "out" / "i1_hit_rates.csv").read_text() == (
        "TimestampUs,CachedBlocksCurrentInstance,CachedBlocksPerInstance,CachedBlocksAllInstance,"
        "InternalReadBlocks,ExternalReadBlocks,TotalReadBlocks,InternalHitBlocks,InternalHitRate,"
        "ExternalHitBlocks,ExternalHitRate,HitRate,AccInternalHitRate,AccExternalHitRate,"
        "AccHitRate\n"
        "10, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0\n"
        "50, 3, 3, 3, 1, 3, 4, 1, 0.25, 2, 0.5, 0.75, 0.142857, 0.285714, 0.428571\n"
        "60, 3, 3, 3, 1, 1, 2, 0, 0, 1, 0.5, 0.5, 0.111111, 0.333333, 0.444444\n"
        "200000, 4, 4, 4, 2, 0, 2, 2, 1, 0, 0, 1, 0.272727, 0.272727, 0.545455\n"
    )
    with trace.open("a") as file:
        file.write(json.dumps(event("GetCacheLocation", 9, keys=[1]) | {"source": "i3"}) + "\n")
    (about,) = command.json(*words)["traces"]
    assert about["skipped"]["events of instance 'i3', which --config lacks"] == 1
    command(*words, "--capacity", "1,2", "--policy", "lru", "--out", str(tmp_path / "two"))
    assert {x.name for x in (tmp_path / "two").iterdir()} == {"lru-1", "lru-2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eviction_params": {"eviction_mode": 4}}, "expected an eviction_mode of 1, 2 or 3"),
        ({"instance_groups": []}, "got instances [], expected each once"),
        ({"instance_groups": [{"group_name": "g"}]}, "got no instances, quota_capacity"),
        ({"instance_groups": 3}, "expected a list"),
    ],
)
def test_wrong_configurations_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, command: Command
) -> None:
    trace, config = publisher_log(tmp_path / "a.log"), tmp_path / "c.json"
    words = ("kvcm", "replay", str(trace), "--config", str(configuration(config, **changes)))
    assert message in command.refused(*words)


@pytest.mark.parametrize(("old", "new", "message"), [
    ('"i1"', '"b"', "got instances ['b', 'i2'], expected one of the trace, ['i1']"),
    ('"lru"', '"lur"', "unknown policy 'lur'; did you mean 'lru'"),
    ("0.5, \"storages\"", "1.5, \"storages\"", "used_percentage: got 8 and 1.5, expected"),
    ('"sample_rate": 0.5', '"sample_rate": "x"', "params: got {'sample_rate': 'x'}"),
    ('"sample_rate": 0.5', '"sample_rate": 2', "sample_rate: got 2, expected 0.000001 to 1"),
])  # fmt: skip
def test_wrong_values_of_a_configuration_are_refused(
    old: str, new: str, message: str, tmp_path: Path, command: Command
) -> None:
    trace, config = publisher_log(tmp_path / "a.log"), configuration(tmp_path / "c.json")
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    assert message in command.refused("kvcm", "replay", str(trace), "--config", str(config))


START = event("StartWriteCache", 1, write_session_id="a", keys=[1])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "got no request, expected lines such as"),
        ([START], "got no read of a block, expected at least one"),
        ([START, START | {"keys": [1.5]}], "line 2: keys: got [1.5] (list), expected a list of"),
        ([START | {"keys": [1 << 70]}], "line 1: keys: got"),
        ([START | {"trigger_time_us": -1}, event("FinishWriteCache", -1, write_session_id="a")],
         "line 2: got time -1 us, expected 0 to 2**53"),
        ([START, event("FinishWriteCache", 2, write_session_id="a") | {"source": "i2"}],
         "line 2: source: got 'i2', expected 'i1', which started the write 'a'"),
        ([START, event("GetCacheLocation", 2, keys=[1], block_mask=-1)],
         "line 2: block_mask: got -1, expected a number from 0 on"),
        ([START, event("GetCacheLocation", 2, keys=[1], block_mask=[1])],
         "line 2: block_mask: got [1] (list), expected int or a list of true or false"),
        ([START, {"trigger_time_us": 3}], "line 2: type: got None (NoneType), expected str"),
        ([{"timestamp_us": 3, "instance_id": 4}], "line 1: instance_id: got 4 (int), expected str"),
        ([{"chat_id": 3}], "line 1: got no hash_ids, input_length, output_length, timestamp"),
    ],
)  # fmt: skip
def test_wrong_lines_are_refused(lines: list[object], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert message in str(raised.value)
    assert str(raised.value).startswith(repr(str(path)))
    assert "\n" not in str(raised.value)


def test_wrong_flags_are_refused(tmp_path: Path, command: Command) -> None:
    path = str(mooncake(tmp_path / "a.jsonl"))
    said = command.refused("kvcm", "replay", path, "--policy", "lfu")
    assert "--policy: unknown policy 'lfu'" in said
    said = command.refused("kvcm", "replay", path, path, "--out", str(tmp_path))
    assert "--out: got 2 traces, expected one" in said
    said = command.refused("kvcm", "replay", path, "--load-rate", "300")
    assert "--load-rate: got it alone, expected --prefill-rate too" in said
    for flag, value in (("--prefill-rate", "0"), ("--ttl", "-1"), ("--capacity", "0")):
        assert flag in command.refused("kvcm", "replay", path, flag, value)
    (tmp_path / "not-json").write_text("{")
    said = command.refused("kvcm", "replay", str(tmp_path / "not-json"))
    assert "line 1: not JSON at line 1 column 2" in said
    assert "cannot read" in command.refused("kvcm", "replay", str(tmp_path / "absent"))
