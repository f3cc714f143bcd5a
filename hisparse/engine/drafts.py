"""Drafted tokens that a forward verifies: the batch, and the order in which nodes are served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.modes import Runs
from hisparse.engine.step import DecodeBatch

__all__ = ["DraftTree", "VerifyBatch", "VerifyStep"]


class DraftTree:
    """The drafts of one request, and the order in which their nodes are served.

    A node whose parent and token are those of an earlier node is that node's twin: it has the same
    output, and no verification accepts it. Only the first of them is served. A node with token -1
    is accepted by none either; it gets its parent's output.

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
            parent, token = int(self.twins[parents[node]]), int(tokens[node])
            twin = parent if token < 0 else served.setdefault((parent, token), node)
            self.parents[node], self.twins[node] = parent, twin
            if twin == node:
                self.depths[node] = self.depths[parent] + 1
                children[node] = []
                children[parent].append(node)
            else:
                self.depths[node] = self.depths[twin]
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

    def runs(self, ends: np.ndarray, most: int) -> list[list[int]]:
        """Divide the order into runs, whose nodes are each the parent of the next.

        Args:
            ends: ``[n] bool``, whether a run ends with a node of this depth.
            most: nodes of a run at most.
        """
        runs: list[list[int]] = []
        for node in self.order:
            last = runs[-1][-1] if runs else None
            if last != self.parents[node] or ends[self.depths[last]] or len(runs[-1]) == most:
                runs.append([])
            runs[-1].append(node)
        return runs


@dataclass(frozen=True, kw_only=True)
class VerifyStep:
    """A run of nodes of each of some requests, served as a decode step.

    Attributes:
        runs: by request, its index in the batch, the nodes of its run. Each node is the parent of
            the next.
        moved: requests whose step before this one did not end with the parent of their first node.
    """

    runs: dict[int, list[int]]
    moved: frozenset[int]

    @property
    def last(self) -> np.ndarray | None:
        """``[T] bool``, the last token of each run; None: each run has one."""
        ends = [node == run[-1] for run in self.runs.values() for node in run]
        return None if all(ends) else np.array(ends)

    @cached_property
    def pairs(self) -> np.ndarray:
        """``[T, 2]``, request and node of each token, run by run."""
        return np.array([(b, node) for b, run in self.runs.items() for node in run])

    def place(self, request: int, node: int) -> int:
        """Index of a node among the tokens."""
        before = sum(len(run) for b, run in self.runs.items() if b < request)
        return before + self.runs[request].index(node)


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
        tokens: ``[B, n]``, token ids; -1: no verification accepts the node.
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
    def lengths(self) -> np.ndarray:
        """``[B, n]``, tokens of each request up to a node of each depth."""
        lengths: np.ndarray = self.seq_lens_cpu[:, None] + np.arange(self.parents.shape[1]) + 1
        return lengths

    @cached_property
    def longest(self) -> np.ndarray:
        """``[B]``, tokens of each request if its deepest node is accepted."""
        deepest = np.array([int(tree.depths.max()) + 1 for tree in self.trees])
        longest: np.ndarray = self.seq_lens_cpu + deepest
        return longest

    def steps(self, runs: Runs) -> Iterator[VerifyStep]:
        """The nodes in the order in which they are served."""
        of_trees = [
            tree.runs(ends, int(most))
            for tree, ends, most in zip(self.trees, runs.ends, runs.most, strict=True)
        ]
        for number in range(max(map(len, of_trees))):
            step = {b: runs[number] for b, runs in enumerate(of_trees) if number < len(runs)}
            moved = frozenset(
                b
                for b, run in step.items()
                if number and of_trees[b][number - 1][-1] != self.trees[b].parents[run[0]]
            )
            yield VerifyStep(runs=step, moved=moved)

    def decode_batch(self, step: VerifyStep) -> DecodeBatch:
        """A step as a decode step of its nodes, each at the host slot of its position."""
        device = self.host_slots.device
        of_tokens = step.pairs[:, 0]
        depths = np.array([self.trees[b].depths[node] for b, node in step.pairs])
        seq_lens = self.lengths[of_tokens, depths]
        requests = torch.from_numpy(of_tokens).to(device)
        return DecodeBatch(
            slots=self.slots[requests],
            slots_cpu=self.slots_cpu[of_tokens],
            seq_lens=torch.from_numpy(seq_lens).to(device),
            seq_lens_cpu=seq_lens,
            host_slots=self.host_slots[requests, torch.from_numpy(depths).to(device)],
            host_page_table=self.host_page_table[requests],
            last=step.last,
        )
