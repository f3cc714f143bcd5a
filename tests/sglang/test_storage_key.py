"""Which servers exchange pages, and the file store as a backend of SGLang's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.utils import get_storage_hash_str
from test_page_format import make_pool

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.cache.page_format import PageFormat
from hisparse.config import HiSparseConfig
from hisparse.engine.fingerprint import fingerprint
from hisparse.sglang.storage.file_storage import FileStorage
from hisparse.sglang.storage.key import make_namespace, model_fingerprint
from hisparse.sglang.storage.ranks import LinkerRanks
from hisparse.storage import Namespace, page_keys
from tests.server.tiny_models import tiny_model
from tests.sizes import SWEEPS

pytestmark = pytest.mark.filterwarnings("ignore")

ALONE = LinkerRanks(rank=0, size=1, shared=False, group=None)


def namespace(
    algorithm: BaseSparseAlgorithm | None = None,
    seed: int = 0,
    ranks: LinkerRanks = ALONE,
    page_tokens: int = 8,
    layout: Any = "page_head",
    **config: Any,
) -> Namespace:
    torch.manual_seed(seed)
    session = SimpleNamespace(
        model=torch.nn.Linear(64, 300),
        model_settings={"layers": 2},
        algorithm=algorithm or Sketch(),
        config=HiSparseConfig(**config),
    )
    session.fingerprint = model_fingerprint(session)
    form = PageFormat(make_pool(layout), page_tokens, {})
    return make_namespace(session, form, ranks)


def test_budget_algorithm_and_layout_are_no_part_of_the_key() -> None:
    other = namespace(Quest(), layout="layer_first", budget=128, num_sink_pages=2)
    assert other == namespace()


def test_weights_pages_and_ranks_are() -> None:
    second = LinkerRanks(rank=1, size=2, shared=False, group=None)
    found = [namespace(), namespace(seed=1), namespace(page_tokens=16), namespace(ranks=second)]
    assert len({each.key for each in found}) == 4


def test_one_element_in_a_run_of_a_weight_counts() -> None:
    session = SimpleNamespace(model=torch.nn.Linear(64, 300), model_settings={})
    before = model_fingerprint(session)
    with torch.no_grad():
        session.model.weight[0, 3] += 1e-3
    assert model_fingerprint(session) != before


@pytest.mark.parametrize("size", [64, 3 * 2**14])
def test_each_element_of_a_weight_counts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of an embedding, or one expert, may be all that an edit changes."""
    monkeypatch.setattr("hisparse.engine.fingerprint._CHUNK", 2**14)
    weight = torch.zeros(size, dtype=torch.bfloat16)
    found = {fingerprint({}, [("embedding", weight)])}
    rng = torch.Generator().manual_seed(0)
    for at in [0, size - 1, *torch.randint(1, size - 1, (10,), generator=rng).tolist()]:
        weight[at] += 1
        found.add(fingerprint({}, [("embedding", weight)]))
    assert len(found) == 13
    rows = weight.view(8, -1)
    assert fingerprint({}, [("", rows.t())]) == fingerprint({}, [("", rows.t().contiguous())])


def test_ranks_with_the_same_latents_share_a_key() -> None:
    first, second = (LinkerRanks(rank=r, size=2, shared=True, group=None) for r in (0, 1))
    assert namespace(ranks=first) == namespace(ranks=second)
    assert (first.writes, second.writes) == (True, False)


def test_where_the_model_was_trained_sparse_the_budget_counts() -> None:
    budgets = [namespace(DSA(), budget=budget, page_size=1).key for budget in (64, 128, 64)]
    assert budgets[0] == budgets[2] != budgets[1]
    rounded = namespace(DSA(index_dtype="float32"), budget=64, page_size=1).key
    assert rounded != budgets[0]


@pytest.mark.skipif(not SWEEPS, reason="SGLang compiles: make test-all PART=sweeps")
@pytest.mark.sweeps
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_keys_of_pages_are_those_of_sglang(page_tokens: int) -> None:
    ids = torch.randint(0, 2**32, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = get_storage_hash_str(ids[: 200 // page_tokens * page_tokens], None, page_tokens)
    assert page_keys(np.array(ids), page_tokens) == expected
    assert page_keys(np.array(ids[:page_tokens]), page_tokens) == expected[:1]


@pytest.mark.skipif(not SWEEPS, reason="SGLang loads models: make test-all PART=sweeps")
@pytest.mark.sweeps
def test_a_model_has_one_fingerprint_in_sglang_and_in_transformers() -> None:
    folders = [str(tiny_model(kind)) for kind in ("llama", "qwen2")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.fingerprints", *folders],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pairs = [line.split() for line in done.stdout.splitlines() if len(line) == 65]
    assert [here for here, _ in pairs] == [there for _, there in pairs]
    assert len({here for here, _ in pairs}) == 2


@pytest.fixture
def backend(tmp_path: Path) -> FileStorage:
    extra = {"path": str(tmp_path), "size_bytes": None, "policy": "lru", "ttl_s": None}
    return FileStorage(SimpleNamespace(extra_config=extra), {})


def test_the_file_store_keeps_namespaces_apart(backend: FileStorage) -> None:
    first, second = namespace(), namespace(seed=1)
    for each in (first, second):
        backend.use(each)
    records = torch.randint(0, 256, (2, first.page_bytes), dtype=torch.uint8)
    pages = ["aa" * 32, "bb" * 32]
    keys, others = ([f"{each.key}-{page}" for page in pages] for each in (first, second))
    assert backend.batch_set(keys, list(records))
    assert backend.batch_set(keys, list(records)), "they are there already"
    assert (backend.batch_exists(keys), backend.batch_exists(others)) == (2, 0)
    assert backend.batch_exists([]) == 0
    assert backend.exists(keys[1]) and not backend.exists(others[1])
    out = torch.zeros_like(records)
    assert backend.batch_get(others, list(out)) == [None, None]
    assert all(row is not None for row in backend.batch_get(keys, list(out)))
    assert torch.equal(out, records)
    assert backend.set(others[0], records[1])
    got = backend.get(others[0], out[0])
    assert got is not None and torch.equal(got, records[1])
    backend.clear()
    assert backend.batch_exists(keys) == backend.batch_exists(others) == 0
    backend.close()


def test_a_damaged_record_is_absent(backend: FileStorage, tmp_path: Path) -> None:
    space = namespace()
    backend.use(space)
    key = f"{space.key}-{'cc' * 32}"
    assert backend.set(key, torch.zeros(space.page_bytes, dtype=torch.uint8))
    (segment,) = (tmp_path / "segments").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[5000] ^= 4
    segment.write_bytes(data)
    assert backend.get(key, torch.zeros(space.page_bytes, dtype=torch.uint8)) is None
    assert not backend.exists(key)
    backend.close()
