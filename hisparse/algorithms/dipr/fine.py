"""DIPR's fine index: a graph that links each key of a request to similar keys."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms.request_indexes import RequestIndexes
from hisparse.algorithms.step import DecodeStep, PrefillStep
from hisparse.errors import ConfigError
from hisparse.kernels import GraphSearch, KeyGraphs, graph_score, key_score

#: Links of a token in HNSW's lowest layer: twice the M that is passed to faiss.
LINKS_PER_TOKEN = 32
#: Candidates that faiss considers for a token's links. More are slower and change little.
_CONSTRUCTION = 40
#: Tokens between the starting points of a search. Neighbours in the text are neighbours in the
#: graph, so the search reaches every cluster of keys.
_ENTRY_STRIDE = 32


def require_faiss() -> Any:
    """Import faiss, which builds the graphs.

    Raises:
        ConfigError: faiss is not installed.
    """
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise ConfigError(
            f"algorithm_config.index: got 'fine', which needs faiss ({error}); expected "
            "faiss-cpu to be installed (pip install 'hisparse[dipr]'), or index flat"
        ) from None


def build_graph(layer_id: int, step: PrefillStep, threshold: int) -> None:
    """At the end of a prompt, link its keys if the prompt is long enough for a search to pay off.

    A search explores at least ``threshold`` candidates with ``LINKS_PER_TOKEN`` links each. A scan
    of no more tokens than that is as fast, so a shorter prompt gets no graph. Without memory for a
    graph, the keys of the request are scanned as well.

    Args:
        layer_id: layer number.
        step: the chunk; ignored unless it is the last one of the prompt.
        threshold: l0, fewest candidates that a search explores.
    """
    size = step.policy.kv.page_size
    num_tokens = step.end // size * size
    if not step.is_last or num_tokens <= threshold * LINKS_PER_TOKEN:
        return
    indexes, heads = _indexes(step), step.policy.kv.num_kv_heads
    if not indexes.has_room(4 * LINKS_PER_TOKEN * heads * num_tokens):
        # Requests with a common prefix build a graph each: more than sizing counts per token.
        return
    # Copied, because a tile is valid only until the next one.
    tiles = [keys.to(torch.float32, copy=True) for _, keys in step.context_keys(layer_id)]
    links = link_keys(torch.cat(tiles)[:num_tokens])
    indexes.put(layer_id, step.slot, links, num_tokens)


def link_keys(keys: Tensor) -> Tensor:
    """Link each token to tokens with similar keys, for each KV head; HNSW's lowest layer.

    An additional channel gives all keys the same norm, so that the key with the largest q.k is the
    nearest neighbour of q (https://doi.org/10.1145/2645710.2645741).

    Args:
        keys: ``[n, Hkv, D] float32``.

    Returns:
        ``[Hkv, n, LINKS_PER_TOKEN] int32``, padded with -1; deterministic.
    """
    squares = keys.square().sum(-1)
    missing = (squares.amax(0) - squares).clamp(min=0).sqrt()
    extended = torch.cat([keys, missing[..., None]], -1)
    vectors = [np.ascontiguousarray(head) for head in extended.transpose(0, 1).numpy()]
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        return torch.from_numpy(np.stack(list(pool.map(_link, vectors))))


def _link(vectors: np.ndarray) -> np.ndarray:
    """``[n, D + 1] float32`` -> ``[n, LINKS_PER_TOKEN] int32``."""
    faiss = require_faiss()
    # For this thread: a graph that several threads build depends on their order.
    faiss.omp_set_num_threads(1)
    index = faiss.IndexHNSWFlat(vectors.shape[1], LINKS_PER_TOKEN // 2)
    index.hnsw.efConstruction = _CONSTRUCTION
    index.add(vectors)
    # The links of a token are contiguous, those of the lowest layer first.
    starts = faiss.vector_to_array(index.hnsw.offsets)[:-1].astype(np.int64)
    neighbors = faiss.vector_to_array(index.hnsw.neighbors)
    links: np.ndarray = neighbors[starts[:, None] + np.arange(LINKS_PER_TOKEN)].astype(np.int32)
    return links


def fine_scores(
    query: Tensor, layer_id: int, step: DecodeStep, rest: Tensor, within: float, threshold: int
) -> Tensor:
    """Best logit of each page among the tokens that the search visits; it may miss a page.

    Pages that were filled after the graph was built are scored in full. So are all pages of a
    request without a graph.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        layer_id: layer number.
        step: the step.
        rest: ``[B, Hq] float32``, best logit of the tail page.
        within: beta in units of logits.
        threshold: l0, fewest candidates that the search explores.

    Returns:
        ``[B, Hq, max_pages] float32``, -inf for pages without a visited token.
    """
    indexes, table = _indexes(step), step.host_page_table[:, : step.max_pages]
    addresses = indexes.addresses[layer_id].index_select(0, step.slots)
    tokens = indexes.lengths[layer_id].index_select(0, step.slots)
    keys, size = step.host_keys(layer_id), step.policy.kv.page_size
    fresh = torch.arange(step.max_pages) >= (tokens // size)[:, None]
    fresh = fresh[:, None].expand(-1, query.shape[1], -1)
    scores = key_score(query, keys, table, step.num_pages, pages=fresh)
    best = torch.maximum(rest, scores.amax(-1))
    graphs = KeyGraphs(addresses, tokens, LINKS_PER_TOKEN, _ENTRY_STRIDE)
    search = GraphSearch(within, threshold)
    found = graph_score(query, keys, table, step.num_pages, graphs, best, search)
    return torch.maximum(scores, found)


def _indexes(step: PrefillStep | DecodeStep) -> RequestIndexes:
    assert step.indexes is not None, "the engine sets indexes in every step"
    return step.indexes
