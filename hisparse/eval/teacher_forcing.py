"""How a method goes on from a stored document: every token given, every prediction judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hisparse.eval.documents import Item

__all__ = ["Answer", "answer"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Predictions of the judged tokens of one item.

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
    document: Sequence[int],
    items: Sequence[Item],
    *,
    keep: Callable[[Item], bool],
    progress: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Read items token by token, all side by side, each after the document up to its start.

    Args:
        model: of transformers, enabled.
        cache: ``HiSparseCache`` with one row, the document up to the first start or less, and room
            for the items; it has the document up to the last start then.
        document: its token ids.
        items: by ascending start.
        keep: for which items to keep distributions.
        progress: called after every step.

    Returns:
        In the order of the items.
    """
    rows = _rows(model, cache, document, items)
    seen: list[list[Tensor]] = [[] for _ in items]
    active = list(range(len(items)))
    try:
        for step in range(max(len(item.ids) for item in items) - 1):
            # The last token is only predicted; a row that is over leaves the batch.
            left = [row for row, i in enumerate(active) if step < len(items[i].ids) - 1]
            if len(left) < len(active):
                rows.batch_select_indices(torch.tensor(left))
                active = [active[row] for row in left]
            tokens = torch.tensor([[items[i].ids[step]] for i in active], device=model.device)
            judged = [row for row, i in enumerate(active) if step + 1 in items[i].judged]
            with _only(model, judged):
                logits = model(
                    tokens,
                    position_ids=torch.tensor(rows.row_lengths, device=model.device)[:, None],
                    past_key_values=rows,
                ).logits[:, -1]
            found = logits.float().log_softmax(-1)
            for row, log_probs in zip(judged, found, strict=True):
                i = active[row]
                kept = keep(items[i])
                seen[i].append(log_probs if kept else _result(log_probs, items[i].ids[step + 1]))
            progress()
    finally:
        rows.reset()
    return [_judge(item, found, keep(item)) for item, found in zip(items, seen, strict=True)]


@contextmanager
def _only(model: Any, rows: list[int]) -> Iterator[None]:
    """Logits of these rows alone: of a small model, they are a quarter of the work."""

    def choose(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][rows],)

    hook = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def _rows(model: Any, cache: Any, document: Sequence[int], items: Sequence[Item]) -> Any:
    """A row for each item, whose part of the document is a prompt."""
    forks = []
    for start, group in groupby(items, key=lambda item: item.start):
        missing = document[cache.get_seq_length() : start]
        if missing:
            ids = torch.tensor([missing], device=model.device)
            model(ids, past_key_values=cache, logits_to_keep=1)
        forks.append(cache.fork(sum(1 for _ in group)))
    return type(cache).join(forks)


def _result(log_probs: Tensor, token: int) -> Tensor:
    """``[2]``: whether the token is the most likely one, and its log-probability."""
    value = log_probs[token]
    return torch.stack([(value >= log_probs.max()).float(), value])


def _judge(item: Item, found: list[Tensor], kept: bool) -> Answer:
    stacked = torch.stack(found)
    if not kept:
        right, log_probs = stacked.unbind(1)
        return Answer(item=item, right=right > 0, log_probs=log_probs, distributions=None)
    tokens = torch.tensor([item.ids[at] for at in item.judged], device=stacked.device)
    return Answer(
        item=item,
        right=stacked.argmax(-1) == tokens,
        log_probs=stacked.gather(1, tokens[:, None])[:, 0],
        distributions=stacked,
    )
