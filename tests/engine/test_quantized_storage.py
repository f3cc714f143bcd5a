"""K and V stored in eight bits: the invariants hold for the values that are read back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.quest import Quest
from hisparse.cache import HostKVPool
from hisparse.cache.formats import format_of
from hisparse.cache.formats.base import ScaledFormat
from hisparse.config import HiSparseConfig
from hisparse.engine.build import build_engine, resolve
from hisparse.engine.capabilities import stored_spec
from hisparse.errors import ConfigError, HiSparseError
from hisparse.memory.costs import Resources
from hisparse.testing import Request, Simulator
from hisparse.types import StoredKV
from tests.delayed import DelayedStreams, Order
from tests.shapes import TWO_LAYERS

SCOPES = ["layer", "kv_head", "query_head"]


def expected(sim: Simulator, request: Request, start: int, stop: int) -> Tensor:
    """Dense float64 attention over the request's K and V, rounded to eight bits."""
    k, v = format_of(sim.spec).as_read(request.k, request.v)
    return sim.dense(replace(request, k=k, v=v), start, stop).float()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("layer_first", "fp8_e4m3"),
        ("page_first", "int8"),
        ("page_head", "fp8_e4m3"),
        ("page_head", "int8"),
    ],
)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_budget_of_the_whole_context_is_dense(scope: str, layout: str, dtype: str) -> None:
    """Invariant 1, with chunk boundaries inside and at the edge of pages."""
    sizes = {"budget": 96, "device_buffer": 96, "max_row": 96}
    sim = Simulator(kv_cache_dtype=dtype, scope=scope, layout=layout, **sizes)
    request = sim.request(1, 90, seed=0)
    exact = []
    for chunk in (5, 11, 24, 1, 20):
        (out,) = sim.prefill((request, chunk))
        start = request.done - chunk
        assert_close(out, expected(sim, request, start, request.done), rtol=1e-4, atol=1e-5)
        exact.append((out - sim.dense(request, start, request.done).float()).abs().max())
    for _ in range(29):
        out = sim.decode(request)
        want = expected(sim, request, request.done - 1, request.done)
        assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert min(exact) > 1e-3, "eight bits round"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"min_sparse_context": 1000}, id="resident"),
        pytest.param({"dense_layers": (0, 1), "max_row": 64}, id="staged"),
    ],
)
def test_dense_service_reads_what_was_stored(settings: dict[str, object]) -> None:
    sim = Simulator(kv_cache_dtype="fp8_e4m3", **settings)
    a, b = sim.request(1, 120, seed=2), sim.request(2, 100, seed=3)
    sim.prefill((a, 100), (b, 61))
    for _ in range(18):
        out = sim.decode(a, b)
        for row, request in enumerate((a, b)):
            want = expected(sim, request, request.done - 1, request.done)
            assert_close(out[:, [row]], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", [Quest(), Oracle()], ids=["quest", "oracle"])
def test_chunks_of_a_prompt_change_no_token(algorithm: Quest | Oracle) -> None:
    """New K and V are rounded like stored ones, for attention and for representations."""
    outs = []
    for chunks in ((100,), (37, 63), (8, 8, 84)):
        sim = Simulator(kv_cache_dtype="fp8_e4m3", algorithm=algorithm)
        request = sim.request(1, 130, seed=4)
        prompt = torch.cat([sim.prefill((request, n))[0] for n in chunks], dim=1)
        steps = [sim.decode(request) for _ in range(30)]
        outs.append(torch.cat([prompt, *steps], dim=1))
    for other in outs[1:]:
        assert_close(other, outs[0], rtol=1e-4, atol=1e-5)


def test_a_shared_prefix_gives_what_each_request_gives_alone() -> None:
    """Invariant 5, also with other requests that compete for device pages."""
    sim = Simulator(kv_cache_dtype="fp8_e4m3")
    a = sim.request(1, 120, seed=7)
    sim.prefill((a, 100))
    b = sim.request(2, 120, seed=8, like=a, shared=64)
    (prompt,) = sim.prefill((b, 30))
    assert_close(prompt, expected(sim, b, 64, 94), rtol=1e-4, atol=1e-5)
    shared = [sim.decode(a, b)[:, 1:] for _ in range(20)]
    alone = Simulator(kv_cache_dtype="fp8_e4m3")
    twin = alone.request(1, 120, seed=8, like=a, shared=64)
    twin.host_pages, twin.done = [], 0
    alone.prefill((twin, 94))
    for step in shared:
        assert_close(step, alone.decode(twin), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["early", "late", 3])
def test_transfers_beside_compute_change_no_bit(order: Order) -> None:
    """Staged prefixes, pages placed by a prompt, and dense tiles, copied at another time."""
    outs = []
    for streams in (None, DelayedStreams(order)):
        sim = Simulator(
            kv_cache_dtype="fp8_e4m3", max_row=64, dense_layers=(1,), side_streams=streams
        )
        request = sim.request(1, 160, seed=12)
        steps = [sim.prefill((request, n))[0] for n in (45, 60)]
        steps += [sim.decode(request) for _ in range(20)]
        outs.append(torch.cat(steps, dim=1))
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("scope", "dtype"), [("layer", "fp8_e4m3"), ("kv_head", "int8"), ("query_head", "fp8_e4m3")]
)
def test_resident_bytes_equal_host_bytes(scope: str, dtype: str) -> None:
    """Invariants 2 and 3, scales included; pages come from prefill, tails and host memory."""
    sim = Simulator(
        kv_cache_dtype=dtype,
        scope=scope,
        device_pages=40,
        device_buffer=32,
        max_row=96,
        num_slots=3,
    )
    a, b = sim.request(1, 150, seed=9), sim.request(2, 150, seed=10)
    sim.prefill((a, 90))
    for step in range(40):
        if step == 10:
            sim.prefill((b, 77))
        if step == 30:
            sim.end(b)
        live = [a, b] if 10 <= step < 30 else [a]
        sim.decode(*live)
        for request in live:
            assert same_bytes(sim, request) > 0


