"""Drafted tokens that a forward verifies: the batch, and the runs in which they are served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.modes import Runs
from hisparse.engine.step import DecodeBatch

__all__ = ["VerifyBatch", "VerifyStep"]


@dataclass(frozen=True, kw_only=True)
class VerifyStep:
    """A run of tokens of each of some chains, served as a decode step.

    Attributes:
        runs: by request, its index in the batch, the tokens of its run.
    """

    runs: dict[int, range]

    @property
    def last(self) -> np.ndarray | None:
        """``[T] bool``, the last token of each run; None: each run has one."""
        ends = [token == run[-1] for run in self.runs.values() for token in run]
        return None if all(ends) else np.array(ends)

    @cached_property
    def pairs(self) -> np.ndarray:
        """``[T, 2]``, request and place in its chain of each token, run by run."""
        return np.array([(b, token) for b, run in self.runs.items() for token in run])

    def first(self, request: int) -> int:
        """Index of the first token of a request's run among the tokens."""
        return sum(len(run) for b, run in self.runs.items() if b < request)


@dataclass(frozen=True, kw_only=True)
class VerifyBatch:
    """A chain of at most n drafted tokens for each of B requests.

    Token 0 of a chain is the last token that the request has; each other one is a draft of the
    token after the one before it. Token ``j`` of request ``b`` is token ``b * n + j`` of the
    forward. It attends the request's computed tokens, the chain up to it, and itself.

    Attributes:
        slots: ``[B] int64``, request slots.
        slots_cpu: ``[B]``, the same on the host.
        seq_lens_cpu: ``[B]``, computed tokens of each request, before token 0.
        chain_lengths: ``[B]``, tokens of each chain, 1 to n. What comes after them is never
            accepted, and is not served; it gets the output of token 0.
        host_slots: ``[B, n] int64``, host slots of the n positions after the computed tokens.
        host_page_table: ``[B, P] int32``, host page of each page, those of the drafts included.
    """

    slots: Tensor
    slots_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    chain_lengths: np.ndarray
    host_slots: Tensor
    host_page_table: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, B * n."""
        return self.host_slots.numel()

    @cached_property
    def lengths(self) -> np.ndarray:
        """``[B, n]``, tokens of each request up to each token of the chain."""
        lengths: np.ndarray = self.seq_lens_cpu[:, None] + np.arange(self.host_slots.shape[1]) + 1
        return lengths

    @cached_property
    def longest(self) -> np.ndarray:
        """``[B]``, tokens of each request if all its drafts are accepted."""
        longest: np.ndarray = self.seq_lens_cpu + self.chain_lengths
        return longest

    def steps(self, runs: Runs) -> Iterator[VerifyStep]:
        """The runs of all chains, in the order in which they are served."""
        of_chains = [
            _divide(int(length), ends, int(most))
            for length, ends, most in zip(self.chain_lengths, runs.ends, runs.most, strict=True)
        ]
        for number in range(max(map(len, of_chains))):
            yield VerifyStep(
                runs={b: runs[number] for b, runs in enumerate(of_chains) if number < len(runs)}
            )

    def decode_batch(self, step: VerifyStep) -> DecodeBatch:
        """A step as a decode step of its tokens."""
        device = self.host_slots.device
        of_tokens, places = step.pairs.T
        seq_lens = self.lengths[of_tokens, places]
        requests = torch.from_numpy(of_tokens).to(device)
        return DecodeBatch(
            slots=self.slots[requests],
            slots_cpu=self.slots_cpu[of_tokens],
            seq_lens=torch.from_numpy(seq_lens).to(device),
            seq_lens_cpu=seq_lens,
            host_slots=self.host_slots[requests, torch.from_numpy(places).to(device)],
            host_page_table=self.host_page_table[requests],
            last=step.last,
        )


def _divide(length: int, ends: np.ndarray, most: int) -> list[range]:
    """The runs of a chain of ``length`` tokens; see :class:`Runs`."""
    runs, first = [], 0
    for token in range(length):
        if ends[token] or token + 1 == length or token + 1 - first == most:
            runs.append(range(first, token + 1))
            first = token + 1
    return runs
