"""Reads and checks SGLang's server arguments before the model loads.

Each rejected argument is a ``ConfigError`` of one line.
"""

import json
import logging
import os
from dataclasses import replace
from typing import Any, Final

import torch

from hisparse.algorithms import build_algorithm
from hisparse.cache.formats import sglang_choices
from hisparse.config import FORMATS, HiSparseConfig
from hisparse.engine.capabilities import (
    check_capabilities,
    check_indexer,
    choose_scope,
    not_captured,
)
from hisparse.errors import ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.sglang import features
from hisparse.sglang.features.base import Flag, Start
from hisparse.sglang.install import BACKEND
from hisparse.sglang.models import name_of
from hisparse.units import resolve_memory

logger = logging.getLogger("hisparse")

#: Flags of SGLang that no feature reads.
_FLAGS: Final = (
    Flag("enable_hierarchical_cache", (False,), "--enable-hierarchical-cache"),
    Flag("enable_lmcache", (False,), "--enable-lmcache"),
    Flag("enable_hisparse", (False,), "--enable-hisparse (SGLang's own feature)"),
    Flag("attn_cp_size", (1,), "--attn-cp-size"),
    Flag("dcp_size", (1,), "--dcp-size"),
    Flag("enable_streaming_session", (False,), "--enable-streaming-session"),
    Flag("enable_memory_saver", (False,), "--enable-memory-saver"),
    Flag("enable_kv_cache_sharding", (False,), "--enable-kv-cache-sharding"),
    Flag("enable_unified_memory", (False,), "--enable-unified-memory"),
    Flag("enable_page_major_kv_layout", (False,), "--enable-page-major-kv-layout"),
    Flag("prefill_only_disable_kv_cache", (False,), "--prefill-only-disable-kv-cache"),
    Flag("enable_two_batch_overlap", (False,), "--enable-two-batch-overlap"),
    Flag("enable_pdmux", (False,), "--enable-pdmux"),
    Flag("enable_flexkv", (False,), "--enable-flexkv"),
    Flag("enable_torch_compile", (False,), "--enable-torch-compile"),
    Flag("dllm_algorithm", (), "--dllm-algorithm"),
    Flag("enable_deterministic_inference", (False,), "--enable-deterministic-inference"),
)

_KV_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def read_config(server_args: Any) -> HiSparseConfig:
    """Parse ``--hisparse-config`` and merge ``--kv-cache-dtype`` into it.

    Raises:
        ConfigError: a setting is invalid, or contradicts ``--kv-cache-dtype``.
    """
    text, flag = server_args.hisparse_config, server_args.kv_cache_dtype
    config = HiSparseConfig.parse(text)
    if config.kv_cache_dtype == "auto" and flag in sglang_choices():
        return HiSparseConfig.parse(text, kv_cache_dtype=flag)
    if config.kv_cache_dtype != "auto" and flag not in (None, "auto", config.kv_cache_dtype):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype} but --kv-cache-dtype is {flag}; expected "
            "equal values, or only one of the two"
        )
    return config


def session_config(server_args: Any, kv_cache_dtype: str) -> HiSparseConfig:
    """The settings in a process with a part of the model, as the command line's process wrote them.

    Args:
        server_args: SGLang's ``ServerArgs``, after :func:`prepare_before_resolution`.
        kv_cache_dtype: how the model's own configuration asks to store K and V; the key overrules
            it.
    """
    settings = json.loads(server_args.hisparse_config)
    if settings["kv_cache_dtype"] == "auto":
        settings["kv_cache_dtype"] = kv_cache_dtype
    return HiSparseConfig.from_dict(settings)


def prepare_before_resolution(server_args: Any) -> HiSparseConfig:
    """Check the configuration, then set the fields of SGLang's arguments that depend on it.

    The features that the server has are on from here.

    Args:
        server_args: SGLang's ``ServerArgs``; ``hisparse_config``, ``page_size``,
            ``kv_cache_dtype``, the flags for CUDA graphs and pools of windows and those of features
            are written.

    Returns:
        The settings of all processes of the server.

    Raises:
        ConfigError: a setting or a flag is not supported, or the machine lacks the memory.
    """
    # SGLang's own resolution rejects some flags with a traceback that does not name hisparse.
    _check_flags(server_args)
    config = read_config(server_args)
    build_algorithm(config)
    start = Start(args=server_args, config=config, device=_device_type(server_args))
    features.check_start(start)
    resolve_memory(config.host_memory, free_host_memory(), "host_memory")
    changes = dict[str, Any]()
    for feature in features.all_features():
        if feature.is_on(start):
            changes |= feature.prepare(start)
    config = replace(config, **changes)
    # Settings that one feature has changed may switch another one off.
    start = replace(start, config=config)
    enabled = [feature for feature in features.all_features() if feature.is_on(start)]
    features.enable(enabled)
    # Other processes read it, and no file or flag again.
    server_args.hisparse_config = json.dumps(config.effective())
    if config.kv_cache_dtype != "auto":
        # SGLang's fp8 pools have requirements of their own, such as a certain backend on a CPU.
        # SGLang therefore sees the model's dtype, and only hisparse knows how K and V are stored.
        server_args.kv_cache_dtype = "auto"
    # Host memory is one pool for all layers, whatever part of it a layer attends.
    server_args.disable_hybrid_swa_memory = True
    if server_args.page_size is None:
        server_args.page_size = config.server_page_size
    if any(feature.captures_steps for feature in enabled):
        server_args.disable_prefill_cuda_graph = True
    else:
        server_args.disable_cuda_graph = True
    return config


