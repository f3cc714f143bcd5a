"""New tokens pass through the backend; no pool method accesses device buffers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models import utils
from sglang.srt.plugins import load_plugins

from hisparse.errors import HiSparseError
from hisparse.sglang import plugin, session
from hisparse.sglang.kv_pool import HiSparseMHAPool
from hisparse.types import KVSpec

SPEC = KVSpec(
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=8,
    dtype=torch.float32,
    page_size=4,
)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> HiSparseMHAPool:
    layout = getattr(request, "param", "layer_first")
    monkeypatch.setattr(
        session,
        "_session",
        SimpleNamespace(spec=SPEC, resolved=SimpleNamespace(layout=layout), ranks=None),
    )
    return HiSparseMHAPool(
        32,
        page_size=16,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def test_models_do_not_write_into_the_pool_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's answer on CUDA with a bf16 pool, without and with hisparse."""
    load_plugins()
    plugin.install_hooks()
    monkeypatch.setattr(utils, "_is_cuda", True)
    monkeypatch.setattr(
        utils, "get_token_to_kv_pool", lambda: SimpleNamespace(dtype=torch.bfloat16)
    )
    monkeypatch.setattr(utils, "is_cp_active", lambda batch: False)
    batch = SimpleNamespace(dcp_kv_mask=None)
    monkeypatch.setattr(session, "_session", None)
    assert utils.enable_fused_set_kv_buffer(batch)
    monkeypatch.setattr(session, "_session", SimpleNamespace())
    assert not utils.enable_fused_set_kv_buffer(batch)


@pytest.mark.parametrize("pool", ["layer_first", "page_head"], indirect=True)
def test_a_written_token_lies_in_its_host_slot(pool: HiSparseMHAPool) -> None:
    k, v = torch.randn(2, 3, 2, 8)
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), torch.tensor([47, 16, 21]), k, v)
    pages = pool.host.layer(1)
    for token, slot in enumerate((47, 16, 21)):
        assert torch.equal(pages.k[slot // 4, :, slot % 4], k[token])
        assert torch.equal(pages.v[slot // 4, :, slot % 4], v[token])
    assert sum(pool.get_kv_size_bytes()) == pool.host.num_bytes == 2 * 48 * 2 * 2 * 8 * 4


def test_reads_by_location_get_views(pool: HiSparseMHAPool) -> None:
    k, v = torch.randn(2, 3, 2, 8)
    slots = torch.tensor([47, 16, 21])
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, k, v)
    assert torch.equal(pool.get_key_buffer(0)[slots], k)
    assert torch.equal(pool.get_value_buffer(0)[slots], v)


@pytest.mark.parametrize("pool", ["page_head"], indirect=True)
def test_a_layout_without_token_views_says_so(pool: HiSparseMHAPool) -> None:
    with pytest.raises(HiSparseError, match="set host_layout to 'layer_first'"):
        pool.get_key_buffer(0)


def test_every_pool_method_that_takes_locations_is_overridden() -> None:
    """If a release of SGLang adds such a method, this test fails, not a user's request."""
    locations = {"loc", "loc_info", "indices", "tgt_loc", "src_loc", "layer_id"}
    private = {"_store_kv_layer", "_move_kv_cache_impl", "_set_quantized_kv_buffer"}
    inherited = []
    for name, method in inspect.getmembers(MHATokenToKVPool, inspect.isfunction):
        takes = locations & set(inspect.signature(method).parameters)
        reached_only_from_overridden = name.startswith("_") and (
            name in private or "quant" in name or "native" in name or "physical" in name
        )
        same = getattr(HiSparseMHAPool, name) is method
        if takes and same and not reached_only_from_overridden:
            inherited.append(name)
    # These two call get_key_buffer and get_value_buffer, which end in the overridden view.
    assert sorted(inherited) == sorted(["get_key_buffer", "get_value_buffer", "get_kv_buffer"])
