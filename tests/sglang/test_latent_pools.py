"""KV pools of MLA models: no device buffers, and no access that bypasses hisparse."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool

from hisparse.errors import HiSparseError
from hisparse.sglang import session
from hisparse.sglang.kv_pool import HiSparseDSAPool, HiSparseMLAPool
from hisparse.types import KVSpec

RANK, ROPE = 12, 4
SPEC = KVSpec(
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=1,
    head_dim=RANK + ROPE,
    v_head_dim=RANK,
    dtype=torch.float32,
    page_size=4,
    latent=True,
)


@pytest.fixture(params=["mla", "dsa"])
def pool(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> HiSparseMLAPool:
    monkeypatch.setattr(
        session,
        "_session",
        SimpleNamespace(spec=SPEC, resolved=SimpleNamespace(layout="layer_first"), ranks=None),
    )
    options = {} if request.param == "mla" else {"index_head_dim": 128, "kv_cache_dim": RANK + ROPE}
    made = (HiSparseMLAPool if request.param == "mla" else HiSparseDSAPool)(
        32,
        page_size=16,
        dtype=torch.float32,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=1,
        **options,
    )
    assert isinstance(made, MLATokenToKVPool)
    return made


def test_a_written_latent_lies_in_its_host_slot(pool: HiSparseMLAPool) -> None:
    latents, slots = torch.randn(3, 1, RANK + ROPE), torch.tensor([47, 16, 21])
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, latents, latents[..., :RANK])
    pages = pool.host.layer(1)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(pages.k[slot // 4, :, slot % 4], latents[token])
    assert torch.equal(pool.get_key_buffer(1)[slots], latents)
    assert torch.equal(pool.get_value_buffer(1)[slots], latents[..., :RANK])
    assert pool.get_kv_size_bytes() == pool.host.num_bytes == 2 * 48 * (RANK + ROPE) * 4


def test_shapes_are_known_without_buffers(pool: HiSparseMLAPool) -> None:
    """In a layout without token views."""
    session.require_session().resolved.layout = "page_head"
    pool._create_buffers()
    keys, values = pool.get_kv_buffer_shape()
    slots = pool.size + pool.page_size
    spec = pool.host.kv
    assert (keys, values) == ((slots, 1, spec.head_dim), (slots, 1, spec.v_head_dim))


def test_methods_for_device_buffers_are_rejected(pool: HiSparseMLAPool) -> None:
    nothing = SimpleNamespace(layer_id=0), torch.tensor([1])
    for refused in (pool.set_mla_kv_buffer, pool.get_mla_kv_buffer):
        with pytest.raises(HiSparseError, match=rf"got {refused.__name__}\(\) from .*, expected"):
            refused(*nothing)
    if isinstance(pool, HiSparseDSAPool):
        with pytest.raises(HiSparseError, match="SGLang's index key cache"):
            pool.get_index_k_with_scale_buffer(0)


@pytest.mark.parametrize(
    "ours, base",
    [(HiSparseMLAPool, MLATokenToKVPool), (HiSparseDSAPool, DSATokenToKVPool)],
    ids=["mla", "dsa"],
)
def test_every_pool_method_that_takes_locations_is_overridden(ours: type, base: type) -> None:
    """If a release of SGLang adds such a method, this test fails, not a user's request."""
    locations = {"loc", "loc_info", "indices", "tgt_loc", "src_loc", "layer_id"}
    inherited = []
    for name, method in inspect.getmembers(base, inspect.isfunction):
        takes = locations & set(inspect.signature(method).parameters)
        if takes and not name.startswith("_") and getattr(ours, name) is method:
            inherited.append(name)
    # This one calls get_key_buffer and get_value_buffer.
    assert inherited == ["get_kv_buffer"]