def same_bytes(sim: Simulator, request: Request) -> int:
    """Compare every resident page of a request with its host page; returns how many there are."""
    heads, kv_heads, count = sim.policy.heads, sim.kv_heads, 0
    manager = sim.manager
    for layer in range(sim.layers):
        state = manager.device.state(layer)
        host, device = manager.host.stored(layer).tensors, manager.device.stored(layer).tensors
        assert len(host) == len(device) == 3
        for head in range(heads):
            row = request.slot * heads + head
            which = slice(None) if heads == 1 else [head * kv_heads // heads]
            pairs = zip(
                state.slot_pages[row].tolist(), state.device_pages[row].tolist(), strict=True
            )
            for page, device_page in pairs:
                if page < 0:
                    continue
                count += 1
                for there, here in zip(device, host, strict=True):
                    a, b = there[device_page], here[request.host_pages[page], which]
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return count


@pytest.mark.parametrize("scope", SCOPES)
def test_a_new_token_is_encoded_once(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer of a step; tail page and host slot get the same codes and scales."""
    sim = Simulator(kv_cache_dtype="fp8_e4m3", scope=scope)
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
    heads, device = sim.policy.heads, sim.manager.device
    for layer in range(sim.layers):
        for request in (a, b):
            page, offset = divmod(request.done - 1, sim.page_size)
            for head in range(heads):
                own = slice(None) if heads == 1 else [head * sim.kv_heads // heads]
                tail = device.tail_pages[layer, request.slot * heads + head]
                stored = device.stored(layer).tensors, sim.manager.host.stored(layer).tensors
                for there, here in zip(*stored, strict=True):
                    on_host = here[request.host_pages[page], own, offset]
                    got = there[tail, :, offset]
                    assert torch.equal(got.view(torch.uint8), on_host.view(torch.uint8))


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


def test_keys_in_host_memory_are_not_taken_for_what_they_are_not() -> None:
    """An algorithm without the declaration is not refused at start, but at its first read."""
    with pytest.raises(HiSparseError, match="reads_host_keys = True") as error:
        Simulator(kv_cache_dtype="fp8_e4m3").manager.kv_io.host_pages(0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("scope", "dtype"), [("layer", "fp8_e4m3"), ("kv_head", "int8")])
def test_what_is_allocated_is_what_was_sized(scope: str, dtype: str) -> None:
    """Host pool and device pages match to the byte; staging stays within its limit."""
    config = HiSparseConfig(budget=256, page_size=16, kv_cache_dtype=dtype, selection_scope=scope)
    resources = Resources(
        host_bytes=4 << 20,
        device_bytes=8 << 20,
        context_length=4096,
        max_requests=2,
        device_type="cpu",
    )
    stored = stored_spec(config, TWO_LAYERS)
    plan = resolve(config, stored, 0.1, resources)
    whole = resolve(config, TWO_LAYERS, 0.1, resources)
    assert plan.sizing.kv_tokens > 1.9 * whole.sizing.kv_tokens
    sizing = plan.sizing
    host = HostKVPool(stored, sizing.kv_tokens // 16 + 1, plan.resolved.layout, pin=False)
    coordinator = build_engine(plan, host, num_slots=3, device=torch.device("cpu"))
    manager = coordinator.manager
    assert host.num_bytes == sizing.host_bytes <= resources.host_bytes
    assert manager.device.num_bytes == sizing.device_page_pool_bytes
    tensors = [x for layer in range(2) for x in manager.device.stored(layer).tensors]
    assert manager.device.num_bytes == sum(x.nbytes for x in tensors)
    assert 0.8 * sizing.staging_bytes < manager.staging_bytes <= sizing.staging_bytes


def test_latents_in_int8_are_refused_in_one_line() -> None:
    latents = replace(TWO_LAYERS, num_kv_heads=1, head_dim=48, v_head_dim=32, latent=True)
    with pytest.raises(ConfigError) as error:
        stored_spec(HiSparseConfig(kv_cache_dtype="int8"), latents)
    assert str(error.value).endswith("'int8' (choices: auto, fp8_e4m3)")
    assert "latents (MLA)" in str(error.value)
