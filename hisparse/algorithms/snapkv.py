"""SnapKV: keep pages that the end of the prompt attends. https://arxiv.org/abs/2404.14469"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import cap_logits, select
from hisparse.kernels.operation import new_tensors
from hisparse.types import Selection

_LISTED, _PROMPT_PAGES = "listed", "prompt_pages"
_WINDOW, _SEEN, _END = "window", "seen", "window_end"


@register_algorithm("snapkv")
@dataclass(frozen=True, kw_only=True)
class SnapKV(BaseSparseAlgorithm):
    """Keeps the prompt's pages that its last queries attended to most, and generated pages.

    Votes are those of section 4 of the paper: attention weights of an observation window at the
    end of the prompt, summed over its queries. A page keeps the neighbours of a peak, as the
    paper's pooling does. The choice is made once, when the prompt ends, so it cannot follow later
    questions. Generated pages rank first, the newest before all others. A generation as long as
    the budget therefore drops the prompt's pages, those with the fewest votes first.

    Attributes:
        window: queries of the observation window.
    """

    captured_launches: ClassVar[int] = 12

    window: int = 32

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, expected at least 1 query")

    @property
    def query_window(self) -> int:
        return self.window

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        kv = policy.kv
        queries = (self.window, kv.num_q_heads, kv.head_dim)
        return {
            # Prompt pages + 1, most votes first; 0 marks an empty entry.
            _LISTED: Representation((policy.heads, policy.max_pages), torch.int32, "request"),
            _PROMPT_PAGES: Representation((), torch.int32, "request"),
            _WINDOW: Representation(queries, kv.dtype, "request"),
            _SEEN: Representation((), torch.int32, "request"),
            _END: Representation((), torch.int32, "request"),
        }

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Move the window over the queries; count its votes when the prompt ends.

        ``queries [T, Hq, D]`` and ``keys [P, S, Hkv, D]`` have the model's dtype.
        """
        state = {name: x[layer_id, step.slot] for name, x in _state(step).items()}
        window = torch.cat([state[_WINDOW], queries])[-self.window :]
        state[_WINDOW].copy_(window)
        # Queries of an earlier turn do not directly precede the chunk: they have no vote.
        state[_SEEN].mul_(state[_END] == step.start)
        state[_SEEN].add_(queries.shape[0]).clamp_(max=self.window)
        state[_END].fill_(step.end)
        if step.is_last:
            pages = step.end // step.policy.kv.page_size
            listed = state[_LISTED].zero_()
            votes = self._votes(window, state[_SEEN], layer_id, step)[:, :pages]
            best = votes.topk(min(pages, listed.shape[1]), dim=-1).indices
            listed[:, : best.shape[1]] = best + 1
            state[_PROMPT_PAGES].fill_(pages)

    def _votes(self, window: Tensor, seen: Tensor, layer_id: int, step: PrefillStep) -> Tensor:
        """Sum the window's attention weights on each page over its queries.

        Args:
            window: ``[W, Hq, D]``, queries of the W positions before ``step.end``.
            seen: ``[] int32``, number of valid queries; they are the last ones of the window.
            step: the chunk that ends the prompt.

        Returns:
            ``[H, P] float32``.
        """
        kv, heads = step.policy.kv, step.policy.heads
        position = torch.arange(step.end - self.window, step.end, device=window.device)
        grouped = window.float().unflatten(1, (kv.num_kv_heads, -1)).permute(1, 2, 0, 3)
        page_logits = []
        for first, keys in step.context_keys(layer_id):
            logits = grouped @ keys.float().permute(1, 2, 0)[:, None] * step.policy.scale
            logits = cap_logits(logits, step.policy.logit_cap)
            key_position = torch.arange(first, first + keys.shape[0], device=window.device)
            hidden = key_position > position[:, None]
            logits = logits.masked_fill(hidden, -torch.inf).flatten(0, 1)
            missing = -keys.shape[0] % kv.page_size
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
            page_logits.append(logits.unflatten(-1, (-1, kv.page_size)).logsumexp(-1))
        weights = torch.cat(page_logits, -1).softmax(-1)  # [Hq, W, P]
        valid = torch.arange(self.window, 0, -1, device=window.device) <= seen
        votes = weights.masked_fill(~valid[:, None], 0).sum(1)
        row_votes: Tensor = votes.unflatten(0, (heads, -1)).sum(1)
        return row_votes

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        listed = step.representations[_LISTED][layer_id]
        shape = (len(step.slots), *listed.shape[1:])
        votes, newest = step.once("ranks", lambda: _ranks(shape, layer_id, step))
        # The first column collects empty entries, the last one pages that a crop removed.
        width = step.max_pages
        shapes = [(shape, torch.int32), (shape, torch.int64)]
        shapes += [((*shape[:2], columns), torch.float32) for columns in (width + 2, width)]
        entries, index, ranks, scores = new_tensors("snapkv", shapes, listed.device)
        torch.index_select(listed, 0, step.slots, out=entries)
        index.copy_(entries).clamp_(max=width + 1)
        ranks.zero_().scatter_(-1, index, votes)
        torch.maximum(ranks[..., 1:-1], newest, out=scores)
        return select(scores, step.num_pages, step.policy.select_rule, forced=step.forced_pages)


def _ranks(shape: tuple[int, ...], layer_id: int, step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Scores of listed pages ``shape = [B, H, K]``, by votes, and of generated ones ``[B, 1, P]``.

    Generated pages rank highest, the newest first; others have 0. All layers have the same prompts.
    """
    slots, width = step.slots, shape[-1]
    votes = torch.arange(width, 0, -1, dtype=torch.float32, device=slots.device)
    page = torch.arange(step.max_pages, device=slots.device)
    generated = page >= step.representations[_PROMPT_PAGES][layer_id, slots, None]
    newest = torch.where(generated, width + 1.0 + page, 0.0)
    return votes.expand(shape), newest[:, None]


def _state(step: PrefillStep | DecodeStep) -> dict[str, Tensor]:
    names = (_LISTED, _PROMPT_PAGES, _WINDOW, _SEEN, _END)
    return {name: step.representations[name] for name in names}
