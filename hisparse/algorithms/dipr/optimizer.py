"""Chooses DIPR's index for a server: rules after AlayaDB's optimizer, with measured limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["IndexChoice", "IndexQuestion", "choose_index"]

#: Up to this context length, a scan of all keys is faster than any index (docs/dipr.md).
_SHORT = 16384
#: From this context length on, a graph search saves enough time to be worth its missed tokens.
_LONG = 65536
#: Decode steps after which a graph has saved its build time. Both times grow with the context.
_WORTH_A_GRAPH = 2000
#: Largest fraction of the context in range for which an index leaves much of the context unread.
_SELECTIVE = 1 / 8
#: From this page size on, in tokens, a page's range is much smaller than its keys.
_LEAST_PAGE = 8
#: Largest fraction of the device memory for ranges.
_DEVICE_PART = 1 / 2


@dataclass(frozen=True, kw_only=True)
class IndexQuestion:
    """The inputs of :func:`choose_index`.

    Attributes:
        context_length: tokens, the longest sequence.
        expected_tokens: expected number of tokens in range of a query head.
        new_tokens: expected number of tokens that a request generates.
        page_size: tokens.
        kv_token_bytes: host memory of K and V of one token, all layers.
        range_token_bytes: device memory of page ranges for one token, all layers.
        graph_token_bytes: host memory of graphs for one token, all layers.
        device_bytes: device memory for everything that hisparse keeps there.
        host_bytes: host memory for K, V and graphs.
        has_graphs: whether faiss, which builds the graphs, is installed.
    """

    context_length: int
    expected_tokens: int
    new_tokens: int
    page_size: int
    kv_token_bytes: int
    range_token_bytes: float
    graph_token_bytes: int
    device_bytes: int
    host_bytes: int
    has_graphs: bool


class IndexChoice(NamedTuple):
    """The chosen index.

    Attributes:
        kind: name of the index.
        reason: the reason in one line.
    """

    kind: Literal["flat", "coarse", "fine"]
    reason: str


def choose_index(question: IndexQuestion) -> IndexChoice:
    """Choose a flat scan for short or unselective contexts, a graph for the longest ones.

    Args:
        question: the inputs; the choice depends on nothing else.
    """
    context, expected = question.context_length, question.expected_tokens
    if context <= _SHORT:
        return IndexChoice(
            "flat", f"contexts of at most {context:,} tokens are scored whole faster than searched"
        )
    if expected > _SELECTIVE * context:
        return IndexChoice(
            "flat", f"{expected:,} of {context:,} tokens are expected in range: few can be left out"
        )
    graph_bytes = question.graph_token_bytes * context
    fits = graph_bytes + question.kv_token_bytes * context <= question.host_bytes
    often = question.new_tokens >= _WORTH_A_GRAPH
    if context >= _LONG and often and question.has_graphs and fits:
        return IndexChoice(
            "fine",
            f"{expected:,} of {context:,} tokens are expected in range for {question.new_tokens:,} "
            f"steps, and host memory holds keys, values and {graph_bytes:,} bytes of graphs",
        )
    range_bytes = int(question.range_token_bytes * question.host_bytes / question.kv_token_bytes)
    if question.page_size < _LEAST_PAGE:
        return IndexChoice(
            "flat", f"ranges of pages of {question.page_size} tokens are no smaller than their keys"
        )
    if range_bytes > _DEVICE_PART * question.device_bytes:
        return IndexChoice(
            "flat",
            f"{range_bytes:,} bytes of page ranges are more than half of the "
            f"{question.device_bytes:,} bytes of device memory",
        )
    return IndexChoice(
        "coarse",
        f"{context:,} tokens are too many to score and {range_bytes:,} bytes of page ranges fit "
        "the device",
    )
