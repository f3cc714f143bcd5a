"""Formats of K and V: bytes, sizes, refusals; ``test_invariants.py`` has what holds for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.cache import HostKVPool
from hisparse.cache.formats import format_of
from hisparse.cache.formats.base import ScaledFormat
from hisparse.cache.serializer import PageSerializer
from hisparse.config import HiSparseConfig
from hisparse.engine.build import build_engine, resolve
from hisparse.engine.capabilities import stored_spec
from hisparse.errors import ConfigError
from hisparse.memory.sizing import resize, size
from hisparse.testing import Simulator
from hisparse.types import KVSpec, StoredKV
from tests.engine.test_invariants import FP8, MLA, SCOPES
from tests.shapes import TWO_LAYERS, machine


@pytest.mark.parametrize("scope", SCOPES)
def test_a_new_token_is_encoded_once(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer of a step, for the tail page and the host slot."""
    sim = Simulator(**FP8, scope=scope)
    a, b = sim.request(1, 60, seed=14), sim.request(2, 60, seed=15)
    sim.prefill((a, 41), (b, 34))
    encoded: list[torch.Size] = []

    def counted(self: ScaledFormat, k: Tensor, v: Tensor) -> StoredKV:
        encoded.append(k.shape)
        return encode(self, k, v)

    encode = ScaledFormat.encode
    monkeypatch.setattr(ScaledFormat, "encode", counted)
    for _ in range(3):
        sim.decode(a, b)
    assert encoded == 3 * sim.layers * [torch.Size((2, sim.kv_heads, sim.head_dim))]


def test_a_quarter_of_the_bytes_of_float32_move_and_the_scales() -> None:
    """Compares counters of the same steps with the same selections."""
    moved = []
    for dtype in ("auto", "int8"):
        sim = Simulator(kv_cache_dtype=dtype, device_buffer=32, max_row=32, scope="kv_head")
        request = sim.request(1, 200, seed=11)
        sim.prefill((request, 60))
        sim.prefill((request, 80))
        for _ in range(40):
            sim.decode(request)
        moved.append((sim.coordinator.stats(), sim.manager.host.format, sim.manager))
    (plain, wide, _), (stored, form, manager) = moved
    assert (wide.head_bytes, form.head_bytes) == (2 * 16 * 4, 2 * 16 + 2)
    assert stored.written_bytes == 180 * form.token_bytes
    assert plain.written_bytes == 180 * wide.token_bytes
    ratio = form.head_bytes / wide.head_bytes
    assert stored.prefill_read_bytes == plain.prefill_read_bytes * ratio > 0
    assert stored.decode_read_bytes == stored.miss_pages * manager.device.page_bytes > 0
    assert manager.device.page_bytes == sim.page_size * form.head_bytes
    assert manager.host.num_bytes == sum(
        x.nbytes for layer in range(sim.layers) for x in manager.host.stored(layer).tensors
    )


