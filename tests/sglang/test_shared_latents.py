"""What ranks of tensor parallelism share: all of an MLA model's latents, no KV head of others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hisparse.cache import HostKVPool
from hisparse.cache.allocate import NodeRanks
from hisparse.cache.formats import format_of
from hisparse.sglang.ranks import LinkerRanks, gather_queries
from hisparse.types import KVSpec
from tests.shapes import TWO_LAYERS

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")
LATENTS = replace(TWO_LAYERS, attention="MLA", num_kv_heads=1, head_dim=80, v_head_dim=64)


@pytest.mark.parametrize(
    ("kv", "size", "key", "exchanges", "share"),
    [
        pytest.param(TWO_LAYERS, 1, (0, 1), False, 1, id="heads-1"),
        pytest.param(TWO_LAYERS, 4, (3, 4), False, 1, id="heads-4"),
        pytest.param(LATENTS, 1, (0, 1), False, 1, id="latents-1"),
        pytest.param(LATENTS, 4, (0, 1), True, 4, id="latents-4"),
    ],
)
def test_the_last_rank(
    kv: KVSpec,
    size: int,
    key: tuple[int, int],
    exchanges: bool,
    share: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.distributed import parallel_state

    group, stored, rank = SimpleNamespace(world_size=size), format_of(kv), size - 1
    monkeypatch.setattr(parallel_state, "get_attn_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    linker = LinkerRanks.of(SimpleNamespace(attn_tp_cache_group=group), stored)
    assert (linker.key, linker.writes) == (key, key[0] == rank)
    assert (gather_queries(stored) is not None) == exchanges
    # A pool without pages maps nothing, for which ranks would have to meet.
    ranks = NodeRanks(rank=rank, size=size, gather=lambda text: [text] * size)
    pool = HostKVPool(kv, 0, "page_first", pin=False, ranks=ranks)
    pool.num_pages = 8
    assert pool.rank_bytes * share == pool.num_bytes > 0
