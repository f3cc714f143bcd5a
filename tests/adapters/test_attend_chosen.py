"""``attend_chosen``: each query attends over its own keys, as in DeepSeek-V3.2's prefill.

On a CPU ``auto`` masks all other keys, and rows are attended in C++. With TRITON_INTERPRET=1
(``test_triton_adapter.py``) rows are attended in Triton, and with HISPARSE_TEST_CUDA=1 (``make
gpu-check``) both are, on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from hisparse.adapters import ADAPTERS, Attended, BackendAdapter, TorchAdapter, merge_attended
from hisparse.adapters.torch import TritonAdapter
from hisparse.types import AttentionRule
from tests.adapters.interpreter import Interpreter
from tests.adapters.test_against_torch import ON_GPU, ON_TRITON


class InRows(TritonAdapter):
    """Triton's adapter, with attention that runs on a CPU."""

    impl = "triton" if ON_GPU or ON_TRITON else "cpu"


both = pytest.mark.parametrize("adapter", [TorchAdapter(), InRows()], ids=["auto", "rows"])
#: The interpreter is slow.
TOKENS = 20 if ON_TRITON else 600


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where all tensors lie; a grid of the interpreter has fewer rows than there are queries."""
    if ON_TRITON:
        monkeypatch.setattr("hisparse.kernels.attention.triton._MAX_ROWS", TOKENS - 3)
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield


@both
def test_each_query_sees_the_keys_chosen_for_it(adapter: BackendAdapter) -> None:
    torch.manual_seed(0)
    tokens, keys = TOKENS, 70
    q, k, v = torch.randn(tokens, 6, 24), torch.randn(keys, 2, 24), torch.randn(keys, 2, 16)
    chosen = torch.rand(tokens, keys).argsort(-1)[:, :9].int()
    chosen[3, 4:] = -1
    out, lse = adapter.attend_chosen(q, k, v, AttentionRule(0.2), chosen)
    for query in (0, 3, TOKENS - 1):
        seen = chosen[query][chosen[query] >= 0].long()
        own_k, own_v = (x[seen].double().repeat_interleave(3, dim=1) for x in (k, v))
        logits = torch.einsum("hd,shd->hs", q[query].double(), own_k) * 0.2
        expected = torch.einsum("hs,shd->hd", logits.softmax(-1), own_v)
        assert_close(out[query].double(), expected, rtol=1e-4, atol=1e-5)
        assert_close(lse[query].double(), logits.logsumexp(-1), rtol=1e-4, atol=1e-5)


@both
def test_tiles_in_which_a_query_has_no_key_add_nothing(adapter: BackendAdapter) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(5, 4, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    chosen = torch.rand(5, 40).argsort(-1)[:, :3].int()
    whole = adapter.attend_chosen(q, k, v, AttentionRule(0.3), chosen)
    merged: Attended | None = None
    for first in range(0, 40, 8):
        tile = slice(first, first + 8)
        part = adapter.attend_chosen(q, k[tile], v[tile], AttentionRule(0.3), chosen - first)
        empty = ((chosen < first) | (chosen >= first + 8)).all(-1)
        assert (part.out[empty] == 0).all()
        assert (part.lse[empty] == -torch.inf).all()
        merged = part if merged is None else merge_attended(merged, part)
    assert_close(merged, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(ON_GPU or ON_TRITON, reason="FlashMLA's interpreter computes on a CPU")
def test_flash_mla_reads_the_keys_chosen_for_each_query(interpreter: Interpreter) -> None:
    torch.manual_seed(2)
    q, latents = torch.randn(5, 64, 576).bfloat16(), torch.randn(70, 1, 576).bfloat16()
    given = q, latents, latents[..., :512], AttentionRule(0.05, window=3)
    chosen = torch.rand(5, 70).argsort(-1)[:, :9].int()
    chosen[1, ::2], chosen[3], chosen[4, 2] = -1, 70, -80
    out, lse = ADAPTERS.get("dsa")().attend_chosen(*given, chosen)
    assert interpreter.read == [[i for i in row if 0 <= i < 70] for row in chosen.tolist()]
    expected = TorchAdapter().attend_chosen(*given, chosen)
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), expected.out, rtol=2e-2, atol=1e-2)
    assert_close(lse, expected.lse, rtol=1e-4, atol=1e-4)
