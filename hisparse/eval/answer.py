"""How a method goes on from a stored context: every token given, every prediction judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.eval.documents import Item

__all__ = ["Answer", "answer"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Predictions of the tokens of one item, from its answer's first on.

    Attributes:
        item: what was read.
        right: whether each token is the most likely one, ``[n] bool``.
        log_probs: of each token, ``[n] float32``.
        distributions: log-probabilities of all tokens, ``[n, V] float32``, where asked for.
    """

    item: Item
    right: Tensor
    log_probs: Tensor
    distributions: Tensor | None


@torch.no_grad()
def answer(
    model: Any,
    cache: Any,
    items: Sequence[Item],
    *,
    keep: Callable[[Item], bool],
    progress: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Read items token by token after one context, all side by side.

    Args:
        model: of transformers, enabled.
        cache: ``HiSparseCache`` with the context as its only row, and room for the items.
        items: what follows the context, each on its own.
        keep: for which items to keep distributions.
        progress: called after every step.
    """
    rows = cache.fork(len(items))
    seen: list[list[Tensor]] = [[] for _ in items]
    longest = max(len(item.ids) for item in items)
    before = cache.get_seq_length()
    mask = torch.ones(len(items), before, dtype=torch.long)
    try:
        for step in range(longest - 1):
            # A row that is over has padding in its columns; the last token is only predicted.
            there = torch.tensor([step < len(item.ids) - 1 for item in items])
            tokens = [item.ids[min(step, len(item.ids) - 1)] for item in items]
            mask = torch.cat([mask, there[:, None].long()], dim=1)
            logits = model(
                torch.tensor(tokens)[:, None].to(model.device),
                attention_mask=mask.to(model.device),
                position_ids=torch.full((len(items), 1), before + step, device=model.device),
                past_key_values=rows,
                logits_to_keep=1,
            ).logits[:, -1]
            _take(seen, items, step, logits.float().log_softmax(-1), keep)
            progress()
    finally:
        rows.reset()
    return [_judge(item, found, keep(item)) for item, found in zip(items, seen, strict=True)]


def _take(
    seen: list[list[Tensor]],
    items: Sequence[Item],
    step: int,
    log_probs: Tensor,
    keep: Callable[[Item], bool],
) -> None:
    """Keep what each row predicts at ``step``, if the token to come belongs to its answer."""
    best = log_probs.argmax(-1)
    for row, item in enumerate(items):
        at = step + 1
        if item.first <= at < len(item.ids):
            if keep(item):
                seen[row].append(log_probs[row].clone())
            else:
                token = item.ids[at]
                right = (best[row] == token).float()
                seen[row].append(torch.stack([right, log_probs[row, token]]))


def _judge(item: Item, found: list[Tensor], kept: bool) -> Answer:
    stacked = torch.stack(found)
    if not kept:
        right, log_probs = stacked.unbind(1)
        return Answer(item=item, right=right > 0, log_probs=log_probs, distributions=None)
    tokens = torch.tensor(item.ids[item.first :])
    return Answer(
        item=item,
        right=stacked.argmax(-1) == tokens,
        log_probs=stacked.gather(1, tokens[:, None])[:, 0],
        distributions=stacked,
    )
