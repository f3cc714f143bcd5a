"""SGLang's own test kit of attention backends, with this one: its cases, layouts and reference.

Prefixes of a prompt are written through the KV pool, as if the radix cache had them. The prefix of
a decode step is prefilled through the backend: its last page lies on the device. Not run are the
layout ``non_monotonic_extend``, which breaks pages apart as no page allocator does, and the parts
of the kit for what hisparse refuses: linear attention, speculative decoding, and models that write
K/V past the backend, as the models of ``mla_attention`` and ``dsa_attention`` do.
The runners of graphs need CUDA.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit

from hisparse.config import HiSparseConfig
from hisparse.engine.build import resolve
from hisparse.sglang import hooks, plugin, session
from hisparse.sglang.kv_pool import HiSparseMHAPool
from hisparse.types import KVSpec
from tests.shapes import machine

CASES = (
    *kit.make_dense_cases("hisparse"),
    *kit.make_swa_no_prefix_input_config_cases("hisparse"),
    *kit.make_swa_prefix_input_config_cases("hisparse"),
    *(
        replace(case, name=f"swa_{case.name}", sliding_window_size=20)
        for case in kit.make_dense_cases("hisparse")
        if case.forward_mode.is_decode()
    ),
)
LAYOUTS = ["contiguous", "shuffled_pages", "interleaved_pages"]
#: Slots of a request in the kit's pool, in tokens: a multiple of every page size.
CONTEXT = 256
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins()
    plugin.install_hooks()
    monkeypatch.setattr(session, "_session", None)


def host_pool(case: kit.DenseAttentionCase) -> Any:
    """What the kit calls in place of SGLang's pool: the hooks' work, then hisparse's pool."""

    def make(**options: Any) -> HiSparseMHAPool:
        size, dtype, dim = options["page_size"], options["dtype"], options["head_dim"]
        heads = options["head_num"]
        spec = KVSpec(
            num_layers=1,
            num_q_heads=case.num_heads,
            num_kv_heads=heads,
            head_dim=dim,
            v_head_dim=dim,
            dtype=dtype,
            page_size=size,
            # The kit counts the tokens before the query's own, as SGLang does.
            windows=() if case.sliding_window_size is None else (case.sliding_window_size + 1,),
        )
        config = HiSparseConfig(
            page_size=size, budget=CONTEXT, device_buffer_size=CONTEXT, checked=True
        )
        resources = machine(context_length=CONTEXT, max_requests=case.batch_size, host_bytes=2**30)
        setup = resolve(config, spec, dim**-0.5, resources)
        session.start_session(session.ServerSession(setup=setup))
        return HiSparseMHAPool(**options)

    return make


def forward_batch(make: Callable[..., ForwardBatch], *args: Any, **options: Any) -> ForwardBatch:
    """The kit's batch, with what SGLang's scheduler adds and what the hook takes from there."""
    batch = make(*args, **options)
    batch.rids = [str(row) for row in range(batch.batch_size)]
    scheduled = SimpleNamespace(
        reqs=[], req_pool_indices_cpu=batch.req_pool_indices, chunked_req=None
    )
    for slot in batch.req_pool_indices.tolist():
        session.require_session().coordinator.on_request_begin(slot)
    target = SimpleNamespace(is_draft_worker=False)
    return hooks.around_init_new(lambda cls, *_: batch, ForwardBatch, scheduled, target)


def prefill(
    module: kit.ProjectedDenseAttention,
    case: kit.DenseAttentionCase,
    runner: kit.MockModelRunner,
    prefix_hidden: list[torch.Tensor],
    **options: Any,
) -> None:
    """The prefix as a prompt through the backend, which SGLang has before each decode step."""
    prompts = replace(
        case,
        forward_mode=ForwardMode.EXTEND,
        prefix_lens=(0,) * case.batch_size,
        extend_lens=case.prefix_lens,
    )
    batch = kit._make_forward_batch(prompts, runner, device="cpu", **options)
    backend = runner.attn_backend
    with torch.no_grad(), kit.forward_context(kit.ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata(batch)
        module(torch.cat(prefix_hidden), batch)


def make_backend(factory: Callable[[Any], Any], runner: kit.MockModelRunner) -> Any:
    runner.attn_backend = factory(runner)
    return runner.attn_backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_of_the_kit(
    case: kit.DenseAttentionCase, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = partial(make_backend, ATTENTION_BACKENDS["hisparse"])
    monkeypatch.setitem(ATTENTION_BACKENDS, "hisparse", backend)
    monkeypatch.setattr(kit, "MHATokenToKVPool", host_pool(case))
    monkeypatch.setattr(kit, "_make_forward_batch", partial(forward_batch, kit._make_forward_batch))
    # A query attends as many tokens in a decode step as in a prompt.
    same = {*kit._SWA_DECODE_EXTEND_WINDOW, "hisparse"}
    monkeypatch.setattr(kit, "_SWA_DECODE_EXTEND_WINDOW", same)
    if case.forward_mode.is_decode():
        monkeypatch.setattr(kit, "_populate_prefix_kv", prefill)
    kit.run_dense_attention_case(
        unittest.TestCase(),
        case,
        dtype=dtype,
        device="cpu",
        max_context_len=CONTEXT,
        loc_layout=layout,
    )
