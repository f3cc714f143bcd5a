"""Statistics of a method's selections, compared with exact attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.kernels import HostKeys, key_score
from hisparse.types import Selection

#: Steps between two comparisons of a selection with exact attention, which is slow.
_EXACT_STRIDE = 8


def kept_tokens(step: DecodeStep, chosen: Selection) -> Tensor:
    """``[B, heads] float32`` on the host: tokens that each selection of a step attends."""
    tokens = chosen.lengths * step.policy.kv.page_size + step.tail_lens[:, None]
    return tokens.float().cpu()


class SelectionStats:
    """A callback of selections that accumulates statistics, for ``SparseCoordinator.observe``."""

    def __init__(self) -> None:
        self._mass: list[Tensor] = []
        self._recall: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._calls: Counter[int] = Counter()
        self._scope = ""

    def start_batch(self) -> None:
        """Compare the first step of a batch of other rows with exact attention."""
        self._calls.clear()

    def __call__(self, layer_id: int, queries: Tensor, step: DecodeStep, chosen: Selection) -> None:
        """Record one selection of a layer."""
        self._tokens.append(kept_tokens(step, chosen).flatten())
        self._scope = step.policy.scope
        if self._calls[layer_id] % _EXACT_STRIDE == 0:
            chosen = Selection(*(x.cpu() for x in chosen))
            self._compare_with_exact(layer_id, queries, step, chosen)
        self._calls[layer_id] += 1

    def _compare_with_exact(
        self, layer_id: int, queries: Tensor, step: DecodeStep, chosen: Selection
    ) -> None:
        """Record the attention mass kept, and how many of the n best pages the n selected hold."""
        weights, tail = _exact_attention(layer_id, queries, step)
        heads, pages = step.policy.heads, chosen.pages.long()
        kept = torch.zeros(*pages.shape[:2], weights.shape[-1] + 1)
        kept.scatter_(-1, pages.masked_fill(pages < 0, weights.shape[-1]), 1.0)
        kept = kept[..., :-1]
        grouped = weights.unflatten(1, (heads, -1))
        mass = (grouped * kept[:, :, None]).sum(-1) + tail.unflatten(1, (heads, -1))
        self._mass.append(mass.flatten())
        combined = grouped.sum(2)
        # Sorted, best first; only the first n count, n being the pages selected.
        best = combined.topk(min(pages.shape[-1], combined.shape[-1]), dim=-1).indices
        counted = torch.arange(best.shape[-1]) < chosen.lengths[..., None]
        hits = (kept.gather(-1, best) * counted).sum(-1)
        self._recall.append((hits / chosen.lengths.clamp(min=1)).flatten())

    def summary(self) -> dict[str, Any]:
        """The fields of :func:`~hisparse.eval.results.make_summary` that describe selections.

        ``kept_mean`` is a mean over all selections, ``mass`` and ``oracle_recall`` over a sample.

        Returns:
            The fields; empty if nothing was selected.
        """
        if not self._tokens:
            return {}
        means = {"mass": self._mass, "oracle_recall": self._recall, "kept_mean": self._tokens}
        found = {name: float(torch.cat(parts).mean()) for name, parts in means.items() if parts}
        return {"selection_scope": self._scope, **found}


def _exact_attention(layer_id: int, queries: Tensor, step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Exact attention weights, summed over the tokens of each page.

    Returns:
        ``[B, Hq, max_pages]`` of the full pages and ``[B, Hq]`` of the tail page; they add up to 1.
    """
    query, size = queries.float() * step.policy.scale, step.policy.kv.page_size
    # Rows share most pages, so each is read once. Keys come in the model's dtype, also from fp8.
    used, table = step.host_page_table[:, : step.max_pages].unique(return_inverse=True)
    host_slots = used.long()[:, None] * size + torch.arange(size, device=used.device)
    keys = step.kv_io.read_tokens(layer_id, host_slots.flatten()).k.unflatten(0, (-1, size))
    pages = key_score(
        query.cpu(),
        HostKeys(keys.transpose(1, 2).cpu()),
        table.int().cpu(),
        step.num_pages.cpu(),
        reduce="lse",
        logit_cap=step.policy.logit_cap,
    )
    tail = step.tail_lse(layer_id, query).cpu()
    both = torch.cat([pages, tail[..., None]], -1).softmax(-1)
    return both[..., :-1], both[..., -1]
