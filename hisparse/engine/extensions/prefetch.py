"""Prefetch: load the pages that the previous step's query selected before their layer begins.

FreeKV (https://arxiv.org/abs/2505.13109): queries of adjacent steps are similar, so a step can
attend the pages that the previous step's query selected, and these can be loaded early. The layer's
own query selects as well. A row keeps the prefetched selection while the cosine of the two queries,
averaged over the query heads that share a selection, is above ``min_cosine``. Any other row is
corrected: it attends the selection of its own query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from hisparse.algorithms import ALGORITHMS, DecodeStep, Representation, SelectionPolicy
from hisparse.config import HiSparseConfig
from hisparse.engine.extensions.base import Extension, register_extension
from hisparse.errors import ConfigError
from hisparse.types import Selection

_QUERY: Final = "prefetch.query"
_PAGES: Final = "prefetch.pages"
_LENGTHS: Final = "prefetch.lengths"
_SEQ_LEN: Final = "prefetch.seq_len"


@dataclass(frozen=True, kw_only=True)
class PrefetchOptions:
    """Options of the extension.

    Attributes:
        min_cosine: in [-1, 1]; a row keeps the prefetched selection while the mean cosine of the
            two queries is above it. 1 keeps none, -1 every one.
    """

    min_cosine: float = 0.9

    def __post_init__(self) -> None:
        if not -1 <= self.min_cosine <= 1:
            raise ValueError(
                f"min_cosine: got {self.min_cosine}, expected a cosine from -1 (never correct) to "
                "1 (always correct)"
            )


@register_extension("prefetch")
class Prefetch(Extension):
    """Keeps each request's last query and selection, for every layer that selects."""

    options_type: ClassVar[type[Any]] = PrefetchOptions
    counters: ClassVar[Mapping[str, str]] = {
        "prefetched_selections": "Selections that the previous step's query made",
        "corrected_selections": "Prefetched selections that were replaced, for the query differed",
    }

    @classmethod
    def check(cls, options: PrefetchOptions, config: HiSparseConfig) -> None:
        if ALGORITHMS.get(config.algorithm).ranks_tail:
            others = ", ".join(name for name in ALGORITHMS if not ALGORITHMS.get(name).ranks_tail)
            raise ConfigError(
                f"algorithm {config.algorithm!r} cannot do prefetch: the model's own indexer "
                f"selects; algorithms that can: {others}"
            )

    @classmethod
    def state(cls, options: PrefetchOptions, policy: SelectionPolicy) -> dict[str, Representation]:
        """Each request's last query, its selection for the next step, and the sequence length.

        A sequence length of 0 means that nothing is stored.
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

    def before_layer(self, layer_id: int, step: DecodeStep) -> None:
        """Prefetch for the next layer if it selects, and for the layers that share its selection.

        No layer precedes the first one: its pages are prefetched at its own start.
        """
        for leader in (0, 1) if layer_id == 0 else (layer_id + 1,):
            if self.context.modes.selects(leader):
                kept, known = self._kept(leader, step)
                selection = Selection(
                    torch.where(known[..., None], kept[_PAGES], -1),
                    torch.where(known, kept[_LENGTHS], 0),
                )
                for layer in (leader, *self.context.modes.followers(leader)):
                    self.context.manager.loader.prefetch(layer, selection, step)

    def refine_selection(
        self, layer_id: int, queries: Tensor, selection: Selection, step: DecodeStep
    ) -> Selection:
        """The prefetched selection where the two queries are similar, otherwise ``selection``."""
        policy = self.context.policy
        kept, known = self._kept(layer_id, step)
        cosine = _mean_cosine(queries, kept[_QUERY], policy.heads)
        keep = known & (cosine > self.options.min_cosine)
        counters = self.context.manager.counters
        counters.count("prefetched_selections", known.expand_as(keep))
        counters.count("corrected_selections", known & ~keep)
        missing = policy.max_pages - selection.pages.shape[-1]
        own = Selection(pad(selection.pages, (0, missing), value=-1), selection.lengths)
        chosen = Selection(
            torch.where(keep[..., None], kept[_PAGES], own.pages),
            torch.where(keep, kept[_LENGTHS], own.lengths),
        )
        next_step = self._for_next_step(own, step)
        new = {
            _QUERY: queries,
            _PAGES: next_step.pages,
            _LENGTHS: next_step.lengths,
            _SEQ_LEN: step.seq_lens,
        }
        # A request within the budget selects only if a concurrent request is sparse. Storing that
        # selection would make tokens depend on concurrent requests.
        sparse = self.context.modes.is_sparse(step.num_pages, step.dense)
        for name, value in new.items():
            where = sparse.view(-1, *[1] * (value.dim() - 1))
            state = self.context.state[name][layer_id]
            state[step.slots] = torch.where(where, value.to(state.dtype), kept[name])
        return chosen

    def _kept(self, layer_id: int, step: DecodeStep) -> tuple[dict[str, Tensor], Tensor]:
        """Stored tensors of the requests in a layer, and ``[B, 1] bool``, which are valid."""
        names = (_QUERY, _PAGES, _LENGTHS, _SEQ_LEN)
        kept = {
            name: self.context.state[name][layer_id].index_select(0, step.slots) for name in names
        }
        # After a prefill, or any other step in between, the stored length does not match.
        before = kept[_SEQ_LEN]
        known = (before > 0) & (before + 1 == step.seq_lens)
        return kept, known[:, None]

    def _for_next_step(self, selection: Selection, step: DecodeStep) -> Selection:
        """Adapt a selection to the next step, which has one more full page if this step fills it.

        The new page is added if there is room. Otherwise it replaces the page that every selection
        had until now and that the next step's need not have: the oldest of the recent pages.
        """
        policy = self.context.policy
        pages, lengths = selection
        filled = (step.tail_lens == policy.kv.page_size)[:, None]
        new = step.num_pages[:, None]
        has_room = lengths < policy.max_pages
        entry = torch.arange(policy.max_pages, dtype=torch.int32, device=pages.device)
        added = (filled & has_room)[..., None] & (entry == lengths[..., None])
        coming = policy.forced_pages(step.num_pages + 1, step.max_pages + 1)
        passed = pad(step.forced_pages, (0, 1)) & ~coming
        at = pages.clamp(min=0).long()
        leaves = (
            passed[:, None].expand(-1, at.shape[1], -1).gather(-1, at)
            & (filled & ~has_room)[..., None]
        )
        # The pages after it move forward by one entry, and the new page follows the last.
        moved = leaves.cumsum(-1) > 0
        following = torch.cat([pages[..., 1:], new[..., None].expand(-1, pages.shape[1], 1)], -1)
        return Selection(
            torch.where(added, new[..., None], torch.where(moved, following, pages)),
            lengths + (filled & has_room).int(),
        )


def _mean_cosine(queries: Tensor, others: Tensor, heads: int) -> Tensor:
    """Cosine of two queries ``[B, Hq, D]``, averaged over each row's heads: ``[B, H]``."""
    cosines = cosine_similarity(queries.float(), others.float(), dim=-1).clamp(max=1)
    rows: Tensor = cosines.unflatten(1, (heads, -1)).mean(-1)
    return rows
