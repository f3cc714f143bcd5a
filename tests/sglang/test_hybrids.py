"""Hybrids: the layers that attend get hisparse's pool and backend under SGLang's wrappers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import hybrid_linear_attn_backend as linear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import resolve_settings
from hisparse.errors import ConfigError
from hisparse.sglang import session
from hisparse.sglang.backend import HiSparseAttnBackend
from hisparse.sglang.features import hybrids
from hisparse.sglang.kv_pool import HiSparseMHAPool, HiSparseMLAPool
from hisparse.sglang.models import read_model_shape
from tests.shapes import small_spec

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Layers of a model of four that attend.
FULL = [1, 3]
SPECS = {
    "mha": small_spec(),
    "mla": small_spec(num_kv_heads=1, head_dim=12, attention="MLA"),
}


def make_pool(kind: str, monkeypatch: pytest.MonkeyPatch) -> HybridLinearKVPool:
    """SGLang's pool of a hybrid, as its configurator makes it."""
    setup = SimpleNamespace(spec=SPECS[kind], resolved=SimpleNamespace(layout="layer_first"))
    started = SimpleNamespace(setup=setup, ranks=None)
    monkeypatch.setattr(session, "_session", started)
    latent = kind == "mla"
    return HybridLinearKVPool(
        32,
        torch.float32,
        16,
        head_num=2,
        head_dim=8,
        full_attention_layer_ids=FULL,
        device="cpu",
        mamba_pool=None,
        start_layer=0,
        full_kv_pool_class=HiSparseMLAPool if latent else HiSparseMHAPool,
        use_mla=latent,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
    )


@pytest.mark.parametrize("kind", SPECS)
def test_the_pool_has_the_layers_that_attend_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, spec = make_pool(kind, monkeypatch), SPECS[kind]
    host = pool.full_kv_pool.host
    assert host.num_bytes == 48 * format_of(spec).token_bytes
    slots = torch.tensor([47, 16, 21])
    k = torch.randn(3, spec.num_kv_heads, spec.head_dim)
    v = torch.randn(3, 2, 8) if kind == "mha" else k[..., :8]
    pool.set_kv_buffer(SimpleNamespace(layer_id=3), slots, k, v)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(host.layer(1).k[slot // 4, :, slot % 4], k[token])
        assert torch.equal(host.layer(1).v[slot // 4, :, slot % 4], v[token])
    assert not host.layer(0).k.any()
    assert torch.equal(pool.get_key_buffer(3)[slots], k)
    assert torch.equal(pool.get_value_buffer(3)[slots], v)
    with pytest.raises(ValueError, match="layer_id=2 not in full attention layers"):
        pool.get_key_buffer(2)


class Linear:
    """Stands in for SGLang's backend of linear layers."""

    needs_cpu_seq_lens = False

    def supports_prefill_graph_extend(self) -> bool:
        return False

    def forward_decode(self, layer: Any, **_: Any) -> str:
        return f"linear {layer.layer_id}"

    forward_extend = forward_decode


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_sglang_calls_the_backend_for_layers_that_attend(
    mode: ForwardMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def attention(layer: int, *tensors: Any) -> torch.Tensor:
        calls.append(layer)
        return tensors[0]

    backend = HiSparseAttnBackend.__new__(HiSparseAttnBackend)
    backend._layers, backend._last_layer = {1: 0, 3: 1}, 3
    backend._spec, backend._scale, backend.num_tokens = SPECS["mha"], 0.5, 1
    backend._in_graph = True
    backend.token_to_kv_pool = backend.req_to_token_pool = None
    backend.coordinator = SimpleNamespace(
        attention=attention, forward_end=lambda: calls.append("end")
    )
    monkeypatch.setattr(linear, "check_cuda_graph_backend", lambda *_: False)
    wrapper = linear.HybridLinearAttnBackend(backend, Linear(), FULL)
    batch = SimpleNamespace(forward_mode=mode, logical_forward_mode=mode)
    out = []
    for number in range(4):
        layer = SimpleNamespace(layer_id=number, tp_q_head_num=4, v_head_dim=8, scaling=0.5)
        q, k = torch.full((1, 32), float(number)), torch.zeros(1, 16)
        out.append(wrapper.forward(q=q, k=k, v=k, layer=layer, forward_batch=batch))
    assert calls == [0, 1, "end"]
    assert out[0] == "linear 0" and out[2] == "linear 2"
    assert torch.equal(out[1], torch.ones(1, 32)) and torch.equal(out[3], torch.full((1, 32), 3.0))


def model(*layers: int) -> torch.nn.Module:
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList(
        RadixAttention(4, 8, 0.5, num_kv_heads=2, layer_id=number) for number in layers
    )
    return made


def test_the_shape_counts_the_layers_that_attend() -> None:
    spec, _, layer_ids = read_model_shape(model(3, 1), torch.float32, 4, None, FULL)
    assert spec.num_layers == 2 and layer_ids == (1, 3)


@pytest.mark.parametrize(
    ("layers", "full", "words"),
    [
        ([1, 2], FULL, "numbers [1, 2]; expected [1, 3], as its configuration says"),
        (FULL, None, "numbers [1, 3]; expected attention in every layer"),
    ],
)
def test_layers_that_are_not_where_the_configuration_says(
    layers: list[int], full: list[int] | None, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_model_shape(model(*layers), torch.float32, 4, None, full)
    assert str(error.value).endswith(words)


def test_dense_layers_are_named_as_the_model_numbers_them() -> None:
    config = HiSparseConfig(dense_layers=(3,))
    hybrids.check_attending(config, FULL)
    spec = small_spec(num_q_heads=2, page_size=16)
    assert resolve_settings(config, spec, "layer", FULL).dense_layers == {1}
    with pytest.raises(ConfigError, match=r"got \[0\], expected some of .* that attend: 1, 3"):
        hybrids.check_attending(HiSparseConfig(dense_layers=(0, 1)), FULL)


def test_a_backend_is_put_beside_that_of_the_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell SGLang asserts that the name is one of a list."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Mixed"]))
    runner = SimpleNamespace(model_config=config)
    runner.prefill_attention_backend_str = runner.decode_attention_backend_str = "hisparse"
    seen: list[str] = []

    def wrap(runner: Any, backend: Any) -> Any:
        seen.append(runner.prefill_attention_backend_str)
        return SimpleNamespace(full_attn_backend=backend)

    def replace(runner: Any, backend: Any) -> Any:
        return SimpleNamespace(full_attn_backend="its own")

    ours = object()
    monkeypatch.setattr(session, "_session", None)
    assert hybrids.around_attn_backend_wrapper(replace, runner, ours).full_attn_backend != ours
    monkeypatch.setattr(session, "_session", SimpleNamespace())
    assert hybrids.around_attn_backend_wrapper(wrap, runner, ours).full_attn_backend is ours
    assert hybrids.around_attn_backend_wrapper(lambda _, own: own, runner, ours) is ours
    assert seen == ["flashinfer"] and runner.prefill_attention_backend_str == "hisparse"
    with pytest.raises(ConfigError, match="SGLang serves Mixed with SimpleNamespace"):
        hybrids.around_attn_backend_wrapper(replace, runner, ours)
