"""``hisparse plan`` and the server's capacity hook compute the same sizes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    SpecAuxHiddenStateConfig,
)
from transformers import DeepseekV2Config, LlamaConfig, Qwen3NextConfig

from hisparse.config import HiSparseConfig
from hisparse.engine import capabilities
from hisparse.engine.build import kept_tensors
from hisparse.memory.costs import host_token_bytes
from hisparse.plan.fit import Machine, fit
from hisparse.plan.shapes import shape_per_rank, state_bytes
from hisparse.sglang import features, hooks, ranks, session, setup

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


def configurator(model: torch.nn.Module, config: HiSparseConfig, host_memory: Any) -> Any:
    """What SGLang's ``KVCacheConfigurator`` has of a loaded model."""
    return SimpleNamespace(
        server_args=SimpleNamespace(
            attention_backend="hisparse",
            hisparse_config=json.dumps(config.effective() | {"host_memory": host_memory}),
            nnodes=1,
            chunked_prefill_size=8192,
            disaggregation_mode="null",
            speculative_algorithm=None,
            enable_unified_cache_external_linker=False,
        ),
        spec_aux_config=SpecAuxHiddenStateConfig(),
        model=model,
        kv_cache_dtype=torch.bfloat16,
        model_config=SimpleNamespace(
            context_len=32768,
            hf_config=SimpleNamespace(architectures=[]),
            hf_text_config=SimpleNamespace(),
        ),
        device="cuda",
    )


def machine(device_gib: int = 4, host_gib: int = 64, tp: int = 1, **more: Any) -> Machine:
    """A machine whose GPUs hold weights of a GiB."""
    sizes = {"device_bytes": device_gib * GIB, "host_bytes": host_gib * GIB, "weight_bytes": GIB}
    return Machine(**sizes, tp=tp, mem_fraction=0.85, **more)


def serve(of: Machine, model: torch.nn.Module, config: HiSparseConfig, host_memory: Any) -> int:
    """Start a session by the server's hook; returns the bytes that SGLang gets."""
    each = configurator(model, config, host_memory)
    return int(hooks.around_profile_available_bytes(lambda *_: of.cache_bytes, each, 0))


def stand_in(monkeypatch: pytest.MonkeyPatch, machine: Machine, max_requests: int) -> None:
    """The last rank of ``machine.tp``, on a machine with the memory of ``machine``."""
    published = {
        "get_parallel": SimpleNamespace(num_dp_ranks=1, attn_dp_size=1, pp_size=1),
        "get_schedule": SimpleNamespace(max_running_requests=max_requests),
    }
    for name, found in published.items():
        monkeypatch.setattr(runtime_context, name, lambda found=found: found)
    monkeypatch.setattr(session, "_session", None)
    monkeypatch.setattr(setup, "free_host_memory", lambda: machine.host_bytes)
    for module in (setup, ranks):
        monkeypatch.setattr(module, "least_of_ranks", lambda *sizes: list(sizes))
    monkeypatch.setenv(features.IN_USE, "server replicas cuda_graphs")
    monkeypatch.setattr(setup, "hybrid_layers", lambda model_config: None)
    monkeypatch.setattr(ranks, "layers_of_ranks", lambda layers: [layers] * machine.tp)
    last = machine.tp - 1
    world = SimpleNamespace(
        world_size=machine.tp, rank=last, rank_in_group=last, ranks=list(range(machine.tp))
    )
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    monkeypatch.setattr(parallel_state, "get_attn_tp_group", lambda: world)