def _device_type(server_args: Any) -> str:
    """The device that SGLang will use, such as "cuda"."""
    from sglang.srt.utils.common import get_device

    device: str = server_args.device or get_device()
    return device.split(":")[0]


def check_after_resolution(server_args: Any, config: HiSparseConfig) -> None:
    """Reject resolved arguments that hisparse does not support, and unsupported models.

    Args:
        server_args: SGLang's ``ServerArgs`` after ``resolve_once``.

    Raises:
        ConfigError: names the argument, its value and the supported values.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.environ import envs

    view = resolved_view(server_args)
    _check_flags(view)
    backends = attention_backends_of(view)
    if set(backends) != {BACKEND}:
        raise ConfigError(
            f"prefill uses {backends[0]} and decode {backends[1]}; expected hisparse for both: "
            "use only --attention-backend hisparse"
        )
    if envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        raise ConfigError(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING is set; expected it unset: hisparse sizes its "
            "pool from host memory"
        )
    check_capabilities(config, view.device)
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
    _check_model(server_args, config)
    for feature in features.enabled():
        feature.check(server_args, config)


def _check_graphs(config: HiSparseConfig, view: Any) -> None:
    """Reject CUDA graph flags of SGLang that contradict ``cuda_graph``."""
    reason = not_captured(config, view.device)
    if config.cuda_graph is True and reason is not None:
        raise ConfigError(f'cuda_graph: got true, but {reason}; expected "auto" or false')
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
    dtypes = Flag("kv_cache_dtype", ("auto", *_KV_DTYPES, *sglang_choices()), "--kv-cache-dtype")
    rows = [*_FLAGS, dtypes]
    for feature in features.all_features():
        rows += feature.flags
    for row in rows:
        got = getattr(view, row.field)
        if got is not None and got not in row.values:
            choices = " or ".join(map(str, row.values))
            raise ConfigError(
                f"{row.flag} is {got}, which hisparse does not support yet"
                + (f"; expected {choices}" if choices else "; expected it unset")
            )


def _check_model(server_args: Any, config: HiSparseConfig) -> None:
    """Reject models that hisparse cannot serve, or cannot serve with ``config``.

    Args:
        server_args: SGLang's arguments, resolved.

    Raises:
        ConfigError: names the model's property and what hisparse serves instead.
    """
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.dots3 import Dots3Config
    from sglang.srt.configs.model_config import AttentionArch

    model = model_config_of(server_args)
    name = name_of(model)
    if model.attention_arch not in (AttentionArch.MHA, AttentionArch.MLA):
        raise ConfigError(
            f"{name} has {model.attention_arch.name} attention; expected MHA, GQA or MLA"
        )
    formats = FORMATS["MLA" if model.attention_arch == AttentionArch.MLA else "GQA"]
    choose_scope(config, formats.get(config.kv_cache_dtype))
    indexer = features.indexer_of(model)
    check_indexer(name, config, indexer.feature if indexer else "")
    if model.is_hybrid_swa:
        raise ConfigError(
            f"{name} keeps the K and V of its windows in a pool of their own; expected one pool: "
            "use --disable-hybrid-swa-memory"
        )
    _check_heads(name, model)
    wanted = _KV_DTYPES.get(str(server_args.kv_cache_dtype).lower())
    if wanted not in (None, model.dtype):
        raise ConfigError(
            f"--kv-cache-dtype is {server_args.kv_cache_dtype} but {name} runs in {model.dtype}; "
            "expected auto (the model's dtype) or fp8_e4m3 (eight bits)"
        )
    if isinstance(model.hf_text_config, Dots3Config):
        raise ConfigError(
            f"SGLang serves {name} with an attention backend of its own; expected a model whose "
            "attention a backend can be chosen for"
        )
    if model.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder-decoder model; expected a decoder")
    if os.environ.get("SGLANG_USE_HND_KVCACHE", "0").lower() in ("1", "true"):
        raise ConfigError("SGLANG_USE_HND_KVCACHE is set; expected it unset: use host_layout")


def _check_heads(name: str, model: Any) -> None:
    """Require attention heads of the same number and width in every layer.

    SGLang knows two kinds of layers: full attention, and with a window.
    """
    from sglang.srt.configs.model_config import AttentionArch

    if model.attention_arch != AttentionArch.MHA:
        return
    full = f"{model.get_num_kv_heads(1)} x {model.head_dim}"
    window = f"{model.get_swa_num_kv_heads(1)} x {model.swa_head_dim}"
    queries = getattr(model.hf_text_config, "num_attention_heads_per_layer", None) or ()
    kinds = {full: "KV", window: "KV"} if full != window else dict.fromkeys(queries, "query")
    if len(kinds) > 1:
        heads = " and ".join(f"{number} {kind} heads" for number, kind in kinds.items())
        raise ConfigError(
            f"{name} has layers with {heads}; expected the same number and width of heads in every "
            "layer"
        )
