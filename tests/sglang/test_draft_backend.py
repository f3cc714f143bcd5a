"""A draft model's attention over SGLang's own pool, and the memory that its pool is charged."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from hisparse.cache.formats import format_of
from hisparse.errors import ConfigError
from hisparse.sglang import features, hooks, session
from hisparse.sglang.features import speculation
from hisparse.sglang.features.dsa.pools import DraftDSAPool, HiSparseDSAPool
from hisparse.sglang.features.speculation import draft_backend
from hisparse.sglang.features.speculation.draft_backend import DraftAttnBackend, DraftSteps
from hisparse.sglang.features.speculation.draft_model import (
    around_create_decode_backend,
    around_create_draft_extend_backend,
    draft_token_bytes,
    sglang_draft_bytes,
)
from hisparse.sglang.kv_pool import HiSparseMHAPool
from tests.shapes import small_spec

Q_HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6
SLOTS = 64

#: Heads and width of queries, keys and values.
_SHAPES = ((Q_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM))


class Pool:
    """K and V by slot, as SGLang's pools have them."""

    def __init__(self) -> None:
        self.keys = torch.zeros(SLOTS, KV_HEADS, DIM)
        self.values = torch.zeros(SLOTS, KV_HEADS, V_DIM)

    def set_kv_buffer(self, layer: Any, loc: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[loc], self.values[loc] = k, v

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values


def layer(window: int = -1) -> SimpleNamespace:
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=Q_HEADS,
        qk_head_dim=DIM,
        v_head_dim=V_DIM,
        scaling=DIM**-0.5,
        sliding_window_size=window,
    )


