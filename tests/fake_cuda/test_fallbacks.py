"""With every adapter, and without CUDA or Triton, steps are captured or a line says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.adapters import ADAPTERS, dsa
from hisparse.adapters import libraries as adapter_libraries
from hisparse.config import HiSparseConfig
from hisparse.engine import capabilities
from hisparse.engine.capabilities import not_captured
from hisparse.kernels import operation
from hisparse.kernels.build import cuda as build_cuda
from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.engine import KINDS, MODELS, FakeEngine, model
from tests.fake_cuda.launches import WrongDevice
from tests.fake_cuda.test_launches import NAMES, algorithm_of, scope_of

CONTEXT = 4096


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """FlashAttention's shapes: ``q [B, T, Q, D]``, lse ``[B, Q, T]``."""
    batch, tokens, heads, _ = q.shape
    lse = q.new_empty(batch, heads, tokens, dtype=torch.float32)
    return q.new_empty(batch, tokens, heads, v_cache.shape[-1]), lse


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashMLA's shapes."""
    lse = q.new_empty(*q.shape[:2], dtype=torch.float32)
    return q.new_empty(*q.shape[:2], d_v), lse, lse


def single_prefill_with_kv_cache(q: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """FlashInfer's shapes."""
    return torch.empty_like(q), q.new_empty(*q.shape[:2], dtype=torch.float32)


class Wrapper:
    """FlashInfer's wrapper: ``plan`` copies from the host, which no graph can hold."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        self._device = workspace.device

    def plan(self, indptr: Tensor, *_: Any, **options: Any) -> None:
        indptr.to(self._device)

    def run(self, q: Tensor, kv: Any, *, return_lse: bool) -> tuple[Tensor, Tensor]:
        return single_prefill_with_kv_cache(q)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention libraries are there, for sm_90."""
    found = {
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
        "BatchDecodeWithPagedKVCacheWrapper": Wrapper,
        "single_prefill_with_kv_cache": single_prefill_with_kv_cache,
    }
    monkeypatch.setattr(adapter_libraries, "import_function", lambda name, *_: found[name])
    monkeypatch.setattr(dsa, "_find_flash_mla", lambda: (flash_mla_sparse_fwd, {}, True))


def capture(name: str, kind: str, adapter: str, *, warm_up: bool = True, **absent: Any) -> None:
    """Capture a step as SGLang does, after a step of its shape."""
    algorithm = algorithm_of(name)
    sizes = algorithm.page_sizes
    with fake_cuda() as launches, pytest.MonkeyPatch.context() as patch:
        for module, function in ((operation, "why_no_triton"), (build_cuda, "cuda_library")):
            if function in absent:
                patch.setattr(module, function, lambda function=function: absent[function])
        spec = model(kind, sizes and sizes[0])
        engine = FakeEngine(
            launches, algorithm, spec, scope_of(algorithm), context=CONTEXT, adapter=adapter
        )
        if warm_up:
            engine.captured(warm_up=True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        engine.captured()
        assert launches.all


@pytest.mark.parametrize("adapter", list(ADAPTERS))
def test_steps_of_every_adapter_are_captured(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "why_no_cuda", lambda: None)
    assert not_captured(HiSparseConfig(adapter=adapter), "cuda") is None
    for kind in MODELS:
        if model(kind).attention in ADAPTERS.get(adapter).attention:
            capture("quest", kind, adapter)


def test_a_graph_cannot_hold_flashinfer_s_plan() -> None:
    with pytest.raises(WrongDevice, match="from cpu to cuda:0 in a captured step"):
        capture("quest", "GQA", "flashinfer", warm_up=False)


@pytest.mark.parametrize("name", NAMES)
def test_steps_without_triton_are_captured(name: str) -> None:
    capture(name, KINDS[algorithm_of(name).indexer][0], "torch", why_no_triton="no Triton")


def test_steps_without_cuda_kernels_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "why_no_cuda", lambda: "no nvcc found")
    reason = not_captured(HiSparseConfig(), "cuda")
    assert reason == "there are no CUDA kernels (no nvcc found)"
    with pytest.raises(WrongDevice, match="from cuda:0 to cpu in a captured step"):
        capture("quest", "GQA", "triton", warm_up=False, cuda_library=None)


def test_an_adapter_says_that_it_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "why_no_cuda", lambda: None)
    monkeypatch.setattr(ADAPTERS.get("torch"), "capturable", False)
    reason = not_captured(HiSparseConfig(adapter="torch"), "cuda")
    assert reason == "adapter torch does not support it"
