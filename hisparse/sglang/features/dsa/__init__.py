"""DeepSeek-V3.2: passes the indexers' queries, keys and weights to the algorithm ``dsa``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hisparse.sglang.requested import is_requested
from hisparse.types import IndexerInputs

__all__ = [
    "RowwiseInputs",
    "around_compute_indexer_cell_size",
    "around_kv_cache_dtype_default",
    "compute_indexer_inputs",
    "fake_device_capability",
    "find_indexers",
    "return_indexer_inputs",
    "skip_indexers",
]


@contextmanager
def fake_device_capability() -> Iterator[None]:
    """Report compute capability (0, 0) on machines without CUDA.

    For DeepSeek-V3.2 SGLang reads the capability to choose kernels and dtypes. hisparse uses
    neither, but without CUDA the call would fail.
    """
    if torch.cuda.is_available():
        yield
        return
    original, torch.cuda.get_device_capability = torch.cuda.get_device_capability, lambda *_: (0, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = original


def around_kv_cache_dtype_default(original: Callable[..., Any], view: Any) -> Any:
    """Keep latents in the model's dtype instead of the dtype that SGLang's DSA kernels require."""
    return {} if is_requested(view) else original(view)


def around_compute_indexer_cell_size(
    original: Callable[..., int], configurator: Any, *, kvc: Any, **options: Any
) -> int:
    """Count no bytes for index keys: hisparse's own sizing counts them as representations."""
    if is_requested(kvc.server_args):
        return 0
    return original(configurator, kvc=kvc, **options)


def find_indexers(model: Any) -> list[Any]:
    """The indexers of SGLang's ``model``, one per layer in order; empty for most models."""
    layers = [m for m in model.modules() if getattr(m, "use_dsa", False)]
    return [m.indexer for m in layers if getattr(m, "indexer", None) is not None]


def return_indexer_inputs(model: Any) -> None:
    """Make every indexer return :func:`compute_indexer_inputs` instead of token indices.

    SGLang passes an indexer's return value to the attention backend as ``topk_indices``. SGLang's
    own top-k needs CUDA and an index key pool, which hisparse does not allocate.
    """
    for indexer in find_indexers(model):
        indexer.forward = partial(compute_indexer_inputs, indexer)


def skip_indexers(model: Any) -> None:
    """Skip the indexers of a draft model: its attention is dense.

    Their index keys would need a cache, and drafts only have to be likely.
    """
    for indexer in find_indexers(model):
        indexer.forward = lambda *args, **kwargs: None


class RowwiseInputs(IndexerInputs):
    """Indexer inputs of which SGLang can take the rows that are not padding, as of a tensor."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        """A field by its number, or the rows of a slice."""
        if isinstance(index, slice):
            return RowwiseInputs(*self.take(index))
        return super().__getitem__(index)


def compute_indexer_inputs(
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
