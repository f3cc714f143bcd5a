"""Reads and checks SGLang's server arguments before the model loads.

Each rejected argument is a ``ConfigError`` of one line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hisparse.algorithms import build_algorithm
from hisparse.cache.formats import sglang_choices
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_capabilities
from hisparse.errors import ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.sglang.check_model import check_model
from hisparse.sglang.combinations import Start, check_combinations
from hisparse.sglang.features.disaggregation import prepare_disaggregation
from hisparse.sglang.features.replicas import config_for_ranks
from hisparse.sglang.features.speculation import ALGORITHMS, check_draft_model, make_chains
from hisparse.sglang.features.storage.setup import check_told_apart, request_linker
from hisparse.sglang.requested import BACKEND
from hisparse.units import resolve_memory

__all__ = ["check_after_resolution", "prepare_before_resolution", "read_config"]

#: Fields of SGLang's arguments and the values that hisparse supports: field, values, flag.
_SUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("speculative_algorithm", (None, "NONE", *ALGORITHMS), "--speculative-algorithm"),
    ("enable_hierarchical_cache", (False,), "--enable-hierarchical-cache"),
    ("enable_lmcache", (False,), "--enable-lmcache"),
    ("enable_hisparse", (False,), "--enable-hisparse (SGLang's own feature)"),
    ("disaggregation_mode", (None, "null", "prefill", "decode"), "--disaggregation-mode"),
    (
        "disaggregation_transfer_backend",
        ("mooncake", "mooncake_tcp", "fake"),
        "--disaggregation-transfer-backend",
    ),
    (
        "disaggregation_decode_host_receive_threshold",
        (1,),
        "--disaggregation-decode-host-receive-threshold",
    ),
    (
        "disaggregation_decode_retraction_backup",
        ("cpu_tensor", "none"),
        "--disaggregation-decode-retraction-backup",
    ),
    (
        "disaggregation_decode_enable_offload_kvcache",
        (False,),
        "--disaggregation-decode-enable-offload-kvcache",
    ),
    ("disaggregation_enable_kv_checksum", (False,), "--disaggregation-enable-kv-checksum"),
    ("enable_pd_role_switch", (False,), "--enable-pd-role-switch"),
    ("attn_cp_size", (1,), "--attn-cp-size"),
    ("dcp_size", (1,), "--dcp-size"),
    ("enable_streaming_session", (False,), "--enable-streaming-session"),
    ("enable_memory_saver", (False,), "--enable-memory-saver"),
    (
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", "float16", "float32"),
        "--kv-cache-dtype",
    ),
    ("enable_kv_cache_sharding", (False,), "--enable-kv-cache-sharding"),
    ("enable_unified_memory", (False,), "--enable-unified-memory"),
    ("enable_page_major_kv_layout", (False,), "--enable-page-major-kv-layout"),
    ("prefill_only_disable_kv_cache", (False,), "--prefill-only-disable-kv-cache"),
    ("enable_two_batch_overlap", (False,), "--enable-two-batch-overlap"),
    ("enable_pdmux", (False,), "--enable-pdmux"),
    ("enable_flexkv", (False,), "--enable-flexkv"),
    ("enable_torch_compile", (False,), "--enable-torch-compile"),
    ("dllm_algorithm", (None,), "--dllm-algorithm"),
    ("enable_deterministic_inference", (False,), "--enable-deterministic-inference"),
)


def read_config(server_args: Any) -> HiSparseConfig:
    """Parse ``--hisparse-config`` and merge ``--kv-cache-dtype`` into it.

    Raises:
        ConfigError: a setting is invalid, or contradicts ``--kv-cache-dtype``.
    """
    config, flag = HiSparseConfig.parse(server_args.hisparse_config), server_args.kv_cache_dtype
    if flag in sglang_choices():
        return replace(config, kv_cache_dtype=flag)
    if config.kv_cache_dtype != "auto" and flag not in (None, "auto"):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype} but --kv-cache-dtype is {flag}; expected "
            "equal values, or only one of the two"
        )
    return config


def prepare_before_resolution(server_args: Any) -> None:
    """Check the configuration, then set the fields of SGLang's arguments that depend on it.

    Args:
        server_args: SGLang's ``ServerArgs``; ``page_size``, ``kv_cache_dtype`` and the flags for
            CUDA graphs, disaggregation, the external linker, pools of windows and speculation are
            written.

    Raises:
        ConfigError: a setting or a flag is not supported, or the machine lacks the memory.
    """
    # SGLang's own resolution rejects some flags with a traceback that does not name hisparse.
    _check_flags(server_args)
    config = read_config(server_args)
    build_algorithm(config)
    device = _device_type(server_args)
    check_combinations(Start(args=server_args, config=config, device=device))
    request_linker(server_args, config)
    host_bytes = resolve_memory(config.host_memory, free_host_memory(), "host_memory")
    given, config = config, config_for_ranks(config, server_args, host_bytes)
    if config != given:
        server_args.hisparse_config = json.dumps(config.effective())
    if config.kv_cache_dtype != "auto":
        # SGLang's fp8 pools have requirements of their own, such as a certain backend on a CPU.
        # SGLang therefore sees the model's dtype, and only hisparse knows how K and V are stored.
        server_args.hisparse_config = json.dumps(config.effective())
        server_args.kv_cache_dtype = "auto"
    # Host memory is one pool for all layers, whatever part of it a layer attends.
    server_args.disable_hybrid_swa_memory = True
    prepare_disaggregation(server_args, device)
    if server_args.page_size is None:
        server_args.page_size = config.server_page_size
    if config.not_captured(device) is None:
        server_args.disable_prefill_cuda_graph = True
    else:
        server_args.disable_cuda_graph = True
    make_chains(server_args)


def _device_type(server_args: Any) -> str:
    """The device that SGLang will use, such as "cuda"."""
    from sglang.srt.utils.common import get_device

    device: str = server_args.device or get_device()
    return device.split(":")[0]


def check_after_resolution(server_args: Any) -> None:
    """Reject resolved arguments that hisparse does not support, and unsupported models.

    Args:
        server_args: SGLang's ``ServerArgs`` after ``resolve_once``.

    Raises:
        ConfigError: names the argument, its value and the supported values.
    """
    from sglang.srt.arg_groups.overrides import (
        attention_backends_of,
        model_config_of,
        resolved_view,
    )
    from sglang.srt.environ import envs

    view = resolved_view(server_args)
    _check_flags(view)
    backends = attention_backends_of(view)
    if set(backends) != {BACKEND}:
        raise ConfigError(
            f"prefill uses {backends[0]} and decode {backends[1]}; expected hisparse for both: "
            "use --attention-backend hisparse alone"
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        raise ConfigError(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set; unset it: hisparse sizes its pool from "
            "host memory"
        )
    config = read_config(server_args)
    check_capabilities(config, view.device)
    check_draft_model(view)
    tokens = view.max_total_tokens
    if tokens is not None and tokens < config.min_row_tokens:
        raise ConfigError(
            f"--max-total-tokens is {tokens}; expected at least device_buffer_size "
            f"({config.min_row_tokens}): raise it, or lower budget and device_buffer_size"
        )
    if view.page_size == config.page_size == 1:
        # With --page-size 1 SGLang allows beam search, which moves tokens between requests without
        # a hook that could move their device pages.
        raise ConfigError("--page-size is 1; expected 2 or more (hisparse's page_size may be 1)")
    if view.page_size % config.page_size:
        raise ConfigError(
            f"page_size is {config.page_size} but --page-size is {view.page_size}; expected a "
            "page_size that divides --page-size"
        )
    _check_graphs(config, view)
    check_model(server_args, config)
    check_told_apart(view, model_config_of(server_args))


def _check_graphs(config: HiSparseConfig, view: Any) -> None:
    """Reject CUDA graph flags of SGLang that contradict ``cuda_graph``."""
    reason = config.not_captured(view.device)
    if config.cuda_graph is True and reason is not None:
        raise ConfigError(f"cuda_graph: got true, but {reason}; expected cuda")
    graphs = view.cuda_graph_config
    allowed = ("full", "disabled") if reason is None else ("disabled",)
    for phase, backend, choices in (
        ("decode", graphs.decode.backend, allowed),
        ("prefill", graphs.prefill.backend, ("disabled",)),
    ):
        if backend not in choices:
            raise ConfigError(
                f"--cuda-graph-backend-{phase} is {backend}; expected {' or '.join(choices)} "
                f"(hisparse captures {'no steps: ' + reason if reason else 'only decode steps'})"
            )


def _check_flags(view: Any) -> None:
    """Reject values that hisparse does not support, before or after SGLang resolves them.

    None stands for a flag that the command line does not give.
    """
    for field, allowed, flag in _SUPPORTED:
        got = getattr(view, field)
        if field == "kv_cache_dtype":
            allowed = (*allowed, *sglang_choices())
        if got is not None and got not in allowed:
            choices = " or ".join(str(value) for value in allowed if value is not None)
            raise ConfigError(
                f"{flag} is {got}, which hisparse does not support yet"
                + (f"; expected {choices}" if choices else "; expected it unset")
            )
