"""``hisparse plan`` and the server's capacity hook compute the same sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.radix_attention import RadixAttention
from transformers import LlamaConfig

from hisparse.config import HiSparseConfig
from hisparse.plan.fit import Machine, fit
from hisparse.sglang import compat, hooks, session, setup
from hisparse.transformers.model_config import shape_per_rank

GIB = 2**30
CONFIG = LlamaConfig(
    hidden_size=1024,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    dtype="bfloat16",
)


def loaded(tp: int) -> torch.nn.Module:
    """The attention layers of ``CONFIG`` on one rank, as SGLang creates them."""
    layers = [
        RadixAttention(16 // tp, 64, 0.125, num_kv_heads=4 // tp, layer_id=i) for i in range(4)
    ]
    return torch.nn.ModuleList(layers)


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("algorithm", ["quest", "sketch", "snapkv"])
@pytest.mark.parametrize("device_gib", [4, 40])
def test_sizes_are_those_of_the_server(
    tp: int,
    algorithm: str,
    device_gib: int,
    kv_cache_dtype: Literal["auto", "fp8_e4m3"],
    cuda_graph: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(
        device_bytes=device_gib * GIB,
        host_bytes=64 * GIB,
        tp=tp,
        weight_bytes=GIB,
        mem_fraction=0.85,
    )
    config = HiSparseConfig(
        algorithm=algorithm, budget=1024, kv_cache_dtype=kv_cache_dtype, cuda_graph=cuda_graph
    )
    planned = fit(config, shape_per_rank(CONFIG, 16, tp), machine, 32768)
    assert planned.max_requests > 0

    schedule = SimpleNamespace(max_running_requests=planned.max_requests)
    monkeypatch.setattr(session, "_session", None)
    monkeypatch.setattr(setup, "free_host_memory", lambda: machine.host_bytes)
    monkeypatch.setattr(setup, "_min_over_ranks", lambda *sizes: sizes)
    monkeypatch.setattr(compat, "schedule_and_serving", lambda: (schedule, None))
    world = SimpleNamespace(world_size=tp)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    text = f'{{"algorithm": "{algorithm}", "budget": 1024, '
    text += f'"host_memory": "{planned.config.host_memory}", '
    text += f'"cuda_graph": {str(cuda_graph).lower()}}}'
    configurator = SimpleNamespace(
        server_args=SimpleNamespace(
            attention_backend="hisparse",
            hisparse_config=text,
            kv_cache_dtype=kv_cache_dtype,
            nnodes=1,
        ),
        model=loaded(tp),
        kv_cache_dtype=torch.bfloat16,
        model_config=SimpleNamespace(context_len=32768),
        device="cuda",
    )
    pool_bytes = hooks.around_profile_available_bytes(
        lambda *_: machine.cache_bytes, configurator, 0
    )
    served = session.require_session()
    assert served.spec == planned.spec
    assert served.sizing == planned.sizing
    captured = served.sizing.max_requests * (24 + 4 * 32768 // 16) + 4
    assert served.sizing.captured_bytes == captured * cuda_graph
    # SGLang divides by K and V of 4 layers in bfloat16, also when hisparse stores fp8.
    cell = 4 * 2 * (4 // tp) * 64 * 2
    assert pool_bytes == planned.sizing.kv_tokens * cell
    assert served.sizing.max_requests == planned.max_requests
    assert served.sizing.kv_tokens >= planned.max_requests * 32768