def expected(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of the last of all tokens: ``q [Hq, D]``, ``k, v [T, Hkv, D]``."""
    group = Q_HEADS // KV_HEADS
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("hd,thd->ht", q, k) * DIM**-0.5
    if window >= 0:
        logits[:, : max(0, len(k) - 1 - window)] = -torch.inf
    return torch.einsum("ht,thd->hd", logits.softmax(-1), v)


@pytest.mark.parametrize("window", [-1, 3])
def test_prompts_drafts_and_verified_tokens_attend_what_precedes_them(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """A prompt in two chunks, three drafted tokens, then four tokens that replace them."""
    monkeypatch.setattr(draft_backend, "_QUERIES", 4)
    torch.manual_seed(1)
    order = torch.randperm(SLOTS)
    table = order.view(2, -1).int()
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=Pool()
    )
    lengths = [11, 7]
    data = [tuple(torch.randn(32, n, d) for n, d in _SHAPES) for _ in lengths]

    def run(backend: Any, mode: ForwardMode, starts: list[int], ends: list[int]) -> None:
        spans = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
        slots = torch.cat([table[r, s].long() for r, s in enumerate(spans)])
        batch.forward_mode, batch.out_cache_loc = mode, slots
        batch.extend_prefix_lens_cpu = starts
        batch.extend_seq_lens_cpu = [b - a for a, b in zip(starts, ends, strict=True)]
        if mode != ForwardMode.DECODE:
            backend.init_forward_metadata(batch)
        q, k, v = (torch.cat([d[i][s] for d, s in zip(data, spans, strict=True)]) for i in range(3))
        out = backend.forward(q.flatten(1), k, v, layer(window), batch, topk_indices=None)
        wanted = [
            expected(d[0][t], d[1][: t + 1], d[2][: t + 1], window)
            for d, s in zip(data, spans, strict=True)
            for t in range(s.start, s.stop)
        ]
        torch.testing.assert_close(out.view(-1, Q_HEADS, V_DIM), torch.stack(wanted))

    batch = SimpleNamespace(req_pool_indices=torch.tensor([0, 1]))
    extend = DraftAttnBackend(runner)
    run(extend, ForwardMode.EXTEND, [0, 0], [5, 6])
    run(extend, ForwardMode.EXTEND, [5, 6], lengths)
    steps = DraftSteps(runner, 3)
    batch.forward_mode, batch.seq_lens_cpu = ForwardMode.DECODE, torch.tensor(lengths)
    steps.init_forward_metadata(batch)
    for number, backend in enumerate(steps.attn_backends):
        starts = [n + number for n in lengths]
        run(backend, ForwardMode.DECODE, starts, [n + 1 for n in starts])
    for length, request in zip(lengths, data, strict=True):
        for part in request:
            part[length:] = torch.randn_like(part[length:])
    run(extend, ForwardMode.DRAFT_EXTEND_V2, lengths, [n + 4 for n in lengths])


def test_only_draft_models_of_hisparse_get_its_backends() -> None:
    pools = {"req_to_token_pool": None, "token_to_kv_pool": None}
    factory = SimpleNamespace(
        draft_attn_backend="triton",
        speculative_num_steps=3,
        draft_model_runner=SimpleNamespace(**pools),
    )
    for around in (around_create_decode_backend, around_create_draft_extend_backend):
        assert around(lambda given: "stock", factory) == "stock"
    factory.draft_attn_backend = "hisparse_draft"
    steps = around_create_decode_backend(lambda given: "stock", factory)
    assert len(steps.attn_backends) == 2
    factory.speculative_num_steps = 1
    assert around_create_decode_backend(lambda given: "stock", factory) is None
    backend = around_create_draft_extend_backend(lambda given: "stock", factory)
    assert backend.prefill_attention_backend_str == "hisparse_draft"


def test_the_draft_models_pool_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[int] | None] = [None]
    monkeypatch.setattr(
        "hisparse.sglang.features.speculation.draft_model.hybrid_layers", lambda model: found[0]
    )
    draft = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Lfm2ForCausalLM"]),
        attention_arch=AttentionArch.MHA,
        get_num_kv_heads=lambda ranks: 2,
        head_dim=32,
        v_head_dim=16,
        kv_lora_rank=64,
        qk_rope_head_dim=8,
        dtype=torch.bfloat16,
    )
    aux = SimpleNamespace(draft_model_config=draft, draft_kv_num_layers=3, eagle_draft_num_layers=3)
    configurator = SimpleNamespace(spec_aux_config=aux, kv_cache_dtype=torch.float32)
    assert draft_token_bytes(configurator) == 3 * 2 * (32 + 16) * 2
    draft.attention_arch = AttentionArch.MLA
    assert draft_token_bytes(configurator) == 3 * (64 + 8) * 2
    found[0] = [1, 3]
    with pytest.raises(ConfigError, match=r"the draft model is a hybrid \(Lfm2ForCausalLM\); "):
        draft_token_bytes(configurator)
    found[0] = None
    spec = small_spec()
    # SGLang takes the draft's layers as equal to the target's.
    assert sglang_draft_bytes(configurator, spec) == format_of(spec).token_bytes * 3 // 2
    nothing = SimpleNamespace(
        spec_aux_config=SimpleNamespace(draft_model_config=None, eagle_draft_num_layers=None),
        kv_cache_dtype=torch.float32,
    )
    assert (draft_token_bytes(nothing), sglang_draft_bytes(nothing, spec)) == (0, 0)


def test_the_pool_after_the_targets_is_that_of_a_draft_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(pool=None)
    monkeypatch.setattr(session, "_session", now)
    monkeypatch.setenv(features.IN_USE, "server dsa")
    ask = partial(hooks.around_get_kv_pool_cls, lambda platform, *, kind: kind, None)
    assert (ask(kind="mha"), ask(kind="dsa")) == (HiSparseMHAPool, HiSparseDSAPool)
    now.pool = object()
    assert (ask(kind="mha"), ask(kind="mla"), ask(kind="dsa")) == ("mha", "mla", DraftDSAPool)


def test_a_draft_models_latents_have_no_index_keys() -> None:
    pool = DraftDSAPool(
        32,
        page_size=16,
        dtype=torch.float32,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=1,
        index_head_dim=128,
        kv_cache_dim=12,
    )
    assert pool.get_kv_size_bytes() == (32 + 16) * 12 * 4
    assert pool.get_key_buffer(0).shape == (48, 1, 12)
    assert pool.get_value_buffer(0).shape == (48, 1, 8)


def test_a_draft_models_forwards_leave_the_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's requests stay, and its verifications are told what is accepted."""
    accepted: list[Tensor] = []
    drafts = SimpleNamespace(accept_lengths=accepted.append)
    now = SimpleNamespace(requests="the target's", get=lambda cls: drafts)
    monkeypatch.setattr(session, "_session", now)
    draft = SimpleNamespace(is_draft_worker=True)
    hooks.around_init_new(lambda *_: None, object, SimpleNamespace(reqs="the draft's"), draft)
    assert now.requests == "the target's"
    result = SimpleNamespace(accept_lens=torch.tensor([2, 1]))
    assert speculation.around_run_eagle_verify(lambda batch: result, None) is result
    assert accepted == [result.accept_lens]
