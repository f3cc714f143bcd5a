"""Settings: defaults, aliases, and a one-line error for whatever cannot be used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hisparse.algorithms import ALGORITHMS, build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.options import StorageOptions
from hisparse.units import format_bytes, parse_seconds, resolve_memory

GIB = 1 << 30
#: What takes the place of a key that is gone.
_LARGER = "a larger device_buffer_size takes its place"


def refused(settings: dict[str, Any], *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HiSparseConfig.from_dict(settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_defaults() -> None:
    config = HiSparseConfig()
    assert (config.algorithm, config.budget, config.min_row_tokens) == ("sketch", 2048, 4096)
    assert (config.page_size, config.num_sink_pages, config.num_recent_pages) == (16, 1, 2)
    assert config.host_memory == 0.7
    assert config.checked is False
    assert HiSparseConfig.from_dict({}) == HiSparseConfig.parse(None) == config
    assert HiSparseConfig.parse(" ") == config


def test_frozen() -> None:
    config = HiSparseConfig(algorithm_config={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.algorithm_config["beta"] = 1  # type: ignore[index]


def test_buffer_follows_budget() -> None:
    assert HiSparseConfig(budget=512).min_row_tokens == 1024
    assert dataclasses.replace(HiSparseConfig(), budget=8192).min_row_tokens == 16384
    assert HiSparseConfig(budget=512).effective()["device_buffer_size"] == 1024
    assert HiSparseConfig.from_dict({"budget": 96, "device_buffer_size": None}) == HiSparseConfig(
        budget=96
    )


def test_smallest_budget() -> None:
    assert HiSparseConfig(budget=80).budget == 80
    refused({"budget": 64}, "got 64", "at least 80", "num_recent_pages (2)")


def test_alias() -> None:
    assert HiSparseConfig.from_dict({"top_k": 512}).budget == 512
    refused({"top_k": 512, "budget": 512}, "both budget and its alias top_k")
    refused({"budget": 512, "top_k": 1024}, "both budget and its alias top_k")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"budgte": 1}, ["'budgte'", "did you mean 'budget'", "choices:"], id="close"),
        pytest.param({"topk": 1}, ["did you mean 'top_k'"], id="close-alias"),
        pytest.param({"host_to_device_ratio": 4}, ["host_memory"], id="upstream-ratio"),
        pytest.param({"min_sparse_prompt_len": 4}, ["min_sparse_context"], id="upstream-len"),
        pytest.param({"budget": "2k"}, ["budget: got '2k' (str), expected int"], id="str"),
        pytest.param({"budget": True}, ["got True (bool), expected int"], id="bool-as-int"),
        pytest.param({"budget": 2048.0}, ["got 2048.0 (float), expected int"], id="float"),
        pytest.param({"budget": None}, ["got None (NoneType), expected int"], id="null"),
        pytest.param({"checked": 1}, ["got 1 (int), expected true or false"], id="int-as-bool"),
        pytest.param({"algorithm_config": []}, ["(list), expected an object"], id="mapping"),
        pytest.param({"dense_layers": [0, "1"]}, ["expected a list of int or null"], id="list"),
        pytest.param({"dense_layers": [0, 0]}, ["got [0, 0]", "different"], id="twice"),
        pytest.param({"dense_layers": [-1]}, ["got [-1]", "from 0"], id="negative-layer"),
        pytest.param({"selection_scope": "head"}, ["'head'", '"kv_head"'], id="scope"),
        pytest.param({"host_layout": 3}, ["got 3 (int)", '"page_first"'], id="layout"),
        pytest.param({"page_size": 0}, ["page_size: got 0, expected at least 1"], id="page-0"),
        pytest.param({"budget": -16}, ["budget: got -16, expected at least 1"], id="negative"),
        pytest.param({"budget": 100}, ["got 100", "page_size (16)", "96 or 112"], id="multiple"),
        pytest.param({"device_buffer_size": 4100}, ["device_buffer_size: got 4100"], id="dbs"),
        pytest.param({"max_row_capacity": 8200}, ["max_row_capacity: got 8200"], id="mrc"),
        pytest.param({"device_buffer_size": 1024}, ["got 1024", "budget (2048)"], id="dbs<budget"),
        pytest.param({"max_row_capacity": 2048}, ["device_buffer_size (4096)"], id="mrc<dbs"),
        pytest.param({"budget": 7}, ["budget: got 7, expected at least 80: "], id="multiple<least"),
        pytest.param({"budget": 80, "num_sink_pages": 2}, ["at least 96"], id="no-ranked-page"),
        pytest.param({"reuse_layers": 0}, ["got 0", "at least 1"], id="reuse"),
        pytest.param(
            {"tail_estimate": True, "page_size": 1},
            ["tail_estimate", "page_size 1", "above 1"],
            id="tail-of-tokens",
        ),
        pytest.param({"tail_estimate": 1}, ["got 1 (int)", "true, false or an"], id="tail"),
        pytest.param(
            {"trace": {"max_byte": 1}},
            ["trace option", "'max_bytes'"],
            id="option",
        ),
        pytest.param({"prefetch": True}, ["prefetch: not a key", _LARGER], id="prefetch"),
        pytest.param({"speculate": "step"}, ["speculate: not a key", _LARGER], id="speculate"),
        pytest.param({"speculation_threshold": 0.8}, ["threshold:", _LARGER], id="threshold"),
        pytest.param({"overlap": True}, ["overlap: not a key", "in order"], id="overlap"),
        pytest.param({"checked": None}, ["got None", "true or false"], id="no-bool"),
        pytest.param({"checked": "yes"}, ["got 'yes' (str), expected true or false"], id="word"),
        pytest.param({"numa_node": 0}, ["numa_node", "numactl"], id="numa"),
        pytest.param({"layer_metrics": True}, ["layer_metrics", "trace"], id="layers"),
        pytest.param({"extensions": {}}, ["unknown config key 'extensions'"], id="no-such-key"),
        pytest.param({"host_memory": "64 gallons"}, ["'64 gallons'", "'64GiB'", "TiB"], id="unit"),
        pytest.param({"host_memory": "64"}, ["'64'", "units:"], id="no-unit"),
        pytest.param({"host_memory": 1.0}, ["got 1.0", "(0, 1)"], id="whole-fraction"),
        pytest.param({"host_memory": float("nan")}, ["(0, 1)"], id="nan"),
        pytest.param({"host_memory": 0}, ["got 0 bytes"], id="zero"),
        pytest.param({"host_memory": None}, ["expected int or float or str"], id="null-memory"),
        pytest.param({"device_memory": -1}, ["device_memory: got -1 bytes"], id="device"),
        pytest.param({"staging_bytes": 0}, ["staging_bytes: got 0"], id="staging"),
    ],
)
def test_refused(settings: dict[str, Any], words: list[str]) -> None:
    refused(settings, *words)


def test_parse_text_and_file(tmp_path: Path) -> None:
    expected = HiSparseConfig(budget=512, dense_layers=(0, 1))
    text = json.dumps({"budget": 512, "dense_layers": [0, 1]})
    assert HiSparseConfig.parse(text) == expected
    file = tmp_path / "hisparse.json"
    file.write_text(text)
    assert HiSparseConfig.parse(f"@{file}") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"budget": 2048,\n}', ["not JSON at line 2 column 1"]),
        ("budget=2", ["not JSON at line 1 column 1", "@file.json"]),
        ("[1]", ["got [1] (list)", "expected an object"]),
        ("@/nowhere/x.json", ["'/nowhere/x.json'", "No such file"]),
        ('{"budget": 512, "budget": 512}', ["'budget'", "more than once"]),
        ("[" * 50_000, ["nested too deep"]),
        ('{"algorithm_config":' * 50_000, ["nested too deep"]),
        ('{"budget": ' + "9" * 5_000 + "}", ["expected one that fits into 64 bits"]),
        ('{"budget": ' + "9" * 401 + "}", ["expected one that fits into 64 bits"]),
        ('{"host_memory": 1e999}', ["'1e999'", "expected a finite one"]),
        ('{"host_memory": NaN}', ["--hisparse-config: got the number 'NaN'", "a finite one"]),
        ('{"host_memory": "' + "9" * 309 + 'GB"}', ["host_memory: got '999", "such as '64GiB'"]),
        ('{"host_memory": "99999999999GB"}', ["below 8 EiB"]),
        ('{"host_memory": "\u0663GiB"}', ["such as '64GiB'"]),
        ('\u2028{"budget": 512}', ["not JSON at line 1 column 1"]),
        ("@~no-such-user/x.json", ["'~no-such-user/x.json'", "home directory"]),
        ("@a\0b", ["'a\\x00b'", "null"]),
        ("@" + "x" * 5_000, ["cannot read", "File name too long"]),
        ('{"' + "x" * 5_000 + '": 1}', ["unknown config key 'xxx"]),
        ('{"algorithm": "' + "x" * 5_000 + '"}', ["unknown algorithm 'xxx"]),
        ('{"algorithm_config": {"' + "x" * 5_000 + '": 1}}', ["unknown sketch option 'xxx"]),
        ('{"host_memory": "' + "x" * 5_000 + '"}', ["host_memory: got 'xxx"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_parse_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_algorithm(HiSparseConfig.parse(text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1_500
    for word in words:
        assert word in str(caught.value)


def test_effective_holds_every_key_and_reads_back() -> None:
    settings = {"budget": 512, "dense_layers": [0], "host_memory": "64GiB", "tail_estimate": True}
    config = HiSparseConfig.from_dict(settings)
    values = json.loads(json.dumps(config.effective()))
    assert list(values) == HiSparseConfig.keys()
    assert values["tail_estimate"] == {} and values["trace"] is False
    assert HiSparseConfig.from_dict(values).effective() == config.effective()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 50 * GIB),
        (7, 7),
        ("64GiB", 64 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2MB", 2_000_000),
        ("3kib", 3072),
        ("100GiB", 100 * GIB),
        ("10B", 10),
    ],
)
def test_resolve_memory(value: float | str, expected: int) -> None:
    assert resolve_memory(value, 100 * GIB, "host_memory") == expected


def test_more_than_the_machine_has() -> None:
    with pytest.raises(ConfigError, match=r"host_memory: got '1TiB' = 1 TiB, but 100 GiB is free"):
        resolve_memory("1TiB", 100 * GIB, "host_memory")


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * GIB, 1 << 51)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3 GiB",
        "2048 TiB",
    ]


@pytest.fixture
def options_algorithm() -> Iterator[None]:
    """A registered class with options; the registry does not care what it can do."""

    @dataclass(frozen=True, kw_only=True)
    class WithOptions:
        beta: float
        codes: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            if self.beta <= 0:
                raise ValueError(f"beta: got {self.beta}, expected more than 0")

    globals()["WithOptions"] = WithOptions
    ALGORITHMS._entries["with_options"] = WithOptions  # type: ignore[assignment]
    yield
    del ALGORITHMS._entries["with_options"]


def test_build_algorithm() -> None:
    assert type(build_algorithm(HiSparseConfig())).__name__ == "Sketch"


def test_build_algorithm_options(options_algorithm: None) -> None:
    config = HiSparseConfig(algorithm="with_options", algorithm_config={"beta": 3, "codes": [1]})
    algorithm: Any = build_algorithm(config)
    assert (algorithm.beta, algorithm.codes) == (3, (1,))


@pytest.mark.parametrize(
    ("algorithm", "options", "words"),
    [
        ("qest", {}, ["unknown algorithm 'qest'", "did you mean 'quest'"]),
        ("quest", {"beta": 1}, ["unknown quest option 'beta'", "choices: ranges, summary_dtype"]),
        ("with_options", {"betta": 1}, ["'betta'", "did you mean 'beta'", "codes"]),
        ("with_options", {"beta": "1"}, ["algorithm_config.beta: got '1' (str), expected float"]),
        ("with_options", {"beta": True}, ["got True (bool)"]),
        ("with_options", {}, ["algorithm_config.beta: got nothing", "expects float"]),
        ("with_options", {"beta": -1.0}, ["beta: got -1.0, expected more than 0"]),
    ],
)
def test_build_algorithm_refused(
    options_algorithm: None, algorithm: str, options: dict[str, Any], words: list[str]
) -> None:
    config = HiSparseConfig(algorithm=algorithm, algorithm_config=options)
    with pytest.raises(ConfigError) as caught:
        build_algorithm(config)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_storage_options() -> None:
    config = HiSparseConfig.from_dict({"storage": {"path": "/store", "size": "500GiB"}})
    assert config.storage == StorageOptions(path="/store", size="500GiB")
    again = HiSparseConfig.from_dict(json.loads(json.dumps(config.effective())))
    assert again.storage == config.storage
    assert HiSparseConfig.from_dict({"storage": None}).storage is None


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        (True, ["storage: got True", "expected null or an object"]),
        ({}, ["storage: path is not set"]),
        ({"pth": "/x"}, ["unknown storage option 'pth'", "'path'"]),
        ({"path": 3}, ["storage.path: got 3"]),
        ({"path": "/x", "size": "much"}, ["storage: size: got 'much'", "such as '64GiB'"]),
        ({"path": "/x", "timeout_s": 0}, ["timeout_s: got 0", "above 0"]),
        ({"path": "/x", "threads": 0}, ["threads: got 0", "1 to 64"]),
        ({"path": "/x", "ttl_s": 0}, ["ttl_s: got 0, expected seconds above 0"]),
        ({"path": "a\0b"}, ["path: got 'a\\x00b', expected the name of a folder"]),
        ({"backend": "nixl", "path": "lru"}, ["path is set for backend 'nixl'"]),
        ({"path": "/x", "policy": "lru"}, ["unknown storage option 'policy'", "ttl_s"]),
        ({"path": "/x", "options": {"a": 1}}, ['options are set for backend "file"']),
        ({"backend": "mooncake", "path": "/x"}, ["path is set for backend 'mooncake'"]),
        ({"manager": "a:1", "size": "1GB", "path": "/x"}, ["path and manager are set"]),
        ({"manager": "a:1", "ttl_s": 60}, ["ttl_s and manager are set; expected one of the two"]),
        ({"manager": "a:1", "size": 0.5}, ["size: got 0.5, expected bytes beside manager"]),
    ],
)
def test_storage_refused(storage: object, words: list[str]) -> None:
    refused({"storage": storage}, *words)


def test_times_have_a_unit() -> None:
    assert [parse_seconds("x", text) for text in ("30ms", "1.5 s", "500us")] == [0.03, 1.5, 0.0005]
    with pytest.raises(ConfigError, match="x: got '0ms', expected a time"):
        parse_seconds("x", "0ms")
