"""DIPR: keep all tokens with q.k near the best. https://arxiv.org/abs/2504.10326"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar, Literal

from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.dipr.fine import (
    LINKS_PER_TOKEN,
    build_graph,
    fine_scores,
    require_faiss,
)
from hisparse.algorithms.dipr.optimizer import IndexQuestion, choose_index
from hisparse.algorithms.page_score import tail_logits
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import key_score, select
from hisparse.types import KVSpec, Selection

logger = logging.getLogger("hisparse")

#: Tokens below a hundredth of the largest softmax weight are left out.
_DEFAULT_ALPHA = 0.01


@register_algorithm("dipr")
@dataclass(frozen=True, kw_only=True)
class DIPR(BaseSparseAlgorithm):
    """Keeps the pages of all tokens with a q.k of at least the largest q.k minus beta.

    AlayaDB's dynamic inner product range query. Heads and tasks that look at many tokens keep
    many, up to ``device_buffer_size``; others keep few. A page is kept if one of its tokens is in
    range for any of the heads that share the selection. Pages of one token give the paper's
    definition. The largest q.k includes the tail page's tokens.

    Attributes:
        beta: more than 0, in units of q.k before the softmax scale, as in the paper. None:
            follows from ``alpha``.
        alpha: in (0, 1); a token is left out if it weighs less in the softmax than this share of
            the heaviest token. beta = -ln(alpha) / scale, where scale is usually 1 / sqrt(D).
            None: 0.01 unless ``beta`` is given.
        index: how to find tokens in range. "flat" scores all keys. "fine" searches a graph over the
            prompt's keys and may miss tokens. "auto" lets the server choose by context length and
            memory; the log says why.
        expected_new_tokens: tokens that a request generates, for "auto". A graph pays off over
            thousands.
        capacity_threshold: tokens that the fine index explores in any case, l0 in the paper. More
            tokens miss less and take longer.
    """

    variable_lengths: ClassVar[bool] = True
    reads_host_keys: ClassVar[bool] = True

    beta: float | None = None
    alpha: float | None = None
    index: Literal["auto", "flat", "fine"] = "auto"
    expected_new_tokens: int = 512
    capacity_threshold: int = 256

    def __post_init__(self) -> None:
        if self.beta is not None and self.alpha is not None:
            raise ValueError(f"got beta {self.beta} and alpha {self.alpha}, expected one of them")
        if self.beta is not None and not 0 < self.beta < math.inf:
            raise ValueError(f"beta: got {self.beta}, expected more than 0 and finite")
        if self.expected_new_tokens < 1:
            raise ValueError(
                f"expected_new_tokens: got {self.expected_new_tokens}, expected at least 1"
            )
        if self.capacity_threshold < 1:
            raise ValueError(
                f"capacity_threshold: got {self.capacity_threshold}, expected at least 1 token"
            )
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError(f"alpha: got {self.alpha}, expected more than 0 and less than 1")

    def within(self, scale: float) -> float:
        """Beta in units of attention logits, which are ``scale`` times q.k."""
        if self.beta is not None:
            return self.beta * scale
        return -math.log(_DEFAULT_ALPHA if self.alpha is None else self.alpha)

    def resolved(self, policy: SelectionPolicy, *, context_length: int, host_bytes: int) -> DIPR:
        """Choose ``index`` if it is "auto"."""
        if self.index != "auto":
            return self
        kv = policy.kv
        kind, reason = choose_index(
            IndexQuestion(
                context_length=context_length,
                expected_tokens=(policy.budget_pages + 1) * kv.page_size,
                new_tokens=self.expected_new_tokens,
                kv_token_bytes=kv.token_bytes,
                graph_token_bytes=replace(self, index="fine").host_token_bytes(kv),
                host_bytes=host_bytes,
                has_graphs=find_spec("faiss") is not None,
            )
        )
        logger.info("hisparse: dipr finds tokens by index %s: %s", kind, reason)
        return replace(self, index=kind)

    def host_token_bytes(self, kv: KVSpec) -> int:
        links = 4 * LINKS_PER_TOKEN * kv.num_kv_heads * kv.num_layers
        # "auto" may resolve to "fine".
        return links if self.index in ("auto", "fine") else 0

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return {}

    def initialize(self, representations: Mapping[str, Tensor], policy: SelectionPolicy) -> None:
        if self.index == "fine":
            require_faiss()

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        if self.index == "fine":
            build_graph(layer_id, step, self.capacity_threshold)

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        """Nothing: pages that decoding fills are scanned."""

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        policy = step.policy
        query, within = queries.float() * policy.scale, self.within(policy.scale)
        rest = tail_logits(query, layer_id, step).amax(-1)
        if self.index == "fine":
            threshold = self.capacity_threshold
            scores = fine_scores(query, layer_id, step, rest, within, threshold)
        else:
            table = step.host_page_table[:, : step.max_pages]
            scores = key_score(query, step.host_keys(layer_id), table, step.num_pages)
        rule = step.once("rule", lambda: replace(policy.rule, within=within))
        return select(scores, step.num_pages, rule, forced=step.forced_pages, rest=rest)
