"""What is refused at start, before the model loads: each in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_capabilities
from hisparse.errors import ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.sglang import compat
from hisparse.sglang.check_model import check_model
from hisparse.units import resolve_memory

__all__ = [
    "BACKEND",
    "after_resolution",
    "before_resolution",
    "is_requested",
    "read_config",
    "server_page_size",
]

BACKEND = "hisparse"

#: SGLang's page size where selections are token-wise and none is given.
_TOKEN_WISE_PAGE = 16

#: Fields of SGLang's arguments that must have one of these values: field, allowed, flag.
_MUST_BE: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("enable_mixed_chunk", (False,), "--enable-mixed-chunk"),
    ("speculative_algorithm", (None, "NONE"), "--speculative-algorithm"),
    ("enable_hierarchical_cache", (False,), "--enable-hierarchical-cache"),
    ("enable_lmcache", (False,), "--enable-lmcache"),
    ("enable_hisparse", (False,), "--enable-hisparse (SGLang's own feature)"),
    ("disaggregation_mode", (None, "null"), "--disaggregation-mode"),
    ("attn_cp_size", (1,), "--attn-cp-size"),
    ("dcp_size", (1,), "--dcp-size"),
    ("pp_size", (1,), "--pp-size"),
    ("dp_size", (1,), "--dp-size"),
    ("enable_streaming_session", (False,), "--enable-streaming-session"),
    ("enable_memory_saver", (False,), "--enable-memory-saver"),
    (
        "kv_cache_dtype",
        ("auto", "bf16", "bfloat16", "float16", "float32", "fp8_e4m3"),
        "--kv-cache-dtype",
    ),
    ("enable_kv_cache_sharding", (False,), "--enable-kv-cache-sharding"),
    ("enable_unified_memory", (False,), "--enable-unified-memory"),
    ("enable_page_major_kv_layout", (False,), "--enable-page-major-kv-layout"),
    ("prefill_only_disable_kv_cache", (False,), "--prefill-only-disable-kv-cache"),
    ("enable_two_batch_overlap", (False,), "--enable-two-batch-overlap"),
    ("enable_pdmux", (False,), "--enable-pdmux"),
    ("enable_flexkv", (False,), "--enable-flexkv"),
    ("enable_dp_attention", (False,), "--enable-dp-attention"),
    ("enable_torch_compile", (False,), "--enable-torch-compile"),
    ("dllm_algorithm", (None,), "--dllm-algorithm"),
)


def server_page_size(config: HiSparseConfig) -> int:
    """SGLang's page size, tokens, where the command line gives none."""
    return config.page_size if config.page_size > 1 else _TOKEN_WISE_PAGE


def is_requested(server_args: Any) -> bool:
    """Whether any of the three backend flags names hisparse."""
    flags = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(getattr(server_args, flag, None) == BACKEND for flag in flags)


def read_config(server_args: Any) -> HiSparseConfig:
    """The settings of ``--hisparse-config``, with what flags of SGLang's own say.

    Raises:
        ConfigError: a setting is wrong, or contradicts a flag.
    """
    config, flag = HiSparseConfig.parse(server_args.hisparse_config), server_args.kv_cache_dtype
    if flag == "fp8_e4m3":
        return replace(config, kv_cache_dtype=flag)
    if config.stores_fp8 and flag not in (None, "auto"):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype} but --kv-cache-dtype is {flag}; expected "
            "the same, or only one of them"
        )
    return config


def before_resolution(server_args: Any) -> None:
    """Check the configuration against itself and the machine; give SGLang our page size, and take
    its fp8 over.
    """
    # SGLang's own resolution refuses some of these with a traceback that does not name hisparse.
    _check_flags(server_args)
    config = read_config(server_args)
    build_algorithm(config)
    resolve_memory(config.host_memory, free_host_memory(), "host_memory")
    if config.stores_fp8:
        # SGLang's own fp8 pools have needs, such as a backend of theirs on a CPU. To SGLang this
        # one is of the model's dtype: what a location holds is ours to know.
        server_args.hisparse_config = json.dumps(config.effective())
        server_args.kv_cache_dtype = "auto"
    if server_args.page_size is None:
        server_args.page_size = server_page_size(config)
    if config.cuda_graph:
        server_args.disable_prefill_cuda_graph = True
    else:
        server_args.disable_cuda_graph = True


def after_resolution(server_args: Any) -> None:
    """Refuse what hisparse does not do, by the arguments as SGLang resolved them."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.environ import envs

    view = resolved_view(server_args)
    _check_flags(view)
    backends = attention_backends_of(view)
    if set(backends) != {BACKEND}:
        raise ConfigError(
            f"prefill uses {backends[0]} and decode {backends[1]}; hisparse serves both or none: "
            "use --attention-backend hisparse alone"
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        raise ConfigError(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set; hisparse sizes its pool from host "
            "memory, unset it"
        )
    config = read_config(server_args)
    check_capabilities(config, view.device)
    tokens = view.max_total_tokens
    if tokens is not None and tokens < config.min_row_tokens:
        raise ConfigError(
            f"--max-total-tokens is {tokens}; expected at least device_buffer_size "
            f"({config.min_row_tokens}): raise it, or lower budget and device_buffer_size"
        )
    if view.page_size == config.page_size == 1:
        # Beam search, which SGLang allows with pages of one token only, hands tokens from request
        # to request behind the rows' back.
        raise ConfigError("--page-size is 1; hisparse needs 2 or more (its own page_size may be 1)")
    if view.page_size % config.page_size:
        raise ConfigError(
            f"page_size is {config.page_size} but --page-size is {view.page_size}; hisparse's "
            "must divide SGLang's"
        )
    _check_graphs(config, view)
    check_model(server_args, config)


def _check_graphs(config: HiSparseConfig, view: Any) -> None:
    """SGLang's own flags for graphs go before what is set for it."""
    if config.cuda_graph and view.device != "cuda":
        raise ConfigError(f"cuda_graph: got true, but the device is {view.device}; expected cuda")
    graphs = view.cuda_graph_config
    allowed = ("full", "disabled") if config.cuda_graph else ("disabled",)
    for phase, backend, choices in (
        ("decode", graphs.decode.backend, allowed),
        ("prefill", graphs.prefill.backend, ("disabled",)),
    ):
        if backend not in choices:
            raise ConfigError(
                f"--cuda-graph-backend-{phase} is {backend}; hisparse needs {' or '.join(choices)}"
                ' (it captures decode steps alone, with "cuda_graph": true in --hisparse-config)'
            )


def _check_flags(view: Any) -> None:
    """What was asked for, or what SGLang made of it; None is a flag that was not given."""
    for field, allowed, flag in _MUST_BE:
        if compat.lacks_flag(view, field):
            continue
        got = getattr(view, field)
        if got is not None and got not in allowed:
            choices = " or ".join(str(value) for value in allowed if value is not None)
            raise ConfigError(
                f"{flag} is {got}; hisparse does not do that yet"
                + (f", it needs {choices}" if choices else "")
            )
