"""Exact logits of keys in PyTorch and Python: the oracle of the other implementations."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hisparse.kernels.attention.reference import cap_logits
from hisparse.kernels.keys.op import GraphSearch, KeyGraphs

__all__ = ["graph_score", "key_score"]


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    pages: Tensor | None,
    reduce: str,
    logit_cap: float,
) -> Tensor:
    """See :func:`hisparse.kernels.key_score`."""
    page = torch.arange(host_page_table.shape[1])
    absent = (page >= num_pages[:, None])[:, None].expand(-1, query.shape[1], -1)
    if pages is not None:
        absent = absent | ~pages
    own = keys[host_page_table.masked_fill(absent.all(1), 0).long()]  # [B, P, Hkv, S, D]
    grouped = query.unflatten(1, (keys.shape[1], -1))[:, None, :, None]
    # Not a matrix product: the order of its sums could depend on the number of pages.
    logits = (grouped * own.float()[..., None, :]).sum(-1)  # [B, P, Hkv, S, G]
    logits = cap_logits(logits, logit_cap)
    by_page = logits.amax(3) if reduce == "max" else logits.logsumexp(3)
    scores: Tensor = by_page.flatten(2).transpose(1, 2).masked_fill(absent, -torch.inf)
    return scores


def graph_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    graphs: KeyGraphs,
    best: Tensor,
    search: GraphSearch,
) -> Tensor:
    """See :func:`hisparse.kernels.graph_score`."""
    batch, q_heads, _ = query.shape
    kv_heads, size = keys.shape[1:3]
    scores = torch.full((batch, q_heads, host_page_table.shape[1]), -torch.inf)
    for b in range(batch):
        tokens = min(int(graphs.tokens[b]), int(num_pages[b]) * size)
        if tokens == 0:
            continue
        own = keys[host_page_table[b, : -(-tokens // size)].long()]  # [P, Hkv, S, D]
        links = _links(graphs, b, kv_heads)
        for head in range(q_heads):
            kv_head = head * kv_heads // q_heads
            products = (own[:, kv_head].float() * query[b, head]).sum(-1).flatten()[:tokens]
            of_page = scores[b, head]

            def see(token: int, products: Tensor = products, of_page: Tensor = of_page) -> float:
                product = float(products[token])
                of_page[token // size] = max(float(of_page[token // size]), product)
                return product

            entries = range(0, tokens, graphs.entry_stride)
            known = float(best[b, head])
            _explore(see, links[kv_head][:tokens], entries, known, search)
    return scores


def _links(graphs: KeyGraphs, b: int, kv_heads: int) -> np.ndarray:
    """``[Hkv, tokens, links per token]``."""
    shape = (kv_heads, int(graphs.tokens[b]), graphs.links_per_token)
    memory = (ctypes.c_int32 * int(np.prod(shape))).from_address(int(graphs.addresses[b]))
    links: np.ndarray = np.ctypeslib.as_array(memory).reshape(shape)
    return links


def _explore(
    see: Callable[[int], float],
    links: np.ndarray,
    entries: range,
    best: float,
    search: GraphSearch,
) -> None:
    """Call ``see`` for every entry, then for each token linked to an explored candidate."""
    seen: set[int] = set()
    frontier: list[tuple[float, int]] = []

    def visit(tokens: list[int]) -> None:
        nonlocal best
        for token in tokens:
            if 0 <= token < len(links) and token not in seen:
                seen.add(token)
                product = see(token)
                best = max(best, product)
                heapq.heappush(frontier, (-product, token))

    visit(list(entries))
    explored = 0
    while frontier:
        behind, token = heapq.heappop(frontier)
        if explored >= search.threshold and -behind < best - search.within:
            break
        explored += 1
        visit(links[token].tolist())
