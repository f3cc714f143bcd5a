"""Chains of drafts: those of a forward as a batch, and which of their tokens are accepted."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.verify import VerifyBatch
from hisparse.sglang.session import ServerSession, require_session

#: What SGLang fills up drafts of n-grams with, and a token that no model generates.
_FILLER, _NO_TOKEN = 0, -1


class Drafts:
    """The drafts of the current forward."""

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._batch: VerifyBatch | None = None

    def begin(self, forward_batch: Any) -> VerifyBatch | None:
        """The drafts of a forward batch; None: it verifies none.

        SGLang's sequence lengths leave them out.
        """
        self._batch = None
        if not forward_batch.logical_forward_mode.is_target_verify():
            return None
        backend, drafts = self._session.backend, forward_batch.spec_info
        slots_cpu = backend.slots_cpu().numpy()
        shape = (len(slots_cpu), drafts.draft_token_num)
        seq_lens_cpu = forward_batch.seq_lens_cpu[: shape[0]].numpy()
        slots = forward_batch.req_pool_indices[: shape[0]].long()
        num_tokens = int(seq_lens_cpu.max()) + shape[1]
        # A draft model always drafts whole chains.
        whole = drafts.tree_topk == 1
        self._batch = VerifyBatch(
            slots=slots,
            slots_cpu=slots_cpu,
            seq_lens_cpu=seq_lens_cpu.astype("int64"),
            chain_lengths=np.full(shape[0], shape[1]) if whole else keep_chains(drafts),
            host_slots=forward_batch.out_cache_loc.view(shape).long(),
            host_page_table=backend.page_table(slots, num_tokens),
        )
        return self._batch

    def accept_slots(self, accepted: Tensor) -> None:
        """Keep the drafts in the host slots ``accepted [T]``, integers, and undo the others."""
        if self._batch is not None:
            self._accept(accepted_drafts(self._batch.host_slots, accepted))

    def accept_lengths(self, lengths: Tensor) -> None:
        """Keep the first ``lengths [B]`` tokens (integers) of each chain, and undo the others."""
        self._accept(lengths.numpy().astype("int64") - 1)

    def _accept(self, last: np.ndarray) -> None:
        session = self._session
        # A forward that failed has no tokens.
        if self._batch is not None and session.backend.num_tokens:
            session.coordinator.accept_drafts(last)


class DraftMoves:
    """What a KV pool in host memory does with SGLang's moves of accepted drafts of n-grams."""

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Keep the accepted drafts of the last forward, and undo the others.

        Nothing moves: the drafts are chains, whose K and V are where their positions have them.

        Args:
            tgt_loc: ``[T] int64``, host slots of the positions of accepted tokens, request by
                request, then zeros.
            src_loc: ``[T] int64``, the host slots where the forward left their K and V, the same
                ones.
        """
        drafts = require_session().get(Drafts)
        assert drafts is not None, "the backend is built before it verifies"
        drafts.accept_slots(src_loc[src_loc > 0].long())


def keep_chains(drafts: Any) -> np.ndarray:
    """Reject n-gram drafts that are on no chain, before SGLang verifies them.

    A chain is a request's last token and the drafts after it, up to the first one that does not
    follow the token before it. The other drafts are what SGLang fills up with, token 0 right after
    the last token, or what followed a shorter n-gram: with a breadth of 1 SGLang drafts that too
    where it differs. They get a token that no model generates.

    A first draft of token 0 that no draft follows looks like filling. It is rejected, and the model
    generates the token.

    Args:
        drafts: SGLang's ``NgramVerifyInput``; the tokens that it compares are replaced.

    Returns:
        ``[B]``, tokens of each chain, the request's last one included.
    """
    follows = drafts.retrieve_next_token.numpy()
    count = follows.shape[1]
    tokens = drafts.draft_token.view(-1, count).clone()
    chained = np.logical_and.accumulate(follows[:, :-1] == np.arange(1, count), axis=1)
    lengths: np.ndarray = 1 + chained.sum(1)
    lengths[(lengths == 2) & (tokens.numpy()[:, 1:2] == _FILLER).any(1)] = 1
    tokens.numpy()[np.arange(count) >= lengths[:, None]] = _NO_TOKEN
    # The model's input is another reference to the old tensor.
    drafts.draft_token = tokens.flatten()
    return lengths


def accepted_drafts(host_slots: Tensor, accepted: Tensor) -> np.ndarray:
    """The place in its chain of each request's last accepted token, ``[B]``.

    Args:
        host_slots: ``[B, n] int64``, host slots of the drafts.
        accepted: ``[T] int64``, host slots of all accepted ones; each request has token 0.
    """
    return torch.isin(host_slots, accepted).sum(1).numpy() - 1
