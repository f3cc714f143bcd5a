"""Teacher-forced scoring: every token of an item is given, and every prediction is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hisparse.eval.documents import Item


@dataclass(frozen=True, kw_only=True)
class ItemScores:
    """The model's predictions of the scored tokens of one item.

    Attributes:
        item: the item.
        correct: whether each token is the most likely one, ``[n] bool``.
        log_probs: log-probability of each token, ``[n] float32``.
        distributions: log-probabilities over the vocabulary, ``[n, V] float32``; None if they were
            not kept.
    """

    item: Item
    correct: Tensor
    log_probs: Tensor
    distributions: Tensor | None


@torch.no_grad()
def score_items(
    model: Any,
    cache: Any,
    document: Sequence[int],
    items: Sequence[Item],
    *,
    keep: Callable[[Item], bool],
) -> list[ItemScores]:
    """Feed all items token by token, side by side, each after the document up to its start.

    Args:
        model: a transformers model with hisparse enabled.
        cache: ``HiSparseCache`` with one row that holds the document up to the first start or less,
            and with free space for the items. On return it holds the document up to the last start.
        document: token ids of the document.
        items: sorted by start, ascending.
        keep: whether to keep the distributions of an item.

    Returns:
        One entry per item, in the same order.
    """
    rows = _fork_rows(model, cache, document, items)
    found: list[list[Tensor]] = [[] for _ in items]
    active = list(range(len(items)))
    try:
        for step in range(max(len(item.ids) for item in items) - 1):
            # The last token of an item is predicted and never fed; a finished row leaves the batch.
            left = [row for row, i in enumerate(active) if step < len(items[i].ids) - 1]
            if len(left) < len(active):
                rows.batch_select_indices(torch.tensor(left))
                active = [active[row] for row in left]
            tokens = torch.tensor([[items[i].ids[step]] for i in active], device=model.device)
            scored = [row for row, i in enumerate(active) if step + 1 in items[i].scored]
            with _logits_of(model, scored):
                logits = model(
                    tokens,
                    position_ids=torch.tensor(rows.row_lengths, device=model.device)[:, None],
                    past_key_values=rows,
                ).logits[:, -1]
            for row, log_probs in zip(scored, logits.float().log_softmax(-1), strict=True):
                i = active[row]
                kept = keep(items[i])
                found[i].append(log_probs if kept else _reduce(log_probs, items[i].ids[step + 1]))
    finally:
        rows.reset()
    return [_score(item, steps, keep(item)) for item, steps in zip(items, found, strict=True)]


@contextmanager
def _logits_of(model: Any, rows: list[int]) -> Iterator[None]:
    """Compute the logits of these rows alone: in a small model they are a quarter of the work."""

    def choose(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][rows],)

    hook = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def _fork_rows(model: Any, cache: Any, document: Sequence[int], items: Sequence[Item]) -> Any:
    """A cache with one row per item, each holding the document up to the item's start."""
    forks = []
    for start, group in groupby(items, key=lambda item: item.start):
        missing = document[cache.get_seq_length() : start]
        if missing:
            ids = torch.tensor([missing], device=model.device)
            model(ids, past_key_values=cache, logits_to_keep=1)
        forks.append(cache.fork(sum(1 for _ in group)))
    return type(cache).join(forks)


def _reduce(log_probs: Tensor, token: int) -> Tensor:
    """``[2]``: whether the token is the most likely one, and its log-probability."""
    value = log_probs[token]
    return torch.stack([(value >= log_probs.max()).float(), value])


def _score(item: Item, steps: list[Tensor], kept: bool) -> ItemScores:
    stacked = torch.stack(steps)
    if not kept:
        correct, log_probs = stacked.unbind(1)
        return ItemScores(item=item, correct=correct > 0, log_probs=log_probs, distributions=None)
    tokens = torch.tensor([item.ids[at] for at in item.scored], device=stacked.device)
    return ItemScores(
        item=item,
        correct=stacked.argmax(-1) == tokens,
        log_probs=stacked.gather(1, tokens[:, None])[:, 0],
        distributions=stacked,
    )
