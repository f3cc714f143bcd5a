"""MiniCPM (InfLLM-V2): passes queries and keys of the layers to the algorithm ``infllm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor

from hisparse.errors import ConfigError
from hisparse.sglang.features.base import (
    PIPELINE,
    PREFILL_OR_DECODE,
    SPECULATION,
    STORAGE,
    Feature,
    IndexerKind,
    asks_indexer,
)
from hisparse.sglang.models import RowwiseInputs, Trained, name_of


def _trained(text: Any) -> Trained | None:
    sparse = getattr(text, "sparse_config", None) or {}
    if "kernel_size" not in sparse:
        return None
    size = sparse["block_size"]
    local = sparse["window_size"] // size
    blocks = sparse["topk"] + local
    settings = {
        "algorithm": "infllm",
        "algorithm_config": {
            "blocks": blocks,
            "kernel_size": sparse["kernel_size"],
            "kernel_stride": sparse["kernel_stride"],
        },
        "page_size": size,
        "budget": max(blocks, -(-sparse["dense_len"] // size)) * size,
        "num_sink_pages": sparse["init_blocks"],
        "num_recent_pages": local,
    }
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Trained(settings, head_dim)


def _selects(model_config: Any) -> bool:
    text = model_config.hf_text_config
    if _trained(text) is None:
        return False
    name, sparse = name_of(model_config), text.sparse_config
    if getattr(text, "has_lightning_layers", False):
        raise ConfigError(f"{name} has Lightning layers; expected mixer_types of minicpm4 alone")
    if sparse.get("use_nope"):
        raise ConfigError(f"use_nope of {name}: got true, expected false")
    window, size = sparse["window_size"], sparse["block_size"]
    if window < size or window % size:
        raise ConfigError(f"window_size of {name}: got {window}, expected a multiple of {size}")
    return True


def _attend(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward_batch: Any,
    *,
    head_dim: int,
    **options: Any,
) -> Tensor:
    """SGLang's attention of ``q [T, Hq * D]`` and ``k [T, Hkv * D]``, which are inputs too."""
    queries = q.unflatten(-1, (-1, head_dim))
    # The selection has no weights: these are not read.
    inputs = RowwiseInputs(queries, k, queries[..., 0])
    return attend(q, k, v, forward_batch, topk_indices=inputs, **options)


class MiniCPMSelection(Feature):
    """Every layer passes its queries and keys as ``topk_indices``."""

    name = "infllm"
    serves = (asks_indexer("infllm"),)
    indexer = IndexerKind(
        found=_selects,
        expected="a model without an indexer",
        feature="infllm",
        fields=frozenset({"sparse_config"}),
        trained=_trained,
    )
    kinds = (indexer,)
    # Sums of keys cannot take a rejected draft back, and SGLang's model has no pipeline.
    excludes = {serves[0]: (SPECULATION, PREFILL_OR_DECODE, STORAGE, PIPELINE)}

    @contextmanager
    def adjusting(self, server_args: Any) -> Iterator[None]:
        """Let SGLang see no selection: it would turn the radix cache off."""
        from sglang.srt.configs.minicpm import MiniCPMHybridConfig

        with patch.object(MiniCPMHybridConfig, "has_minicpm_sparse_attention", False):
            yield

    def built(self, session: Any, model_runner: Any) -> None:
        """Make every layer pass its inputs under the name that backends know."""
        for module in model_runner.model.modules():
            if hasattr(module, "attn") and hasattr(module, "attn_use_rope"):
                forward = module.attn.forward
                module.attn.forward = partial(_attend, forward, head_dim=module.head_dim)


FEATURE = MiniCPMSelection()
