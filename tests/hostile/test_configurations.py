"""Configurations at random: each is accepted, or refused with one line; none that the docs rule out
is accepted. ``make test-all PART=hostile`` tries 100,000 of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparse.config import HiSparseConfig
from hisparse.engine.build import resolve
from hisparse.errors import HiSparseError
from hisparse.types import KVSpec
from tests.hostile.mutations import hostile_value, mutated_object, mutated_text
from tests.hostile.validator import is_documented
from tests.shapes import TWO_LAYERS, machine
from tests.sizes import PART

COUNT = 100_000 if PART == "hostile" else 1_000

#: Values that go together, by key.
SENSIBLE: dict[str, tuple[Any, ...]] = {
    "algorithm": (
        *("sketch", "quest", "snapkv", "streaming", "oracle", "dipr"),
        *("dsa", "infllm", "msa", "qsa"),
    ),
    "algorithm_config": (
        {}, {"detail": 0.5}, {"economy": True}, {"ranges": 2}, {"summary_dtype": "float32"},
        {"window": 8}, {"beta": 3.0},
        {"alpha": 0.01}, {"index_dtype": "float32"},
    ),
    "budget": (96, 128, 512, 2048, 4096),
    "top_k": (128, 2048),
    "device_buffer_size": (None, 2048, 4096, 8192),
    "max_row_capacity": (None, 8192, 65536),
    "page_size": (1, 8, 16, 32, 64),
    "num_sink_pages": (0, 1, 2),
    "num_recent_pages": (0, 1, 2, 4),
    "selection_scope": (None, "layer", "kv_head", "query_head"),
    "min_sparse_context": (0, 1000, 4096),
    "dense_layers": (None, [], [0], [0, 3], [5]),
    "reuse_layers": (1, 2),
    "miss": ("transfer", "host", "auto"),
    "host_memory": (0.5, "64GiB", 1 << 34, "1.5 TB"),
    "device_memory": (None, 0.5, "8GiB"),
    "host_layout": (None, "layer_first", "page_first", "page_head"),
    "staging_bytes": (None, 1 << 24),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "adapter": (None, "torch"),
    "checked": (True, False),
    "cuda_graph": ("auto", True, False),
    "tail_estimate": (True, False, {}),
    "storage": (
        None, {"path": "/x"}, {"path": "/x", "size": "1GiB"}, {"path": "x", "size": 0.5},
        {"backend": "file", "path": "~/x", "threads": 64, "timeout_s": 0.5},
        {"path": "/x", "ttl_s": 3600}, {"backend": "mooncake", "ttl_s": 60},
        {"backend": "mooncake", "options": {"protocol": "tcp"}}, {"backend": "mooncake"},
        {"backend": "nixl", "path": "lru"}, {"backend": "hf3fs", "size": 4096}, {"size": "1GiB"},
        {"manager": "127.0.0.1:6381"}, {"manager": "tls://a:1, b:2", "manager_group": "g"},
        {"manager": "a"}, {"manager": "a:1", "path": "/x"}, {"manager": "a:1", "backend": "nixl"},
        {"path": "/x", "swap_min_tokens": 100}, {"path": "/x", "swap_min_tokens": None},
    ),
}  # fmt: skip

SPEC = replace(TWO_LAYERS, num_layers=4)
MACHINE = machine(context_length=32768, max_requests=64)


def configuration(rng: random.Random) -> str:
    """A text: sensible settings, most of them with something wrong."""
    keys = rng.sample(list(SENSIBLE), rng.choice((0, 1, 1, 2, 3, 5)))
    settings: dict[str, Any] = {key: rng.choice(SENSIBLE[key]) for key in keys}
    way = rng.randrange(6)
    if way == 1:
        settings[rng.choice(list(SENSIBLE))] = hostile_value(rng)
    elif way == 2:
        settings = mutated_object(rng, settings)
    elif way == 3:
        settings[rng.choice(("", "budgte", "x" * 3000, "\0", "numa_node", "extensions"))] = (
            hostile_value(rng)
        )
    text = json.dumps(settings)
    return mutated_text(rng, text) if way == 4 else text


def outcome(text: str) -> str:
    """ "accepted", or the line of the refusal; anything else that is raised is a fault."""
    try:
        config = HiSparseConfig.parse(text)
        stored = {"page_size": config.page_size, "kv_cache_dtype": config.kv_cache_dtype}
        spec = KVSpec(**{**vars(SPEC), **stored})
        resolve(config, spec, 0.125, MACHINE)
    except HiSparseError as error:
        return str(error)
    return "accepted"


def check(text: str) -> str:
    """The outcome of a text, which must be one line, and no acceptance that the docs rule out."""
    line = outcome(text)
    assert "\n" not in line and 0 < len(line.encode()) < 1_500, line
    assert line != "accepted" or is_documented(text), "what the docs rule out is accepted"
    return line


def test_configurations_at_random_are_accepted_or_refused_with_one_line() -> None:
    counted: Counter[str] = Counter()
    for seed in range(COUNT):
        text = configuration(random.Random(seed))
        try:
            line = check(text)
        except Exception as error:
            pytest.fail(f"configuration({seed}) {text[:300]!r} raises {error!r}")
        allowed = is_documented(text)
        counted["accepted" if line == "accepted" else "refused" if allowed else "ruled out"] += 1
    print(f"{COUNT} configurations: {dict(counted)}")
    # Both are common, or this test says little.
    assert min(counted["accepted"], counted["ruled out"]) > COUNT / 10


def test_files_of_settings_at_random(tmp_path: Path) -> None:
    """What ``@`` names: a file of any bytes, a folder, a name that cannot be."""
    paths = [
        str(tmp_path),
        "/dev/null",
        "~nobody-here/x",
        "a\0b",
        "x" * 5000,
        "\ud800",
        "",
        "@",
        " ",
    ]
    for path in paths:
        assert outcome(f"@{path}") != ""
    file = tmp_path / "settings.json"
    for seed in range(COUNT // 100):
        rng = random.Random(seed)
        content = configuration(rng).encode("utf-8", "surrogatepass")
        file.write_bytes(content if rng.random() < 0.5 else rng.randbytes(rng.randrange(200)))
        assert "\n" not in outcome(f"@{file}"), seed
