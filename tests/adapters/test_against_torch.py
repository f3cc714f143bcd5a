"""Every adapter against ``torch``: each row's output and log-sum-exp, over ragged page tables.

``interpreter.py`` stands in for the libraries. With TRITON_INTERPRET=1
(``test_triton_adapter.py``) Triton's kernel runs, and with HISPARSE_TEST_CUDA=1
(``make gpu-check``) the installed libraries run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hisparse.adapters import ADAPTERS, TorchAdapter, choose_adapter
from hisparse.errors import ConfigError
from hisparse.types import AttentionRule
from tests.adapters.cases import Case, cases

ON_GPU = os.environ.get("HISPARSE_TEST_CUDA") == "1"
ON_TRITON = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = [name for name in ADAPTERS if name != "torch"]
if not ON_GPU:
    NAMES = ["triton", "dsa"] if ON_TRITON else ["flash_attention", "flashinfer", "dsa"]
ALL = [
    case
    for dtype in (torch.bfloat16, torch.float16 if ON_GPU else torch.float32)
    for rule in ({}, {"logit_cap": 2.0, "window": 17})
    for case in cases(dtype=dtype, device="cuda" if ON_GPU else "cpu", **rule)
]


def supports(name: str, case: Case) -> bool:
    """Whether the adapter supports a case and, on a GPU, whether it can run there."""
    cls = ADAPTERS.get(name)
    if not ON_GPU:
        # FlashMLA takes only bf16, no cap and no window. The others run in float32 too, where
        # rounding shows less.
        flash_mla = name == "dsa" and not ON_TRITON
        flash_takes = case.dtype == torch.bfloat16 and not (case.window or case.logit_cap)
        return case.spec.attention in cls.attention and (flash_takes or not flash_mla)
    try:
        choose_adapter("cuda", case.spec, case.scope, name, rules=[case.rule])
    except ConfigError:
        return False
    return True


PAIRS = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name in NAMES
    for case in ALL
    if supports(name, case)
]


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    """Installed libraries on a GPU; none for Triton's interpreter, so that ``dsa`` uses Triton."""
    if not (ON_GPU or ON_TRITON):
        request.getfixturevalue("interpreter")


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_output_and_lse_are_those_of_torch(name: str, case: Case) -> None:
    q, kv, table, lens, rule = case.arguments()
    attended = ADAPTERS.get(name)().attend(q, kv, table, lens, rule)
    assert attended.out.dtype in (torch.float32, q.dtype)
    assert attended.lse.dtype == torch.float32
    out, lse = (x.cpu() for x in attended)
    # Always on the CPU: on a GPU the adapter ``torch`` may use Triton's kernel.
    expected = TorchAdapter().attend(*replace(case, device="cpu").arguments())
    exact = case.dtype == torch.float32
    # Libraries round their output, the kernels for MLA their queries too, to the pages' dtype.
    assert_close(out.float(), expected.out, **({} if exact else {"rtol": 2e-2, "atol": 1e-2}))
    rounded: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2}
    assert_close(lse, expected.lse, **({"rtol": 1e-5, "atol": 1e-5} if exact else rounded))
    empty = lens.cpu() == 0
    assert (out[empty] == 0).all()
    assert (lse[empty] == -torch.inf).all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", [n for n in NAMES if supports(n, Case(device=ALL[0].device))])
@pytest.mark.parametrize(
    ("rule", "first_key"),
    [
        pytest.param(AttentionRule(0.2), -70, id="plain"),
        pytest.param(AttentionRule(0.2, 1.5), -70, id="cap"),
        pytest.param(AttentionRule(0.2, 0.0, 90), -70, id="window"),
        pytest.param(AttentionRule(0.2, 1.5, 13), -70, id="cap-and-window-of-few-queries"),
        pytest.param(AttentionRule(0.2, 0.0, 1), -70, id="window-of-one"),
        pytest.param(AttentionRule(0.2, 0.0, 60), -100, id="far-tile"),
        pytest.param(AttentionRule(0.2, 0.0, 13), -100, id="tile-before-all-windows"),
    ],
)
def test_prefill(name: str, rule: AttentionRule, first_key: int, causal: bool) -> None:
    torch.manual_seed(0)
    keys, device, dtype = 40 if causal else 70, ALL[0].device, torch.bfloat16
    first_key = 0 if causal else first_key
    q = torch.randn(40, 8, 64).to(device, dtype)
    k, v = torch.randn(2, keys, 2, 64).to(device, dtype)
    how: dict[str, Any] = {"causal": causal, "first_key": first_key}
    out, lse = ADAPTERS.get(name)().attend_prefill(q, k, v, rule, **how)
    expected = TorchAdapter().attend_prefill(*(x.cpu().float() for x in (q, k, v)), rule, **how)
    assert_close(out.cpu().float(), expected.out, rtol=2e-2, atol=2e-2)
    assert_close(lse.cpu(), expected.lse, rtol=1e-2, atol=1e-2)
