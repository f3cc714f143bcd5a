"""Chooses DIPR's index for a server: rules after AlayaDB's optimizer, with measured limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

#: From this context length on, a graph search saves enough time to be worth its missed tokens
#: (docs/dipr.md).
_LONG = 65536
#: Decode steps after which a graph has saved its build time. Both times grow with the context.
_WORTH_A_GRAPH = 2000
#: Largest fraction of the context in range for which a search leaves much of the context unread.
_SELECTIVE = 1 / 8


@dataclass(frozen=True, kw_only=True)
class IndexQuestion:
    """The inputs of :func:`choose_index`.

    Attributes:
        context_length: tokens, the longest sequence.
        expected_tokens: expected number of tokens in range of a query head.
        new_tokens: expected number of tokens that a request generates.
        kv_token_bytes: host memory of K and V of one token, all layers.
        graph_token_bytes: host memory of graphs for one token, all layers.
        host_bytes: host memory for K, V and graphs.
        has_graphs: whether faiss, which builds the graphs, is installed.
    """

    context_length: int
    expected_tokens: int
    new_tokens: int
    kv_token_bytes: int
    graph_token_bytes: int
    host_bytes: int
    has_graphs: bool


class IndexChoice(NamedTuple):
    """The chosen index.

    Attributes:
        kind: name of the index.
        reason: the reason in one line.
    """

    kind: Literal["flat", "fine"]
    reason: str


def choose_index(question: IndexQuestion) -> IndexChoice:
    """Choose a graph for long and selective contexts whose requests generate many tokens.

    Args:
        question: the inputs; the choice depends on nothing else.
    """
    context, expected = question.context_length, question.expected_tokens
    graph_bytes = question.graph_token_bytes * context
    against = {
        f"contexts below {_LONG:,} tokens are scored whole": context < _LONG,
        f"{expected:,} of {context:,} tokens are expected in range: few can be left out": (
            expected > _SELECTIVE * context
        ),
        f"a graph saves its build time in {_WORTH_A_GRAPH:,} steps, and {question.new_tokens:,} "
        "are expected": question.new_tokens < _WORTH_A_GRAPH,
        "faiss, which builds graphs, is not installed": not question.has_graphs,
        f"host memory does not hold keys, values and {graph_bytes:,} bytes of graphs of one such "
        "context": graph_bytes + question.kv_token_bytes * context > question.host_bytes,
    }
    for reason, holds in against.items():
        if holds:
            return IndexChoice("flat", reason)
    return IndexChoice(
        "fine",
        f"{expected:,} of {context:,} tokens are expected in range for {question.new_tokens:,} "
        f"steps, and host memory holds keys, values and {graph_bytes:,} bytes of graphs",
    )
