"""KV pools: new tokens pass through the backend; no pool method accesses device buffers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.models import utils
from sglang.srt.plugins import load_plugins

from hisparse.cache.formats import format_of
from hisparse.errors import HiSparseError
from hisparse.sglang import plugin, session
from hisparse.sglang.features.dsa.pools import HiSparseDSAPool
from hisparse.sglang.kv_pool import HiSparseMHAPool, HiSparseMLAPool
from tests.shapes import small_spec

RANK, ROPE = 12, 4
LATENT: dict[str, Any] = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
LATENT |= {"start_layer": 0, "end_layer": 1}
#: Class, SGLang's class, what SGLang passes, and heads and widths of K and V.
POOLS: dict[str, tuple[type, type, dict[str, Any], tuple[int, int, int]]] = {
    "mha": (HiSparseMHAPool, MHATokenToKVPool, {"head_num": 2, "head_dim": 8}, (2, 8, 8)),
    "mla": (HiSparseMLAPool, MLATokenToKVPool, LATENT, (1, RANK + ROPE, RANK)),
    "dsa": (
        HiSparseDSAPool,
        DSATokenToKVPool,
        LATENT | {"index_head_dim": 128, "kv_cache_dim": RANK + ROPE},
        (1, RANK + ROPE, RANK),
    ),
}
LATENTS = [("mla", "layer_first"), ("dsa", "layer_first")]
ALL = [("mha", "layer_first"), ("mha", "page_head"), *LATENTS]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    kind, layout = request.param
    ours, _, options, (heads, head_dim, v_head_dim) = POOLS[kind]
    sizes = {"num_kv_heads": heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
    spec = small_spec(**sizes, attention="GQA" if kind == "mha" else "MLA")
    resolved = SimpleNamespace(layout=layout)
    state = SimpleNamespace(setup=SimpleNamespace(spec=spec, resolved=resolved), ranks=None)
    monkeypatch.setattr(session, "_session", state)
    return ours(
        32, page_size=16, dtype=torch.float32, layer_num=2, device="cpu",
        enable_memory_saver=False, **options,
    )  # fmt: skip


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


@pytest.mark.parametrize("pool", ALL, indirect=True)
def test_a_written_token_lies_in_its_host_slot(pool: Any) -> None:
    spec, slots = pool.host.kv, torch.tensor([47, 16, 21])
    k = torch.randn(3, spec.num_kv_heads, spec.head_dim)
    v = format_of(spec).values_of(k, torch.randn_like(k))
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, k, v)
    pages = pool.host.layer(1)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(pages.k[slot // 4, :, slot % 4], k[token])
        assert torch.equal(pages.v[slot // 4, :, slot % 4], v[token])
    if pool.host.layout == "layer_first":
        assert torch.equal(pool.get_key_buffer(1)[slots], k)
        assert torch.equal(pool.get_value_buffer(1)[slots], v)
    width = spec.head_dim if spec.attention == "MLA" else 2 * spec.head_dim
    expected = 2 * 48 * spec.num_kv_heads * width * 4
    assert torch.tensor(pool.get_kv_size_bytes()).sum() == pool.host.num_bytes == expected


@pytest.mark.parametrize("pool", [("mha", "page_head")], indirect=True)
def test_a_layout_without_token_views_says_so(pool: Any) -> None:
    with pytest.raises(HiSparseError, match="set host_layout to 'layer_first'"):
        pool.get_key_buffer(0)


@pytest.mark.parametrize("pool", [("mla", "page_head"), ("dsa", "page_head")], indirect=True)
def test_shapes_are_known_without_buffers(pool: Any) -> None:
    """In a layout without token views."""
    keys, values = pool.get_kv_buffer_shape()
    slots = pool.size + pool.page_size
    assert (keys, values) == ((slots, 1, RANK + ROPE), (slots, 1, RANK))


@pytest.mark.parametrize("pool", LATENTS, indirect=True)
def test_methods_for_device_buffers_are_rejected(pool: Any) -> None:
    for refused in (pool.set_mla_kv_buffer, pool.get_mla_kv_buffer, pool.get_cpu_copy):
        with pytest.raises(HiSparseError, match=rf"got {refused.__name__}\(\) from .*, expected"):
            refused(SimpleNamespace(layer_id=0), torch.tensor([1]))
    if isinstance(pool, HiSparseDSAPool):
        with pytest.raises(HiSparseError, match="SGLang's index key cache"):
            pool.get_index_k_with_scale_buffer(0)


#: These call get_key_buffer and get_value_buffer, or end in the overridden view.
READ = {"get_kv_buffer"}
INHERITED = {"mha": READ | {"get_key_buffer", "get_value_buffer"}, "mla": READ, "dsa": READ}


@pytest.mark.parametrize("kind", POOLS)
def test_every_pool_method_that_takes_locations_is_overridden(kind: str) -> None:
    """If a release of SGLang adds such a method, this test fails, not a user's request."""
    ours, base, *_ = POOLS[kind]
    locations = {"loc", "loc_info", "indices", "tgt_loc", "src_loc", "layer_id"}
    private = {"_store_kv_layer", "_move_kv_cache_impl", "_set_quantized_kv_buffer"}
    inherited = set[str]()
    for name, method in inspect.getmembers(base, inspect.isfunction):
        reached_only_from_overridden = name.startswith("_") and (
            kind != "mha"
            or name in private
            or any(word in name for word in ("quant", "native", "physical"))
        )
        takes = locations & set(inspect.signature(method).parameters)
        if takes and getattr(ours, name) is method and not reached_only_from_overridden:
            inherited.add(name)
    assert inherited == INHERITED[kind]
