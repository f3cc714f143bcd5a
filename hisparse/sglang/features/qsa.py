"""Qwen4-Exp: passes what the indexers give for tokens to the algorithm ``qsa``."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hisparse.errors import ConfigError
from hisparse.sglang.features.base import Feature, IndexerKind, Start, asks_indexer
from hisparse.sglang.models import Trained, indexed_layers, name_of, rows_of_slice
from hisparse.sglang.session import ServerSession, current_session
from hisparse.types import BlockIndexerInputs, IndexerInputs

#: Values of ``--qsa-indexer-dtype`` as the algorithm names them.
_DTYPES = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}


def _has_indexer(model_config: Any) -> bool:
    from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

    try:
        return bool(is_qwen_qsa(model_config.hf_config))
    except ValueError as error:
        if _trained(model_config.hf_text_config) is None:
            return False  # Fields of another indexer, or some are missing.
        raise ConfigError(
            f"the indexer of {name_of(model_config)}: {error}; expected one that SGLang serves"
        ) from error


def _trained(text: Any) -> Trained | None:
    names = "indexer_budget", "indexer_compress_ratio", "indexer_head_dim"
    budget, ratio, width = (getattr(text, name, None) for name in names)
    if not budget or ratio is None or width is None:
        return None
    settings = {"algorithm": "qsa", "page_size": ratio, "budget": budget}
    return Trained(settings | {"num_sink_pages": 0, "num_recent_pages": 0}, width)


def around_parse_qsa_profile(original: Callable[..., Any], config: Any) -> Any:
    """Once the engine is sized, let SGLang see no indexer.

    It would else take a pool with index keys of its own, and a backend of its own.
    """
    return original(config) if current_session() is None else None


class _Inputs(BlockIndexerInputs):
    """Inputs that SGLang can take for a tensor."""

    __getitem__ = rows_of_slice

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until ``stream`` has read it."""
        for tensor in (*self, self.positions):
            tensor.record_stream(stream)


def _indexer_inputs(
    indexer: Any, hidden_states: Tensor, positions: Tensor, forward_batch: Any
) -> _Inputs:
    """Queries, keys of tokens and weights of an indexer.

    Args:
        indexer: SGLang's ``QSAIndexer``.
        hidden_states: ``[T, hidden size]``, input of the attention layer.
        positions: ``[T]`` or ``[3, T] int64``, rotary positions.
        forward_batch: SGLang's, not read.
    """
    queries, keys, _ = indexer.project_qk(hidden_states, positions, ensure_cos_sin_cache=False)
    weights = queries.new_full(queries.shape[:2], indexer.index_head_dim**-0.5)
    rotary = positions.T if positions.ndim == 2 else positions[:, None].expand(-1, 3)
    return _Inputs.of(
        IndexerInputs(queries, keys[:, 0], weights), rotary, partial(_compress, indexer)
    )


def _compress(indexer: Any, keys: Tensor, first: Tensor) -> Tensor:
    """Keys ``[N, Di]`` of blocks of the tokens' keys ``[N, S, Di]``, ``first [N, 3]`` positions."""
    normed = indexer.k_layernorm(keys.float().mean(1).to(keys.dtype))[:, None]
    positions = indexer._rope_from_matrix(first)
    rotated: Tensor = indexer.apply_rope(positions, normed, ensure_cos_sin_cache=False)
    return rotated[:, 0]


class QwenIndexer(Feature):
    """Every layer with an indexer passes what that gives in place of token indices."""

    name = "qsa"
    serves = (asks_indexer("qsa"),)
    indexer = IndexerKind(
        found=_has_indexer,
        expected="a model without an indexer",
        feature="qsa",
        fields=frozenset(
            {
                *("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim"),
                *("indexer_budget", "indexer_compress_ratio"),
            }
        ),
        trained=_trained,
    )
    kinds = (indexer,)
    hooks = {"sglang.srt.layers.attention.qsa.config.parse_qsa_profile": around_parse_qsa_profile}

    def prepare(self, start: Start) -> Mapping[str, Any]:
        """Take the dtype of index keys from SGLang's flag, which SGLang would check for a GPU.

        Raises:
            ConfigError: the settings name another dtype.
        """
        asked, options = start.args.qsa_indexer_dtype, start.config.algorithm_config
        if asked not in _DTYPES:
            return {}
        got = options.get("index_dtype", _DTYPES[asked])
        if got != _DTYPES[asked]:
            raise ConfigError(
                f"--qsa-indexer-dtype: got {asked} beside index_dtype {got!r}, expected one of them"
            )
        start.args.qsa_indexer_dtype = "auto"
        return {"algorithm_config": {**options, "index_dtype": _DTYPES[asked]}}

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Make every layer pass the inputs of its indexer instead of token indices."""
        for layer in indexed_layers(model_runner.model):
            layer._compute_qsa_topk_indices = partial(_indexer_inputs, layer.indexer)


FEATURE = QwenIndexer()
