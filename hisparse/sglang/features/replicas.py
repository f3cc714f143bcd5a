"""What replicas, attention data parallelism and pipelines mean for the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hisparse.config import HiSparseConfig

__all__ = ["config_for_ranks"]


def config_for_ranks(config: HiSparseConfig, server_args: Any, host_bytes: int) -> HiSparseConfig:
    """The configuration of all processes of a server.

    Args:
        config: of the command line.
        server_args: SGLang's ``ServerArgs`` before it resolves them.
        host_bytes: what ``host_memory`` stands for, before the first process starts.
    """
    # SGLang turns `--dp-size N --enable-dp-attention` into `--attn-dp-size N`.
    attention = server_args.enable_dp_attention
    if server_args.dp_size > 1 and not attention:
        # Replicas start at times of their own, and each finds less free than the one before it.
        config = replace(config, host_memory=host_bytes)
    if attention or server_args.attn_dp_size > 1:
        # Whether a captured step can serve a step depends on its requests, and all ranks would
        # have to agree on it.
        config = replace(config, cuda_graph=False)
    return config