def deepseek(**changes: Any) -> KVSpec:
    shape = {"num_layers": 61, "num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576}
    shape |= {"v_head_dim": 512, "page_size": 16, "dtype": torch.bfloat16, "attention": "MLA"}
    return KVSpec(**shape | {"kv_cache_dtype": "fp8_e4m3"} | changes)


def test_deepseek_takes_656_bytes_a_token_and_layer() -> None:
    stored = format_of(deepseek())
    assert stored.layer_token_bytes == 656
    assert stored.decoded_token_bytes == 576 * 2
    assert stored.dense_token_bytes == 61 * 576, "SGLang's own fp8 latents have no scales"
    indexed = format_of(deepseek(index_head_dim=128))
    assert indexed.dense_token_bytes == indexed.token_bytes, "but those of DeepSeek-V3.2"


@pytest.mark.parametrize(
    ("dtype", "spec", "scope"),
    [
        ("fp8_e4m3", TWO_LAYERS, "layer"),
        ("int8", TWO_LAYERS, "kv_head"),
        ("fp8_e4m3", deepseek(num_layers=2, num_q_heads=4, head_dim=80, v_head_dim=64), None),
    ],
    ids=["fp8", "int8", "fp8-latents"],
)
def test_what_is_allocated_is_what_was_sized(dtype: str, spec: KVSpec, scope: Any) -> None:
    """Host pool and device pages match to the byte; staging stays within its limit."""
    config = HiSparseConfig(budget=256, page_size=16, kv_cache_dtype=dtype, selection_scope=scope)
    sizes = {"host_bytes": 4 << 20, "device_bytes": 8 << 20, "context_length": 4096}
    resources = machine(**sizes, max_requests=2)
    stored = stored_spec(config, spec)
    setup = resolve(config, stored, 0.1, resources)
    sizing = setup.sizing
    host = HostKVPool(stored, sizing.kv_tokens // 16 + 1, setup.resolved.layout, pin=False)
    manager = build_engine(setup, host, device=torch.device("cpu")).manager
    assert host.num_bytes == sizing.host_bytes <= resources.host_bytes
    assert manager.device.num_bytes == sizing.device["device pages"]
    if spec.attention == "MLA":
        # Of a row, 112 bytes; a selection of 15 pages and the tail page is decoded.
        assert manager.device.num_bytes == sizing.num_device_pages * 16 * 112 * 2
        assert sizing.device["workspace of the adapter"] == sizing.max_requests * 16 * 16 * 80 * 2
    else:
        whole = resolve(config, replace(spec, kv_cache_dtype="auto"), 0.1, resources)
        assert sizing.kv_tokens > 1.9 * whole.sizing.kv_tokens
        tensors = [x for layer in range(2) for x in manager.device.stored(layer).tensors]
        assert manager.device.num_bytes == sum(x.nbytes for x in tensors)
    assert 0.8 * sizing.device["staging"] < manager.staging.num_bytes <= sizing.device["staging"]


@pytest.mark.parametrize(("device", "ranks"), [("cuda", 1), ("cuda", 8), ("cpu", 8)])
def test_page_tables_of_a_gpu_are_charged_for_the_whole_pool(device: str, ranks: int) -> None:
    """8 bytes for 4 KiB, on each of the ranks that share a pool."""
    sizes = {"host_bytes": 700 << 30, "device_bytes": 40 << 30, "context_length": 131072}
    resources = machine(**sizes, device_type=device, node_ranks=ranks)
    config = HiSparseConfig(algorithm="streaming")
    sizing = resolve(config, deepseek(kv_cache_dtype="auto"), 0.1, resources).sizing
    assert sizing.request.page_bytes == 16 * 61 * 576 * 2 // 512 * (device == "cuda")
    pages = sizing.kv_tokens // 16 + 1
    plain = resize(size(replace(sizing.request, mapping_page_bytes=0)), kv_tokens=sizing.kv_tokens)
    assert plain.num_device_pages >= sizing.num_device_pages
    lists = 4 * 61 * (plain.num_device_pages - sizing.num_device_pages)
    charged = sizing.device["tables"] - plain.device["tables"] + lists
    assert charged == pages * sizing.request.page_bytes
    if device == "cuda":
        assert round(charged / 2**30, 2) == pytest.approx(1.37 * ranks, abs=0.04)


def test_latents_in_int8_are_refused_in_one_line() -> None:
    latents = replace(TWO_LAYERS, num_kv_heads=1, head_dim=48, v_head_dim=32, attention="MLA")
    with pytest.raises(ConfigError) as error:
        stored_spec(HiSparseConfig(kv_cache_dtype="int8"), latents)
    assert str(error.value).endswith("'int8' (choices: auto, fp8_e4m3)")
    assert "latents (MLA)" in str(error.value)


@pytest.mark.parametrize(
    ("form", "token_bytes"),
    # 24 float32; or 16 codes, a scale, 8 rotary channels of two bytes, and padding.
    [(MLA, 24 * 4), (MLA | FP8, 48)],
    ids=["latents", "fp8-latents"],
)
def test_bytes_of_latents(form: dict[str, Any], token_bytes: int) -> None:
    """Values take no memory of their own."""
    sim = Simulator(**form)
    host, device = sim.manager.host, sim.manager.device
    assert host.format.token_bytes == sim.layers * token_bytes
    assert host.num_bytes == sim.host_pages * sim.page_size * host.format.token_bytes
    assert host.num_bytes == sum(host.layer(layer).k.nbytes for layer in range(sim.layers))
    assert device.page_bytes == sim.page_size * token_bytes
    for kv in (host.layer(1), device.stored(1).kv):
        assert kv.v.data_ptr() == kv.k.data_ptr()
    request = sim.request(1, 60, seed=1)
    sim.prefill((request, 50))
    sim.decode(request)
    assert sim.coordinator.stats().written_bytes == 51 * host.format.token_bytes


def test_another_format_in_a_store_is_another_key() -> None:
    """Pages move to a store and back as they are."""
    formats = set()
    for dtype in ("auto", "fp8_e4m3"):
        sims = [Simulator(**MLA | {"kv_cache_dtype": dtype}) for _ in range(2)]
        request = sims[0].request(1, 60, seed=1)
        sims[0].prefill((request, 48))
        pages = torch.tensor(request.host_pages)
        stores = [PageSerializer(sim.manager.host, sim.page_size, {}) for sim in sims]
        data = torch.empty(len(pages), stores[0].record_bytes, dtype=torch.uint8)
        stores[0].read(pages, data)
        stores[1].write(pages, data)
        for layer in range(2):
            one, other = (sim.manager.host.layer(layer).k[pages] for sim in sims)
            assert torch.equal(one, other)
        formats.add(stores[0].describe())
    assert len(formats) == 2
