"""Speculative decoding by n-grams: SGLang's drafts as a batch."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from torch import Tensor

from hisparse.engine.build import EngineSetup
from hisparse.errors import ConfigError

__all__ = [
    "accepted_nodes",
    "check_rollback",
    "draft_tokens",
    "make_chains",
    "read_parents",
]

logger = logging.getLogger("hisparse")

#: The only algorithm.
_NGRAM = "NGRAM"


def draft_tokens(server_args: Any) -> int:
    """Tokens that one forward verifies for a request; 0: there is no speculation."""
    if server_args.speculative_algorithm != _NGRAM:
        return 0
    return int(server_args.speculative_num_draft_tokens or 0)


def make_chains(server_args: Any) -> None:
    """Let SGLang draft chains unless it is told otherwise; its default of trees needs page size 1.

    Args:
        server_args: SGLang's ``ServerArgs``, not yet resolved; the breadth of trees is written.
    """
    if server_args.speculative_algorithm != _NGRAM:
        return
    if server_args.speculative_ngram_max_bfs_breadth != 1:
        logger.info("hisparse: --speculative-ngram-max-bfs-breadth is set to 1: drafts are chains")
    server_args.speculative_ngram_max_bfs_breadth = 1
    server_args.disable_cuda_graph = True


def check_rollback(setup: EngineSetup) -> None:
    """Check that all an algorithm writes while it decodes belongs to pages.

    Raises:
        ConfigError: it keeps state of requests, which would keep what rejected drafts did to it.
    """
    algorithm = setup.algorithm
    kinds = algorithm.representations(setup.policy).values()
    if algorithm.host_token_bytes(setup.spec) or any(kind.per == "request" for kind in kinds):
        raise ConfigError(
            f"--speculative-algorithm is {_NGRAM}, but algorithm {setup.config.algorithm!r} keeps "
            "state of requests; expected one that keeps state of pages alone: sketch, quest, dsa, "
            "topp"
        )


def read_parents(next_token: Tensor, next_sibling: Tensor) -> np.ndarray:
    """The parent of each node, ``[B, n]``, -1 for node 0.

    Args:
        next_token: ``[B, n]``, first child of each node; -1: it has none.
        next_sibling: ``[B, n]``, the next child of each node's parent; -1: there is none.
    """
    parents = np.full(tuple(next_token.shape), -1)
    pairs = zip(next_token.tolist(), next_sibling.tolist(), strict=True)
    for request, (children, siblings) in enumerate(pairs):
        for node, first in enumerate(children):
            child = first
            while child != -1:
                parents[request, child] = node
                child = siblings[child]
    return parents


def accepted_nodes(host_slots: Tensor, accepted: Tensor) -> np.ndarray:
    """The last accepted node of each request, ``[B]``.

    Args:
        host_slots: ``[B, n] int64``, host slots of the nodes.
        accepted: ``[T] int64``, host slots of all accepted nodes; each request has node 0.
    """
    count, last = host_slots.shape[1], np.zeros(len(host_slots), dtype=np.int64)
    place = {slot: i for i, slot in enumerate(host_slots.flatten().tolist())}
    for slot in accepted.tolist():
        request, node = divmod(place[slot], count)
        last[request] = max(last[request], node)
    return last