@pytest.mark.parametrize("cuda_graph", ["auto", False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("algorithm", ["quest", "sketch", "snapkv"])
@pytest.mark.parametrize("device_gib", [4, 40])
def test_sizes_are_those_of_the_server(
    tp: int,
    algorithm: str,
    device_gib: int,
    kv_cache_dtype: Literal["auto", "fp8_e4m3"],
    cuda_graph: Literal["auto", True, False],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = machine(device_gib, tp=tp)
    config = HiSparseConfig(
        algorithm=algorithm, budget=1024, kv_cache_dtype=kv_cache_dtype, cuda_graph=cuda_graph
    )
    planned = fit(config, shape_per_rank(CONFIG, 16, tp), here, 32768)
    assert planned.max_requests > 0
    stand_in(monkeypatch, here, planned.max_requests)
    pool_bytes = serve(here, loaded(tp), config, planned.host_memory)
    served = session.require_session()
    assert served.setup.spec == planned.spec
    assert served.setup.sizing == planned.sizing
    captured = served.setup.sizing.max_requests * (24 + 4 * 32768 // 16) + 4
    assert served.setup.sizing.device["captured steps"] == captured * (cuda_graph is not False)
    # SGLang divides by K and V of 4 layers in bfloat16, also when hisparse stores fp8.
    cell = 4 * 2 * (4 // tp) * 64 * 2
    assert pool_bytes == planned.sizing.kv_tokens * cell
    assert served.setup.sizing.max_requests == planned.max_requests
    assert served.setup.sizing.kv_tokens >= planned.max_requests * 32768


def test_without_cuda_kernels_one_line_says_why_no_step_is_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = machine()
    stand_in(monkeypatch, here, 4)
    monkeypatch.setattr(capabilities, "why_no_cuda", lambda: "no nvcc found")
    # As the process that starts this one has decided.
    monkeypatch.setenv(features.IN_USE, "server replicas")
    caplog.set_level("INFO")
    serve(here, loaded(1), HiSparseConfig(budget=1024), 64 * GIB)
    assert session.require_session().setup.sizing.device["captured steps"] == 0
    expected = "decode steps are not captured in CUDA graphs: there are no CUDA kernels (no nvcc"
    assert caplog.text.count(expected) == 1


#: 4 layers with latents of 512 and 64, and 16 query heads.
MLA = DeepseekV2Config(
    num_hidden_layers=4,
    num_attention_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    dtype="bfloat16",
)
MLA_TOKEN_BYTES = 4 * 576 * 2


def loaded_mla(tp: int) -> torch.nn.Module:
    """The attention layers of ``MLA`` on one rank: its query heads, and the whole latent."""
    layers = [
        RadixAttention(16 // tp, 576, 0.07, num_kv_heads=1, layer_id=i, v_head_dim=512)
        for i in range(4)
    ]
    return torch.nn.ModuleDict({f"{i} attn_mqa": layer for i, layer in enumerate(layers)})


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("economy", [False, True], ids=["on-device", "in-host-memory"])
def test_ranks_of_a_node_share_the_latents_of_mla(
    tp: int, economy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pays for its part of one copy, and for all that its algorithm keeps in host memory."""
    here = machine(80, tp=tp)
    settings = {"algorithm": "sketch", "algorithm_config": {"economy": economy}, "budget": 1024}
    config = HiSparseConfig.from_dict(settings | {"host_memory": "8GiB"})
    planned = fit(config, shape_per_rank(MLA, 16, tp), here, 32768)
    stand_in(monkeypatch, here, planned.max_requests)
    serve(here, loaded_mla(tp), config, planned.host_memory)
    served = session.require_session()
    assert served.setup.sizing == planned.sizing
    kept = kept_tensors(served.setup.resolved.config, served.setup.algorithm, served.setup.policy)
    own = host_token_bytes(kept, served.setup.spec)
    assert (own > 0) == economy
    assert planned.host_bytes_per_token == MLA_TOKEN_BYTES // tp + own
    node_bytes = served.setup.sizing.kv_tokens * (MLA_TOKEN_BYTES + tp * own)
    assert 0.99 * 8 * GIB < node_bytes <= 8 * GIB
    assert (served.ranks.rank, served.ranks.size) == (tp - 1, tp)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_states_of_layers_that_do_not_attend(tp: int) -> None:
    """As SGLang counts them."""
    config = Qwen3NextConfig()
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=32 * 128,
        n_groups=16,
        num_heads=32,
        head_dim=128,
        state_size=128,
        conv_kernel=4,
    )
    layers = [n for n, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    params = Mamba2CacheParams(shape=shape, layers=layers)
    assert state_bytes(config, tp) == params.mamba_cache_per_req > 0
