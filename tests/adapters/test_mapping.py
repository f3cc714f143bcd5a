"""Adapters make libraries read exactly the tokens of each row, in order."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hisparse.adapters import ADAPTERS, TorchAdapter
from hisparse.adapters.dsa import make_flash_mla_call
from hisparse.adapters.flash_attention import make_flash_attention_call
from hisparse.adapters.flashinfer import make_flashinfer_call
from hisparse.testing.operations import no_sync
from tests.adapters.cases import Case, cases
from tests.adapters.interpreter import Interpreter

PAIRS = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name in ("flash_attention", "flashinfer", "dsa")
    for window in (0, 17)
    for case in cases(lens=(37, 0, 1, 64, 16, 33, 130), window=window)
    # FlashMLA has no window: Triton attends then.
    if case.spec.attention in ADAPTERS.get(name).attention and not (name == "dsa" and window)
]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_the_tokens_read_are_those_of_the_page_table(
    interpreter: Interpreter, name: str, case: Case
) -> None:
    ADAPTERS.get(name)().attend(*case.arguments())
    # The plan's other rows read nothing.
    rows = len(case.lens)
    assert interpreter.read[:rows] == case.tokens()
    assert not any(interpreter.read[rows:])


@pytest.mark.parametrize("case", cases(), ids=str)
def test_no_key_is_copied(case: Case) -> None:
    q, kv, table, lens, rule = case.arguments()
    attention = make_flash_attention_call(q, kv, table, lens, rule)
    views = [attention.k_cache, attention.v_cache]
    if case.latent:
        views.append(make_flash_mla_call(q, kv, table, lens, rule, 64).kv)
    else:
        lists = make_flashinfer_call(q, kv, table, lens)
        views += [lists.k, lists.v]
    held = {x.untyped_storage().data_ptr() for x in kv}
    assert all(view.untyped_storage().data_ptr() in held for view in views)


def test_latents_in_another_layout_are_an_error_not_a_copy() -> None:
    q, kv, *others = Case(scope="layer", latent=True).arguments()
    apart = kv.k[:, :, :8]
    with pytest.raises(RuntimeError, match="view"):
        make_flash_mla_call(q, type(kv)(apart, apart[..., :512]), *others, 64)


@pytest.mark.parametrize("name", ["flash_attention", "flashinfer", "dsa"])
def test_no_value_of_a_tensor_is_read_on_the_host(
    monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter, name: str
) -> None:
    """From the second call of a shape on, without the library's own part."""
    adapter: Any = ADAPTERS.get(name)()
    case = Case(scope="layer", latent=name == "dsa")
    q, kv, table, lens, rule = case.arguments()
    out, lse = torch.zeros(8, 64, case.spec.v_head_dim), torch.zeros(8, 64)
    adapter.attend(q, kv, table, lens, rule)
    if name == "flash_attention":
        adapter._functions = [lambda **call: (out[:6, None], lse[:6, ..., None])]
    elif name == "dsa":
        adapter._attend = lambda **call: (out[:6], None, lse[:6])
    else:
        (wrapper,) = adapter._wrappers.values()
        monkeypatch.setattr(wrapper._wrapper, "run", lambda *args, **kwargs: (out, lse))
    with no_sync(name):
        adapter.attend(q, kv, table, lens, rule)


def test_a_plan_serves_all_lengths_and_fewer_rows(interpreter: Interpreter) -> None:
    """FlashInfer's plan depends only on shapes, so that steps with other requests share it."""
    adapter = ADAPTERS.get("flashinfer")()
    for lens in [(37, 0, 1, 64, 16, 33), (1, 2, 3, 64, 64, 64), (64, 60, 1, 0, 33), (0,) * 5]:
        case = Case(lens=(*lens[:-1], 64), seed=sum(lens))
        arguments = case.arguments()
        out, lse = adapter.attend(*arguments)
        expected = TorchAdapter().attend(*arguments)
        assert_close(out.float(), expected.out, rtol=2e-2, atol=1e-2)
        assert_close(lse, expected.lse, rtol=1e-4, atol=1e-4)
        assert interpreter.read == case.tokens() + [[]] * (8 - len(case.lens))
    assert interpreter.num_plans == 1


def test_flash_mla_of_either_build_gives_a_natural_lse(
    monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter
) -> None:
    arguments = Case(scope="layer", latent=True).arguments()
    older = ADAPTERS.get("dsa")().attend(*arguments)

    def newer(*, use_legacy: bool, return_log2_lse: bool | None = None, **call: Any) -> Any:
        assert use_legacy
        assert return_log2_lse is None
        out, most, lse = interpreter.flash_mla_sparse_fwd(**call)
        return out, most, lse * torch.log(torch.tensor(2.0))

    monkeypatch.setitem(sys.modules, "flash_mla", SimpleNamespace(flash_mla_sparse_fwd=newer))
    assert_close(ADAPTERS.get("dsa")().attend(*arguments), older)
    expected = TorchAdapter().attend(*arguments)
    assert_close(older.lse, expected.lse, rtol=1e-4, atol=1e-4)
