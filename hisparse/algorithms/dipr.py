"""DIPR: keep all that weighs nearly as much as the best. https://arxiv.org/abs/2504.10326"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.page_score import tail_logits
from hisparse.algorithms.sketch import Sketch
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import SketchLayout, key_score, select
from hisparse.types import KVSpec, Selection

#: Pages below a hundredth of the largest page's softmax weight are left out.
_DEFAULT_ALPHA = 0.01


class _Sketches(Sketch):
    """Sketches that on a CPU have four bits of every number, so that few pages are missed."""

    def layout(self, kv: KVSpec, device: str = "cuda") -> SketchLayout:
        # Codes of four bits take the room of 16 tokens.
        if device != "cpu" or kv.page_size % 16:
            return super().layout(kv, device)
        return SketchLayout(kv.head_dim, kv.page_size, kv.head_dim, numbered=False, bits=4)


_SKETCHES = _Sketches()


@register_algorithm("dipr")
@dataclass(frozen=True, kw_only=True)
class DIPR(BaseSparseAlgorithm):
    """Keeps all pages with a log-sum-exp of q.k of at least the largest one's minus beta.

    AlayaDB's dynamic inner product range query; with pages of one token it is the paper's. Heads
    and tasks that look at many tokens keep many, up to ``device_buffer_size``; others keep few. A
    page is kept if it is in range for any of the heads that share the selection. The tail page may
    be the largest one.

    Attributes:
        beta: more than 0, in units of q.k before the softmax scale, as in the paper. None:
            follows from ``alpha``.
        alpha: in (0, 1); a page is left out if it weighs less in the softmax than this share of
            the heaviest page. beta = -ln(alpha) / scale, where scale is usually 1 / sqrt(D).
            None: 0.01 unless ``beta`` is given.
        index: what is searched. "sketch": the page sketches of the algorithm ``sketch``, which
            estimate the log-sum-exp, on a CPU with four bits of every number in pages of a multiple
            of 16 tokens. "flat": every key in host memory, exactly, on a CPU only.
    """

    variable_lengths: ClassVar[bool] = True
    store_version: ClassVar[int | None] = 1
    recordable: ClassVar[bool] = True
    captured_launches: ClassVar[int] = 13
    kernels: ClassVar[tuple[str, ...]] = Sketch.kernels

    beta: float | None = None
    alpha: float | None = None
    index: Literal["sketch", "flat"] = "sketch"

    def __post_init__(self) -> None:
        if self.beta is not None and self.alpha is not None:
            raise ValueError(f"got beta {self.beta} and alpha {self.alpha}, expected one of them")
        if self.beta is not None and not 0 < self.beta < math.inf:
            raise ValueError(f"beta: got {self.beta}, expected more than 0 and finite")
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError(f"alpha: got {self.alpha}, expected more than 0 and less than 1")

    def within(self, scale: float) -> float:
        """Beta in units of attention logits, which are ``scale`` times q.k."""
        if self.beta is not None:
            return self.beta * scale
        return -math.log(_DEFAULT_ALPHA if self.alpha is None else self.alpha)

    def appends(self, policy: SelectionPolicy) -> bool:
        return self.index == "sketch" and _SKETCHES.appends(policy)

    @property
    def reads_host_keys(self) -> bool:
        return self.index == "flat"

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return {} if self.index == "flat" else _SKETCHES.representations(policy)

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        if self.index == "sketch":
            _SKETCHES.store(keys, layer_id, host_pages, step)

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        policy = step.policy
        rule = policy.select_rule_with(within=self.within(policy.scale))
        if self.index == "sketch":
            tail = step.tail_pages(layer_id, with_new=True)
            scores, rest = _SKETCHES.score(queries, layer_id, step, tail=tail)
        else:
            query = step.scaled(queries)
            table = step.host_page_table[:, : step.max_pages]
            keys = step.host_keys(layer_id)
            scores = key_score(query, keys, table, step.num_pages, reduce="lse")
            rest = tail_logits(query, layer_id, step).logsumexp(-1)
        return select(scores, step.num_pages, rule, forced=step.forced_pages, rest=rest)
