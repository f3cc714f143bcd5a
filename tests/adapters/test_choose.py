"""Which adapter is chosen, and the message when none supports the model."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from hisparse.adapters import ADAPTERS, TorchAdapter, TritonAdapter, choose_adapter
from hisparse.adapters import flash_attention as flash_attention_module
from hisparse.adapters.base import DeviceLimits
from hisparse.adapters.torch import attention_shared_bytes
from hisparse.config import HiSparseConfig
from hisparse.engine.build import resolve
from hisparse.engine.capabilities import check_capabilities
from hisparse.errors import ConfigError
from hisparse.kernels import quantize
from hisparse.types import UNSCALED, AttentionRule, KVSpec
from tests.adapters.interpreter import Interpreter
from tests.shapes import LLAMA, machine


def spec(**settings: Any) -> KVSpec:
    """Llama-3.1-8B's heads, changed by ``settings``."""
    return replace(LLAMA, num_layers=2, **settings)


#: Two GPUs by their shared memory.
L40S = DeviceLimits("NVIDIA L40S (sm_89)", 99 << 10)
A100 = DeviceLimits("NVIDIA A100 (sm_80)", 163 << 10)
LATENT = spec(num_kv_heads=1, head_dim=576, v_head_dim=512, attention="MLA")


@pytest.mark.parametrize("kv", [spec(), LATENT], ids=["gqa", "mla"])
def test_on_a_cpu_it_is_torch(kv: KVSpec) -> None:
    assert choose_adapter("cpu", kv, "layer") == ("torch", "the adapter for this device")


def test_on_cuda_it_is_the_first_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*names: str) -> tuple[str, str]:
        with monkeypatch.context() as patch:
            for name in ("triton", "flash_attention", "flashinfer"):
                why = "it is not installed" if name in names else None
                patch.setattr(ADAPTERS.get(name), "missing", classmethod(lambda cls, w=why: w))
            return choose_adapter("cuda", spec(), "kv_head")

    name, reason = without()
    assert name == "triton"
    assert "every scope" in reason
    assert without("triton") == ("flash_attention", "Triton cannot be used")
    assert without("triton", "flash_attention")[0] == "flashinfer"
    assert without("triton", "flash_attention", "flashinfer")[0] == "torch"


@pytest.fixture
def only_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attention", "flashinfer"):
        monkeypatch.setattr(ADAPTERS.get(name), "missing", classmethod(lambda cls: "not there"))
    monkeypatch.setattr(TritonAdapter, "missing", classmethod(lambda cls: None))


def test_a_device_without_the_shared_memory_is_refused_at_start(only_triton: None) -> None:
    """Triton would refuse the launch at the first decode step."""
    wide, bfloat16 = replace(LATENT, dtype=torch.float32), LATENT
    reason = "MLA in float32, NVIDIA L40S (sm_89) has 99 KiB"
    for wanted in (None, "triton", "torch"):
        with pytest.raises(ConfigError) as refused:
            choose_adapter("cuda", wide, "layer", wanted, device=L40S)
        assert f"{wanted or 'triton'} " in str(refused.value).replace("'", "")
        assert reason in str(refused.value)
        assert "\n" not in str(refused.value)
        assert choose_adapter("cuda", wide, "layer", wanted, device=A100).name in ("triton", wanted)
    assert choose_adapter("cuda", wide, "layer").name == "triton", "of a plan for another machine"
    assert choose_adapter("cpu", wide, "layer").name == "torch"
    for kv in (spec(), spec(dtype=torch.float32), spec(head_dim=256, v_head_dim=256), bfloat16):
        fits = attention_shared_bytes(kv) <= L40S.shared_bytes
        if fits:
            assert choose_adapter("cuda", kv, "layer", device=L40S).name == "triton"


