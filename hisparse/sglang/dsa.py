"""DeepSeek-V3.2: the model's indexers hand over what they compute, and `dsa` does the choosing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hisparse.sglang import checks
from hisparse.types import IndexerInputs

__all__ = [
    "around_compute_cell_size",
    "around_compute_indexer_cell_size",
    "around_kv_cache_dtype_default",
    "device_capability",
    "find_indexers",
    "hand_over_inputs",
    "indexer_inputs",
]


@contextmanager
def device_capability() -> Iterator[None]:
    """Let SGLang ask for a CUDA device's capability where there is no such device.

    For DeepSeek-V3.2 it does, to choose kernels and dtypes that hisparse does not use.
    """
    if torch.cuda.is_available():
        yield
        return
    asked, torch.cuda.get_device_capability = torch.cuda.get_device_capability, lambda *_: (0, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = asked


def around_kv_cache_dtype_default(original: Callable[..., Any], view: Any) -> Any:
    """Latents are stored as the model computes them, not in what SGLang's DSA kernels want."""
    return {} if checks.is_requested(view) else original(view)


def around_compute_indexer_cell_size(
    original: Callable[..., int], configurator: Any, *, kvc: Any, **options: Any
) -> int:
    """Index keys are representations, which hisparse's own sizing counts."""
    if checks.is_requested(kvc.server_args):
        return 0
    return original(configurator, kvc=kvc, **options)


def around_compute_cell_size(
    original: Callable[..., int], configurator: Any, kvc: Any, num_layers: int
) -> int:
    """As :func:`around_compute_indexer_cell_size`, in releases that count all in one function."""
    from sglang.srt.model_executor import pool_configurator

    if not checks.is_requested(kvc.server_args):
        return original(configurator, kvc, num_layers)
    with patch.object(pool_configurator, "is_deepseek_dsa", lambda config: False):
        return original(configurator, kvc, num_layers)


def find_indexers(model: Any) -> list[Any]:
    """The indexers of SGLang's ``model``, in the order of the layers; none in most models."""
    layers = [m for m in model.modules() if getattr(m, "use_dsa", False)]
    return [m.indexer for m in layers if getattr(m, "indexer", None) is not None]


def hand_over_inputs(model: Any) -> None:
    """Let every indexer return what :func:`indexer_inputs` makes, in place of indices.

    SGLang passes what an indexer returns on to the attention backend, as ``topk_indices``. Its
    own choice would need index keys in a pool of SGLang's, and CUDA.
    """
    for indexer in find_indexers(model):
        indexer.forward = partial(indexer_inputs, indexer)


def indexer_inputs(
    indexer: Any, x: Tensor, q_lora: Tensor, positions: Tensor, *_: Any, **__: Any
) -> IndexerInputs:
    """Queries, keys and weights of the lightning indexer.

    The Hadamard rotation that SGLang applies to both queries and keys before it rounds them to
    fp8 is left out: it changes no product.

    Args:
        indexer: SGLang's ``Indexer``.
        x: ``[T, hidden size]``, input of the attention layer.
        q_lora: ``[T, rank]``, compressed queries of the attention layer.
        positions: ``[T] int64``.
    """
    queries = indexer.wq_b(q_lora)[0].unflatten(-1, (indexer.n_heads, indexer.head_dim))
    if indexer.use_dsa_indexer_fusion:
        keys, weights = indexer._fused_k_weights(x)
    else:
        # These weights are bfloat16 in every model, and so are not `weights_proj`'s inputs.
        keys, weights = indexer.wk(x)[0], x.float() @ indexer.weights_proj.weight.float().T
    keys = indexer.k_norm(keys)[:, None]
    rope = indexer.rope_head_dim
    turned = indexer.rotary_emb(
        positions, queries[..., :rope].contiguous(), keys[..., :rope].contiguous()
    )
    # On a CPU what is turned comes back with a dimension more.
    queries, keys = (
        torch.cat([new.view_as(x[..., :rope]), x[..., rope:]], -1)
        for new, x in zip(turned, (queries, keys), strict=True)
    )
    scale = (indexer.n_heads * indexer.head_dim) ** -0.5
    return IndexerInputs(queries, keys[:, 0], weights.float() * scale)
