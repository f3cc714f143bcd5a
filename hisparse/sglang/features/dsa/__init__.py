"""DeepSeek-V3.2: passes the indexers' queries, keys and weights to the algorithm ``dsa``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hisparse.sglang.features.base import INDEXER, WITH_INDEXER, Feature
from hisparse.sglang.install import is_requested
from hisparse.sglang.models import RowwiseInputs, find_indexers
from hisparse.sglang.session import ServerSession


@contextmanager
def _fake_device_capability() -> Iterator[None]:
    """Report compute capability (0, 0) on machines without CUDA.

    For DeepSeek-V3.2 SGLang reads the capability to choose kernels and dtypes. hisparse uses
    neither, but without CUDA the call would fail.
    """
    if torch.cuda.is_available():
        yield
        return
    with patch.object(torch.cuda, "get_device_capability", lambda *_: (0, 0)):
        yield


def _around_kv_cache_dtype_default(original: Callable[..., Any], view: Any) -> Any:
    """Keep latents in the model's dtype instead of the dtype that SGLang's DSA kernels require."""
    return {} if is_requested(view) else original(view)


def around_compute_indexer_cell_size(
    original: Callable[..., int], configurator: Any, *, kvc: Any, **options: Any
) -> int:
    """Count no bytes for index keys: hisparse's own sizing counts them as representations."""
    if is_requested(kvc.server_args):
        return 0
    return original(configurator, kvc=kvc, **options)


def _indexer_inputs(
    indexer: Any, x: Tensor, q_lora: Tensor, positions: Tensor, *_: Any, **__: Any
) -> RowwiseInputs:
    """Queries, keys and weights of the lightning indexer.

    SGLang rotates queries and keys by a Hadamard matrix before it rounds them to fp8. This
    function omits the rotation, which does not change their products.

    Args:
        indexer: SGLang's ``Indexer``.
        x: ``[T, hidden size]``, input of the attention layer.
        q_lora: ``[T, rank]``, compressed queries of the attention layer.
        positions: ``[T] int64``, positions in the sequence.
    """
    queries = indexer.wq_b(q_lora)[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
    if indexer.use_dsa_indexer_fusion:
        keys, weights = indexer._fused_k_weights(x)
    else:
        # `weights_proj` is bfloat16 in every model, whatever the dtype of its input.
        keys, weights = indexer.wk(x)[0], x.float() @ indexer.weights_proj.weight.float().T
    keys = indexer.k_norm(keys)[:, None]
    rope = indexer.rope_head_dim
    rotated = indexer.rotary_emb(
        positions, queries[..., :rope].contiguous(), keys[..., :rope].contiguous()
    )
    # On a CPU `rotary_emb` returns one dimension more.
    queries, keys = (
        torch.cat([new.view_as(x[..., :rope]), x[..., rope:]], -1)
        for new, x in zip(rotated, (queries, keys), strict=True)
    )
    scale = (indexer.n_heads * indexer.head_dim) ** -0.5
    return RowwiseInputs(queries, keys[:, 0], weights.float() * scale)


class DeepSeekIndexer(Feature):
    """Every indexer returns its queries, keys and weights, and the pool has no index keys."""

    name = "dsa"
    serves = (INDEXER,)
    kinds = (WITH_INDEXER,)
    indexer = WITH_INDEXER
    hooks = {
        "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default": (
            _around_kv_cache_dtype_default
        ),
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
        "._compute_dsa_indexer_cell_size": around_compute_indexer_cell_size,
    }

    @contextmanager
    def adjusting(self, server_args: Any) -> Iterator[None]:
        """Let SGLang ask for a compute capability where there is none."""
        with _fake_device_capability():
            yield

    def pool_class(self, kind: str, *, is_draft: bool) -> type | None:
        """Pools of latents without index keys."""
        if kind != "dsa":
            return None
        from hisparse.sglang.features.dsa.pools import DraftDSAPool, HiSparseDSAPool

        return DraftDSAPool if is_draft else HiSparseDSAPool

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Make every indexer return its inputs instead of token indices.

        SGLang passes an indexer's return value to the attention backend as ``topk_indices``.
        SGLang's own top-k needs CUDA and an index key pool, which hisparse does not allocate.
        """
        for indexer in find_indexers(model_runner.model):
            indexer.forward = partial(_indexer_inputs, indexer)

    def prepare_draft(self, model: Any) -> None:
        """Skip the indexers of a draft model: its attention is dense.

        Their index keys would need a cache, and drafts only have to be likely.
        """
        for indexer in find_indexers(model):
            indexer.forward = lambda *args, **kwargs: None


FEATURE = DeepSeekIndexer()