def test_without_triton_its_shared_memory_refuses_nothing(
    only_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's operators attend then."""
    monkeypatch.setattr("hisparse.adapters.torch.find_spec", lambda name: None)
    monkeypatch.setattr(ADAPTERS.get("triton"), "missing", classmethod(lambda cls: "not there"))
    wide = replace(LATENT, dtype=torch.float32)
    for wanted in (None, "torch"):
        assert choose_adapter("cuda", wide, "layer", wanted, device=L40S).name == "torch"


@pytest.mark.parametrize("name", ["flash_attention", "flashinfer", "triton", "torch"])
def test_a_requested_adapter_that_fits_is_taken(interpreter: Interpreter, name: str) -> None:
    for scope in ADAPTERS.get(name).scopes:
        assert choose_adapter("cuda", spec(), scope, name) == (name, "requested")


@pytest.mark.parametrize(
    ("name", "device", "kv", "words"),
    [
        ("flashinfer", "cuda", LATENT, ["attention MLA", "GQA (", "can: dsa, flash_att"]),
        ("dsa", "cuda", spec(), ["attention GQA, it takes MLA", "flashinfer", "triton"]),
        ("triton", "cpu", spec(), ["device cpu, it takes cuda", "can: torch)"]),
        ("flash_attention", "cuda", spec(dtype=torch.float32), ["dtype float32", "bfloat16, fl"]),
        ("flashinfer", "cuda", spec(head_dim=96, v_head_dim=96), ["96 and 96", "64, 128, 256"]),
        ("flash_attention", "cuda", spec(head_dim=192), ["192 and 128 wide", "8 to 256"]),
    ],
    ids=["latent", "not-latent", "device", "dtype", "widths", "values-narrower"],
)
def test_an_unsupported_adapter_is_refused_and_the_others_are_named(
    interpreter: Interpreter, name: str, device: str, kv: KVSpec, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_adapter(device, kv, "layer", name)
    message = str(caught.value)
    assert all(word in message for word in [f"adapter '{name}' cannot do", *words]), message
    assert name not in message.partition("adapters that can:")[2]
    assert "\n" not in message


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("name", ["flash_attention", "flashinfer"])
def test_scales_are_refused_by_adapters_that_take_none(
    interpreter: Interpreter, name: str, dtype: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_adapter("cuda", spec(), "layer", name, scaled=dtype)
    expected = f"kv_cache_dtype {dtype}, it takes auto (adapters that can: torch, triton)"
    assert expected in str(caught.value)


def test_adapters_that_declare_scales_attend_by_them() -> None:
    declared = {name for name in ADAPTERS if ADAPTERS.get(name).scaled}
    assert declared == {"torch", "triton"}
    q = torch.zeros(1, 1, 8)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    stored = quantize(torch.ones(1, 1, 4, 8), torch.full((1, 1, 4, 8), 3.0), torch.int8)
    out, lse = ADAPTERS.get("torch")().attend(q, stored, table, lens, UNSCALED)
    assert (out == 3).all() and lse == 0


def test_an_adapter_without_caps_or_windows_is_not_for_layers_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plain(TorchAdapter):
        logit_cap: ClassVar[Any] = False
        window: ClassVar[Any] = False

    monkeypatch.setitem(ADAPTERS._entries, "plain", Plain)
    full, gemma = AttentionRule(0.1), AttentionRule(0.1, 50.0, 4096)
    assert choose_adapter("cpu", spec(), "layer", "plain", rules=[full]).name == "plain"
    with pytest.raises(ConfigError, match=r"'plain' cannot do logit_cap 50.0, it takes 0 \(none\)"):
        choose_adapter("cpu", spec(), "layer", "plain", rules=[full, gemma])
    with pytest.raises(ConfigError, match=r"cannot do window 512, it takes 0 .*can: torch\)"):
        choose_adapter("cpu", spec(), "layer", "plain", rules=[AttentionRule(0.1, window=512)])
    assert choose_adapter("cpu", spec(), "layer", rules=[full, gemma]).name == "torch"


def test_an_adapter_of_a_plugin_is_held_to_what_it_declares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Limited(TorchAdapter):
        scopes: ClassVar[Any] = ("layer",)
        page_sizes: ClassVar[Any] = (64, 128)

    monkeypatch.setitem(ADAPTERS._entries, "limited", Limited)
    assert choose_adapter("cpu", spec(page_size=64), "layer", "limited").name == "limited"
    with pytest.raises(ConfigError, match="cannot do page_size 16, it takes 64, 128"):
        choose_adapter("cpu", spec(), "layer", "limited")
    with pytest.raises(ConfigError, match=r"selection_scope kv_head, it takes layer \(.*torch"):
        choose_adapter("cpu", spec(page_size=64), "kv_head", "limited")


@pytest.mark.parametrize("name", ["flash_attention", "flashinfer"])
def test_without_the_library_the_names_that_work(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("sgl_kernel.flash_attn", "flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        choose_adapter("cuda", spec(), "layer", name)
    message = str(caught.value)
    assert f"adapter '{name}' cannot be used here: " in message
    assert "(adapters that can: torch, triton)" in message
    with pytest.raises(ConfigError, match=f"adapter '{name}'"):
        ADAPTERS.get(name)()


def test_flash_attention_knows_the_gpus_that_it_is_built_for(
    monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter
) -> None:
    monkeypatch.setattr(flash_attention_module, "compute_capability_major", lambda: 10)
    with pytest.raises(ConfigError, match="compute capability is 10.x"):
        choose_adapter("cuda", spec(), "layer", "flash_attention")
    monkeypatch.setattr(flash_attention_module, "compute_capability_major", lambda: 8)
    assert choose_adapter("cuda", spec(), "layer", "flash_attention").name == "flash_attention"
    with pytest.raises(ConfigError, match="on sm_90"):
        choose_adapter("cuda", LATENT, "layer", "flash_attention")


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(ConfigError, match="did you mean 'flashinfer'.*dsa, flash_attention"):
        choose_adapter("cpu", spec(), "layer", "flashinfr")


def test_triton_is_missed_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.adapters.torch.find_spec", lambda name: None)
    assert TritonAdapter.missing() == "Triton is not installed"
    with pytest.raises(ConfigError, match="'dsa' cannot be used here: Triton is not installed"):
        choose_adapter("cuda", LATENT, "layer", "dsa")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_setup_holds_the_adapter_and_refuses_one_that_does_not_fit(device: str) -> None:
    def adapter_of(**settings: Any) -> tuple[str, str]:
        config = HiSparseConfig(**settings)
        return resolve(config, spec(), 0.1, machine(device_type=device)).adapter

    assert adapter_of()[0] == {"cpu": "torch", "cuda": "triton"}[device]
    assert adapter_of(adapter="torch") == ("torch", "requested")
    message = {"cpu": "cannot do device cpu", "cuda": "cannot do attention GQA"}[device]
    with pytest.raises(ConfigError, match=f"adapter 'dsa' {message}"):
        adapter_of(adapter="dsa")


def test_before_the_model_is_known_its_device_and_library_are_checked() -> None:
    check_capabilities(HiSparseConfig(adapter="triton"), "cuda")
    for name in ("triton", "flash_attention", "dsa"):
        with pytest.raises(ConfigError, match="cannot do device cpu, it takes cuda"):
            check_capabilities(HiSparseConfig(adapter=name), "cpu")
