"""Attend over what another query has selected ahead, and correct it where the query is another.

The other query is that of the step before (FreeKV, https://arxiv.org/abs/2505.13109): the selection
is known a step before it is needed, so its pages can come while the rest of that step runs. Or it
is the layer's own, predicted from what went into the layer before (InfiniGen,
https://arxiv.org/abs/2406.19707): its pages can come while that layer runs.

Once the query is there, rows for which it has turned away from the one that selected take the
selection that it makes itself, as without speculation, and read what they miss then. The rule is
FreeKV's: the cosine of the two queries, averaged over the query heads that share a selection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from hisparse.algorithms import Representation
from hisparse.cache.counters import CacheCounters
from hisparse.engine.step import DecodeStep, SelectionPolicy
from hisparse.types import Selection

__all__ = ["Foreseen", "LayerSpeculation", "StepSpeculation"]

_QUERY: Final = "speculation.query"
_PAGES: Final = "speculation.pages"
_LENGTHS: Final = "speculation.lengths"
_SEQ_LEN: Final = "speculation.seq_len"


class Foreseen(NamedTuple):
    """What a layer that has not begun is going to attend.

    Attributes:
        queries: ``[B, Hq, D]``, predicted.
        selection: what they select.
    """

    queries: Tensor
    selection: Selection


class LayerSpeculation:
    """Keeps nothing: the query that selects ahead is one of the same step.

    Args:
        policy: shapes of the model and what selections have to keep to.
        threshold: a row keeps the selection made ahead while the mean cosine is above it.
        counters: told how many rows had a selection made ahead, and how many were corrected.
    """

    def __init__(self, policy: SelectionPolicy, threshold: float, counters: CacheCounters) -> None:
        self._policy = policy
        self._threshold = threshold
        self._counters = counters

    def choose(
        self,
        foreseen: Foreseen,
        queries: Tensor,
        made: Selection,
        step: DecodeStep,
        dense: Tensor | None,
    ) -> Selection:
        """For each row the selection made ahead or ``made``, what ``queries [B, Hq, D]`` select."""
        heads = self._policy.heads
        holds = _likeness(queries, foreseen.queries, heads) > self._threshold
        counted = _is_sparse(self._policy, step, dense)[:, None]
        self._counters.count_speculated(counted.expand_as(holds), counted & ~holds)
        ahead = foreseen.selection
        return Selection(
            torch.where(holds[..., None], ahead.pages, made.pages),
            torch.where(holds, ahead.lengths, made.lengths),
        )

    def pages_to_bring(
        self, selection: Selection, step: DecodeStep, dense: Tensor | None
    ) -> Selection:
        """A selection made ahead; nothing for requests that are within the budget or dense."""
        return _only(_is_sparse(self._policy, step, dense), selection)


class StepSpeculation:
    """Remembers each request's last selection and the query that made it, for every layer.

    Args:
        policy: shapes of the model and what selections have to keep to.
        threshold: a row keeps the selection made ahead while the mean cosine is above it.
        state: where it is remembered, see :meth:`representations`.
        counters: told how many rows had a selection made ahead, and how many were corrected.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        threshold: float,
        state: Mapping[str, Tensor],
        counters: CacheCounters,
    ) -> None:
        self._policy = policy
        self._threshold = threshold
        self._state = {name: state[name] for name in self.representations(policy)}
        self._counters = counters

    @staticmethod
    def representations(policy: SelectionPolicy) -> dict[str, Representation]:
        """Of each request: a query, what it selected for the step after it, and the tokens that
        there were with it, 0 if nothing is remembered.
        """
        kv, heads = policy.kv, policy.heads
        kinds = {
            _QUERY: ((kv.num_q_heads, kv.head_dim), torch.float32),
            _PAGES: ((heads, policy.max_pages), torch.int32),
            _LENGTHS: ((heads,), torch.int32),
            _SEQ_LEN: ((), torch.int32),
        }
        return {
            name: Representation(shape, dtype, per="request", saved=False)
            for name, (shape, dtype) in kinds.items()
        }

    def choose(
        self,
        layer_id: int,
        queries: Tensor,
        made: Selection,
        step: DecodeStep,
        dense: Tensor | None,
    ) -> tuple[Selection, Selection]:
        """What this step attends, and what the next one will if its query does not move.

        Args:
            layer_id: layer number.
            queries: ``[B, Hq, D]``, of this step.
            made: what they select.
            step: the step.
            dense: ``[B] bool``, requests that are attended densely all the same; None: nobody is.

        Returns:
            for each row the selection made ahead or ``made``; and pages that the next step finds,
            nothing for requests that are within the budget or dense.
        """
        kept = {name: x[layer_id].index_select(0, step.slots) for name, x in self._state.items()}
        seq_lens = step.num_pages * self._policy.kv.page_size + step.tail_lens
        # Anything between, a prefill too, leaves a length that does not fit: no selection is ahead.
        known = ((kept[_SEQ_LEN] > 0) & (kept[_SEQ_LEN] + 1 == seq_lens))[:, None]
        alike = _likeness(queries, kept[_QUERY], self._policy.heads)
        holds = known & (alike > self._threshold)
        self._counters.count_speculated(known.expand_as(holds), known & ~holds)
        made = Selection(
            pad(made.pages, (0, self._policy.max_pages - made.pages.shape[-1]), value=-1),
            made.lengths,
        )
        chosen = Selection(
            torch.where(holds[..., None], kept[_PAGES], made.pages),
            torch.where(holds, kept[_LENGTHS], made.lengths),
        )
        ahead = self._of_next_step(made, step)
        sparse = _is_sparse(self._policy, step, dense)
        new = {_QUERY: queries, _PAGES: ahead.pages, _LENGTHS: ahead.lengths, _SEQ_LEN: seq_lens}
        for name, value in new.items():
            where = sparse.view(-1, *[1] * (value.dim() - 1))
            state = self._state[name][layer_id]
            state[step.slots] = torch.where(where, value.to(state.dtype), kept[name])
        return chosen, _only(sparse, ahead)

    def _of_next_step(self, made: Selection, step: DecodeStep) -> Selection:
        """A selection as the next step needs it, which has one full page more if this fills it.

        The new page is added where there is room. Else the recent pages move on by one: it takes
        the place of the page that is no recent one any more.
        """
        policy = self._policy
        pages, lengths = made
        filled = (step.tail_lens == policy.kv.page_size)[:, None]
        new = step.num_pages[:, None]
        has_room = lengths < policy.max_pages
        entry = torch.arange(policy.max_pages, dtype=torch.int32, device=pages.device)
        added = (filled & has_room)[..., None] & (entry == lengths[..., None])
        moved = (filled & ~has_room)[..., None] & (
            pages >= (new - policy.num_recent_pages)[..., None]
        )
        return Selection(
            torch.where(added, new[..., None], pages + moved.int()),
            lengths + (filled & has_room).int(),
        )


def _likeness(queries: Tensor, others: Tensor, heads: int) -> Tensor:
    """``[B, H]``, cosines of two queries ``[B, Hq, D]``, averaged over each row's heads."""
    cosines = cosine_similarity(queries.float(), others.float(), dim=-1).clamp(max=1)
    rows: Tensor = cosines.unflatten(1, (heads, -1)).mean(-1)
    return rows


def _is_sparse(policy: SelectionPolicy, step: DecodeStep, dense: Tensor | None) -> Tensor:
    """``[B] bool``, requests beyond the budget that are not ``dense [B] bool``. Whether the others
    are asked for a selection depends on who else runs.
    """
    sparse = step.num_pages > policy.budget_pages
    return sparse if dense is None else sparse & ~dense


def _only(who: Tensor, selection: Selection) -> Selection:
    """The selections of the requests ``who [B] bool``, nothing for the others."""
    return Selection(
        torch.where(who[:, None, None], selection.pages, -1),
        torch.where(who[:, None], selection.lengths, 0),
    )
