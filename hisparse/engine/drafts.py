"""Drafted tokens that a forward verifies: the batch, and the order in which nodes are served."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.step import DecodeBatch

__all__ = ["DraftTree", "VerifyBatch", "VerifyStep"]


class DraftTree:
    """The drafts of one request, and the order in which their nodes are served.

    A node whose parent and token are those of an earlier node is that node's twin: it has the same
    output, and no verification accepts it. Only the first of them is served.

    Args:
        parents: ``[n]``, index of each node's parent, lower than the node's own; -1 for node 0.
        tokens: ``[n]``, token ids.

    Attributes:
        parents: as given, with twins replaced by the node that is served.
        twins: ``[n]``, the node that is served for each node.
        depths: ``[n]``, number of ancestors.
        order: the served nodes, depth first. The longest branch is last, so that nothing has to be
            undone if it is accepted.
    """

    def __init__(self, parents: np.ndarray, tokens: np.ndarray) -> None:
        count = len(parents)
        self.parents, self.twins, self.depths = (np.zeros(count, dtype=np.int64) for _ in range(3))
        self.parents[0] = -1
        served: dict[tuple[int, int], int] = {}
        children: dict[int, list[int]] = {0: []}
        for node in range(1, count):
            parent = int(self.twins[parents[node]])
            twin = served.setdefault((parent, int(tokens[node])), node)
            self.parents[node], self.twins[node] = parent, twin
            self.depths[node] = self.depths[parent] + 1
            if twin == node:
                children[node] = []
                children[parent].append(node)
        deepest = {node: int(self.depths[node]) for node in children}
        for node in sorted(children, reverse=True)[:-1]:
            parent = int(self.parents[node])
            deepest[parent] = max(deepest[parent], deepest[node])
        self.order: list[int] = []
        waiting = [0]
        while waiting:
            node = waiting.pop()
            self.order.append(node)
            # The last one is served first.
            waiting += sorted(children[node], key=deepest.__getitem__, reverse=True)


@dataclass(frozen=True, kw_only=True)
class VerifyStep:
    """One node of each of some requests, served as a decode step.

    Attributes:
        requests: ``[b]``, indices of the requests in the batch.
        nodes: ``[b]``, the node of each request.
        moved: ``[b] bool``, requests whose step before this one did not serve the node's parent.
    """

    requests: np.ndarray
    nodes: np.ndarray
    moved: np.ndarray


@dataclass(frozen=True, kw_only=True)
class VerifyBatch:
    """A tree of n drafted tokens for each of B requests; node 0 is the request's last token.

    Node ``j`` of request ``b`` is token ``b * n + j`` of the forward. It attends the request's
    computed tokens, its ancestors and itself.

    Attributes:
        slots: ``[B] int64``, request slots.
        slots_cpu: ``[B]``, the same on the host.
        seq_lens_cpu: ``[B]``, computed tokens of each request, before node 0.
        parents: ``[B, n]``, parent of each node, lower than the node's own index; -1 for node 0.
        tokens: ``[B, n]``, token ids.
        host_slots: ``[B, n] int64``, host slots of the n positions after the computed tokens, and
            of the nodes: a node's own slot is that of its depth only in a chain.
        host_page_table: ``[B, P] int32``, host page of each page, those of the drafts included.
    """

    slots: Tensor
    slots_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    host_slots: Tensor
    host_page_table: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, B * n."""
        return self.parents.size

    @cached_property
    def trees(self) -> list[DraftTree]:
        """The tree of each request."""
        return [DraftTree(*tree) for tree in zip(self.parents, self.tokens, strict=True)]

    @cached_property
    def longest(self) -> np.ndarray:
        """``[B]``, tokens of each request if its deepest node is accepted."""
        return self.seq_lens_cpu + [int(tree.depths.max()) + 1 for tree in self.trees]

    @cached_property
    def steps(self) -> list[VerifyStep]:
        """The nodes in the order in which they are served."""
        steps = []
        for place in range(max(len(tree.order) for tree in self.trees)):
            some = [b for b, tree in enumerate(self.trees) if place < len(tree.order)]
            nodes = [self.trees[b].order[place] for b in some]
            before = [self.trees[b].order[place - 1] if place else -1 for b in some]
            parents = [self.trees[b].parents[node] for b, node in zip(some, nodes, strict=True)]
            steps.append(
                VerifyStep(
                    requests=np.array(some),
                    nodes=np.array(nodes),
                    moved=np.array(before) != np.array(parents),
                )
            )
        return steps

    def decode_batches(self) -> list[DecodeBatch]:
        """The steps as decode steps, each node at the host slot of its position."""
        return [self._decode_batch(step) for step in self.steps]

    def _decode_batch(self, step: VerifyStep) -> DecodeBatch:
        device = self.host_slots.device
        depths = [self.trees[b].depths[n] for b, n in zip(step.requests, step.nodes, strict=True)]
        seq_lens = self.seq_lens_cpu[step.requests] + np.array(depths) + 1
        requests = torch.from_numpy(step.requests).to(device)
        return DecodeBatch(
            slots=self.slots[requests],
            slots_cpu=self.slots_cpu[step.requests],
            seq_lens=torch.from_numpy(seq_lens).to(device),
            seq_lens_cpu=seq_lens,
            host_slots=self.host_slots[requests, torch.tensor(depths, device=device)],
            host_page_table=self.host_page_table[requests],
        )
