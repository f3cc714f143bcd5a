"""MiniMax-M3: passes what the indexers give for tokens to the algorithm ``msa``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.sglang.features.base import Feature, IndexerKind, asks_indexer
from hisparse.sglang.models import RowwiseInputs, Trained, name_of

#: Fields of transformers' configuration, and keys of ``sparse_attention_config`` as published.
_NAMES = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
_SPARSE = "minimax_m3_sparse"


def _published(text: Any) -> dict[str, Any]:
    """``sparse_attention_config`` of a decoder, or the same from transformers' fields."""
    published: dict[str, Any] | None = getattr(text, "sparse_attention_config", None)
    kinds = getattr(text, "layer_types", None) or ()
    if published or _SPARSE not in kinds:
        return published or {}
    found = {key: getattr(text, field) for field, key in _NAMES.items()}
    return found | {"sparse_attention_freq": [int(kind == _SPARSE) for kind in kinds]}


def _trained(text: Any) -> Trained | None:
    sparse = _published(text)
    if "sparse_block_size" not in sparse:
        return None
    size = sparse["sparse_block_size"]
    first = -(-sparse.get("sparse_init_tokens", 0) // size)
    local = -(-sparse.get("sparse_local_tokens", 0) // size) + 1
    dense = [x for x, is_sparse in enumerate(sparse["sparse_attention_freq"]) if not is_sparse]
    settings = {
        "algorithm": "msa",
        "page_size": size,
        "budget": sparse["sparse_topk_blocks"] * size,
        "num_sink_pages": sparse.get("sparse_init_block", first),
        # The page of the newest token is attended in any case.
        "num_recent_pages": sparse.get("sparse_local_block", local) - 1,
        "dense_layers": dense,
    }
    return Trained(settings, sparse["sparse_index_dim"], tuple(dense))


def around_is_minimax_sparse(original: Callable[..., bool], config: Any) -> bool:
    """Let SGLang see no indexer: it would take a pool and a backend of its own."""
    return False


def _attend(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward_batch: Any,
    *,
    idx_q: Tensor,
    idx_k: Tensor,
    idx_v: None,
    **options: Any,
) -> tuple[None, Tensor]:
    """SGLang's attention with an indexer, ``idx_q [T, Hi, Di]`` and ``idx_k [T, 1, Di]``."""
    # The indexer has no weights: these are not read.
    inputs = RowwiseInputs(idx_q, idx_k[:, 0], idx_q[..., 0])
    return None, attend(q, k, v, forward_batch, topk_indices=inputs, **options)


class MiniMaxIndexer(Feature):
    """Every layer with an indexer passes what that gives as ``topk_indices``."""

    name = "msa"
    serves = (asks_indexer("msa"),)
    indexer = IndexerKind(
        found=lambda model_config: _trained(model_config.hf_text_config) is not None,
        expected="a model without an indexer",
        feature="msa",
        fields=frozenset({*_NAMES, "sparse_attention_config"}),
        trained=_trained,
    )
    kinds = (indexer,)
    hooks = {"sglang.srt.configs.model_config.is_minimax_sparse": around_is_minimax_sparse}

    def check(self, server_args: Any, config: HiSparseConfig) -> None:
        """Require the indexer that the algorithm scores with, and its pages and dense layers.

        Raises:
            ConfigError: the indexer is another one, or a setting does not fit it.
        """
        from sglang.srt.arg_groups.overrides import model_config_of

        model = model_config_of(server_args)
        text, name = model.hf_text_config, name_of(model)
        sparse, trained = _published(text), _trained(text)
        if trained is None:
            return
        heads, flags = sparse["sparse_num_index_heads"], sparse["sparse_attention_freq"]
        values = sparse.get("sparse_disable_index_value")
        for field, got, expected in (
            ("sparse_score_type", sparse.get("sparse_score_type", "max"), "max"),
            ("sparse_num_index_heads", heads, text.num_key_value_heads),
            ("sparse_disable_index_value", values or flags, flags),
        ):
            if got != expected:
                raise ConfigError(f"{field} of {name}: got {got}, expected {expected}")
        if trained.settings["num_recent_pages"] < 0:
            raise ConfigError(f"sparse_local_block of {name}: got 0, expected at least 1")
        super().check(server_args, config)

    def built(self, session: Any, model_runner: Any) -> None:
        """Make every layer with an indexer pass its inputs under the name that backends know."""
        for module in model_runner.model.modules():
            if getattr(module, "is_sparse_attention_layer", False):
                module.attn.forward = partial(_attend, module.attn.forward)


FEATURE = MiniMaxIndexer()
