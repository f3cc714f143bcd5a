"""Which kernel attends a chunk on a GPU, with fake CUDA tensors, and what it is called with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from hisparse.kernels import chunk_attention, operation
from hisparse.kernels.attention import cuda, reference
from hisparse.kernels.attention.op import CHUNK_ATTENTION
from hisparse.types import AttentionRule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called, in place of those that need a GPU."""
    called: list[str] = []

    def triton(
        query: Tensor, k: Tensor, v: Tensor, causal: bool, rule: AttentionRule, first_key: int
    ) -> tuple[Tensor, Tensor]:
        called.append("triton")
        out = query.new_empty(*query.shape[:2], v.shape[-1])
        return out, query.new_empty(query.shape[:2], dtype=FP32)

    def attend(
        query: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        called.append("flash")
        return original(query, k, v, causal, scale)

    original = cuda.flash_attention
    # Other tests of this process may run on fibers, where Triton does not.
    monkeypatch.setattr(operation, "why_no_triton", lambda: None)
    monkeypatch.setitem(CHUNK_ATTENTION.functions, "triton", triton)
    monkeypatch.setattr(cuda, "flash_attention", attend)
    monkeypatch.setattr(cuda, "_has_flash", lambda device: True)
    monkeypatch.setattr("hisparse.kernels.build.cuda.cuda_library", lambda: object())
    return called


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "prefix"])
@pytest.mark.parametrize(
    ("heads", "widths", "dtypes", "keys", "expected"),
    [
        pytest.param((32, 8), (128, 128), (BF16, BF16), 640, "flash", id="gqa"),
        pytest.param((8, 8), (256, 256), (FP16, FP16), 640, "flash", id="mha"),
        pytest.param((128, 1), (576, 512), (BF16, BF16), 640, "triton", id="mla"),
        pytest.param((16, 16), (192, 128), (BF16, BF16), 640, "triton", id="narrow-values"),
        pytest.param((8, 2), (128, 128), (FP32, FP32), 640, "triton", id="fp32"),
        pytest.param((8, 2), (128, 128), (FP32, BF16), 640, "triton", id="fp32-query"),
        pytest.param((8, 2), (264, 264), (BF16, BF16), 640, "triton", id="too-wide"),
        pytest.param((8, 2), (100, 100), (BF16, BF16), 640, "triton", id="odd-width"),
        pytest.param((8, 2), (128, 128), (BF16, BF16), 0, "triton", id="no-keys"),
    ],
)
def test_pytorch_s_kernel_where_it_can_else_triton_s(
    calls: list[str],
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    keys: int,
    expected: str,
    causal: bool,
) -> None:
    tokens = keys if causal else 512
    with FakeTensorMode():
        query = torch.empty(tokens, heads[0], widths[0], dtype=dtypes[0], device="cuda")
        latent = torch.empty(keys, heads[1], max(widths), dtype=dtypes[1], device="cuda")
        k, v = latent, latent.narrow(-1, 0, widths[1])
        out, lse = chunk_attention(query, k, v, causal=causal, rule=AttentionRule(0.1))
    if tokens:
        assert calls == [expected]
    assert (out.shape, out.dtype) == ((tokens, heads[0], widths[1]), dtypes[0])
    assert (lse.shape, lse.dtype) == ((tokens, heads[0]), FP32)
    assert out.device.type == lse.device.type == "cuda"


def test_rows_that_are_not_aligned_are_not_given_to_pytorch(calls: list[str]) -> None:
    with FakeTensorMode():
        part = torch.empty(64, 8, 132, dtype=BF16, device="cuda").narrow(-1, 0, 128)
        moved = torch.empty(64, 8, 136, dtype=BF16, device="cuda").narrow(-1, 1, 128)
        dense = torch.empty(64, 8, 128, dtype=BF16, device="cuda")
        for tensors in ((part, dense, dense), (dense, dense, moved)):
            chunk_attention(*tensors, causal=True)
    assert calls == ["triton", "triton"]


def test_a_pytorch_without_flash_attention_uses_triton(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_has_flash", lambda device: False)
    with FakeTensorMode():
        q, k = (torch.empty(64, n, 128, dtype=BF16, device="cuda") for n in (8, 2))
        chunk_attention(q, k, k, causal=True)
    assert calls == ["triton"]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "prefix"])
def test_pytorch_s_operator_gets_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """Its CPU namesake, which takes as many key as query heads, in its place."""

    def on_cpu(
        q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> tuple[Tensor, ...]:
        assert (dropout, debug) == (0.0, False)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        found: tuple[Tensor, ...] = operator(q, k, v, 0.0, causal, scale=scale)
        return found

    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    aten = SimpleNamespace(_scaled_dot_product_flash_attention=on_cpu)
    monkeypatch.setattr(torch.ops, "aten", aten)
    q, keys = torch.randn(45, 6, 32), 45 if causal else 80
    k, v = torch.randn(2, keys, 2, 32)
    out, lse = cuda.flash_attention(q, k, v, causal, 0.2)
    expected = reference.chunk_attention(q, k, v, causal, AttentionRule(0.2))
    assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    assert_close(lse, expected[1], rtol=1e-4, atol=1e-5)
