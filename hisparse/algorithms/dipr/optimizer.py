"""Which of DIPR's indexes a server gets: rules after AlayaDB's optimizer, with measured limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["IndexChoice", "IndexQuestion", "choose_index"]

#: Contexts whose keys are scored faster than anything can be looked up about them (docs/dipr.md).
_SHORT = 16384
#: Contexts from which on a search in a graph pays for missing some tokens.
_LONG = 65536
#: Decode steps in which a graph saves the time that it takes to build, whatever the context: both
#: grow with it.
_WORTH_A_GRAPH = 2000
#: Most of the context that may be in range if an index is to leave much of it unread.
_SELECTIVE = 1 / 8
#: Tokens of a page from which on its range is much smaller than its keys.
_LEAST_PAGE = 8
#: Most of the device memory that ranges may take.
_DEVICE_PART = 1 / 2


@dataclass(frozen=True, kw_only=True)
class IndexQuestion:
    """What the choice depends on.

    Attributes:
        context_length: tokens, the longest that is served.
        expected_tokens: tokens that are expected in range of a query head.
        new_tokens: tokens that a request is expected to generate.
        page_size: tokens.
        kv_token_bytes: host memory of K and V of one token, all layers.
        range_token_bytes: device memory of page ranges for one token, all layers.
        graph_token_bytes: host memory of graphs for one token, all layers.
        device_bytes: device memory for all that is kept there.
        host_bytes: host memory for K, V and graphs.
        has_graphs: whether the library that builds them is installed.
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
    """An index, and why.

    Attributes:
        kind: which one.
        reason: one line.
    """

    kind: Literal["flat", "coarse", "fine"]
    reason: str


def choose_index(asked: IndexQuestion) -> IndexChoice:
    """Exact and cheap first: flat for what is short or hardly selective, a graph for the longest.

    Args:
        asked: what the choice depends on.

    Returns:
        The same for the same question; nothing is looked up.
    """
    context, expected = asked.context_length, asked.expected_tokens
    if context <= _SHORT:
        return IndexChoice(
            "flat", f"contexts of at most {context:,} tokens are scored whole faster than searched"
        )
    if expected > _SELECTIVE * context:
        return IndexChoice(
            "flat", f"{expected:,} of {context:,} tokens are expected in range: few can be left out"
        )
    graph_bytes = asked.graph_token_bytes * context
    fits = graph_bytes + asked.kv_token_bytes * context <= asked.host_bytes
    often = asked.new_tokens >= _WORTH_A_GRAPH
    if context >= _LONG and often and asked.has_graphs and fits:
        return IndexChoice(
            "fine",
            f"{expected:,} of {context:,} tokens are expected in range for {asked.new_tokens:,} "
            f"steps, and host memory holds keys, values and {graph_bytes:,} bytes of graphs",
        )
    range_bytes = int(asked.range_token_bytes * asked.host_bytes / asked.kv_token_bytes)
    if asked.page_size < _LEAST_PAGE:
        return IndexChoice(
            "flat", f"ranges of pages of {asked.page_size} tokens are no smaller than their keys"
        )
    if range_bytes > _DEVICE_PART * asked.device_bytes:
        return IndexChoice(
            "flat",
            f"{range_bytes:,} bytes of page ranges are more than half of the "
            f"{asked.device_bytes:,} bytes of device memory",
        )
    return IndexChoice(
        "coarse",
        f"{context:,} tokens are too many to score and {range_bytes:,} bytes of page ranges fit "
        "the device",
    )
