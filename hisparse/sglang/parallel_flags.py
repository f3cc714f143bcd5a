"""What replicas, attention data parallelism and pipelines mean for the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hisparse.config import EXTENSIONS, HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.sglang import compat

__all__ = ["config_for_ranks"]


def config_for_ranks(config: HiSparseConfig, server_args: Any, host_bytes: int) -> HiSparseConfig:
    """The configuration of all processes of a server.

    Args:
        config: of the command line.
        server_args: SGLang's ``ServerArgs`` before it resolves them.
        host_bytes: what ``host_memory`` stands for, before the first process starts.

    Raises:
        ConfigError: the release is too old, or the configuration does not suit the flags.
    """
    sizes = {"--dp-size": server_args.dp_size, "--pp-size": server_args.pp_size}
    for flag, size in sizes.items():
        if size > 1 and not compat.since(compat.REPLICAS):
            raise ConfigError(
                f"{flag} is {size}, which hisparse supports from sglang {compat.REPLICAS} on, and "
                f"{compat.installed()} is installed; expected 1"
            )
    # SGLang turns `--dp-size N --enable-dp-attention` into `--attn-dp-size N`.
    attention = server_args.enable_dp_attention
    untried = {
        "storage": config.storage is not None
        or getattr(server_args, "enable_unified_cache_external_linker", False),
        "--speculative-algorithm": server_args.speculative_algorithm not in (None, "NONE"),
    }
    if server_args.pp_size > 1:
        # The others need all layers in one process.
        untried |= {name: EXTENSIONS.get(name).needs_all_layers for name in config.extensions}
        untried["reuse_layers"] = config.reuse_layers > 1
        _reject_together("--pp-size", untried)
    if server_args.dp_size > 1 and not attention:
        # Replicas start at times of their own, and each finds less free than the one before it.
        config = replace(config, host_memory=host_bytes)
    if attention or getattr(server_args, "attn_dp_size", 1) > 1:
        _reject_together("--attn-dp-size", untried)
        config = _without_graphs(config)
    return config


def _reject_together(flag: str, given: Mapping[str, bool]) -> None:
    """Raise ``ConfigError`` for the first key that is given with a flag."""
    for key, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{key} is set and {flag} is above 1, which hisparse does not support together "
                "yet; expected one of the two"
            )


def _without_graphs(config: HiSparseConfig) -> HiSparseConfig:
    """The configuration for ranks with requests of their own.

    Whether a captured step can serve a step depends on its requests, and all ranks would have to
    agree on it.

    Raises:
        ConfigError: the configuration asks for captured steps.
    """
    if config.cuda_graph is True:
        raise ConfigError(
            'cuda_graph: got true with --attn-dp-size, expected "auto" or false: ranks with '
            "requests of their own run decode steps eagerly"
        )
    return replace(config, cuda_graph=False)
