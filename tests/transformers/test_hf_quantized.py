"""A cache in eight bits gives the tokens of dense attention over rounded K and V, in every use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from hisparse.cache.formats import format_of
from hisparse.transformers import DB, build, disable, enable
from tests.transformers.hf_models import ROOMY, SMALL, continuation, left_padded, prompt

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
DTYPES = pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])


@DTYPES
def test_tokens_are_those_of_dense_attention_over_rounded_k_and_v(
    net: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = left_padded((333, 160, 47), seed=3)
    exact = continuation(net, ids, 40, attention_mask=mask)
    settings = ROOMY | {"kv_cache_dtype": dtype}
    cache = enable(net, settings, max_batch_size=3, max_length=400)
    kv, update = cache.coordinator.policy.kv, DynamicLayer.update

    def rounded(self: Any, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        return update(self, *format_of(kv).as_read(k, v), *args, **options)

    ours = continuation(net, ids, 40, cache, attention_mask=mask)
    disable(net)
    monkeypatch.setattr(DynamicLayer, "update", rounded)
    assert continuation(net, ids, 40, attention_mask=mask) == ours
    assert ours != exact, "eight bits show in 120 tokens"


@DTYPES
def test_memory_is_asked_for_what_is_stored(
    net: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, memory = [], build._memory

    def recorded(config: Any, needed: int, device: torch.device) -> tuple[int, int]:
        asked.append(needed)
        return memory(config, needed, device)

    monkeypatch.setattr(build, "_memory", recorded)
    for settings in (ROOMY, ROOMY | {"kv_cache_dtype": dtype}):
        enable(net, settings, max_length=400)
        disable(net)
    plain, stored = asked
    assert stored < plain / 3, "float32 has four bytes, a code one and a part of a scale"


def test_a_later_turn_a_fork_and_a_store_read_the_same_values(net: Any, tmp_path: Path) -> None:
    text, question = prompt(333, seed=1), prompt(9, seed=2)
    whole = torch.cat([text, question], 1)
    cache = enable(net, SMALL | FP8, max_batch_size=3, max_length=400)
    alone = continuation(net, whole, 20, cache)
    cache.reset()
    with torch.no_grad():
        net(text, past_key_values=cache)
    with cache.fork(2) as rows:
        assert continuation(net, whole.expand(2, -1), 20, rows) == alone * 2
    assert continuation(net, whole, 20, cache) == alone
    for computed in (342, 6):
        with DB(tmp_path, net, SMALL | FP8, max_length=400) as db:
            session, rest = db.create_session(whole[0])
            assert len(rest) == computed
            assert continuation(net, whole, 20, session.cache) == alone
            session.store(whole[0])


def test_pages_hold_what_is_stored_and_no_other_cache_takes_them(net: Any, tmp_path: Path) -> None:
    text, bytes_of = prompt(322, seed=1)[0], {}
    for name in ("auto", "fp8_e4m3", "int8"):
        with DB(tmp_path, net, SMALL | {"kv_cache_dtype": name}, max_length=400) as db:
            session, rest = db.create_session(text)
            assert len(rest) == len(text), "pages of the other dtype are not found"
            with session, torch.no_grad():
                net(text[None], past_key_values=session.cache)
                session.store(text)
            bytes_of[name] = db.counters["put_bytes"]
    # From float32; a scale of one byte goes with each vector.
    assert 0.25 < bytes_of["fp8_e4m3"] / bytes_of["auto"] < 0.29
    assert bytes_of["int8"] == bytes_of["fp8_e4m3"]


def test_half_precision_reads_exactly_what_is_stored(net: Any) -> None:
    """In fp8, a bf16 model gives the same logits for a prompt at once and token by token."""
    half = type(net)(type(net.config).from_dict(net.config.to_dict())).to(torch.bfloat16).eval()
    text = prompt(100, seed=5)
    logits = []
    for widths in ([100], [40] + [1] * 60):
        cache = enable(half, ROOMY | FP8, max_length=128)
        with torch.no_grad():
            parts = [half(x, past_key_values=cache).logits for x in text.split(widths, dim=1)]
        logits.append(torch.cat(parts, 1).float())
        disable(half)
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[0].abs().max()
