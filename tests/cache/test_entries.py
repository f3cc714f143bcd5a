"""How often a decode layer enters the cache manager, and looks up page tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms import BaseSparseAlgorithm, DecodeStep, SelectionPolicy, tail_logits
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.cache import swap_in
from hisparse.cache.kv_io import KVReadWrite
from hisparse.kernels import select
from hisparse.testing import Simulator
from hisparse.types import Selection


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, counts: Counter[str]) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("scope", ["layer", "kv_head", "query_head"])
def test_a_decode_layer_enters_three_times(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append, or hand new tokens to the kernel that scores; swap in; and if a step fills a tail
    page, promote.
    """
    counts: Counter[str] = Counter()
    for owner, name in (
        (KVReadWrite, "append"),
        (KVReadWrite, "tail_pages"),
        (swap_in.SwapIn, "swap_in"),
        (KVReadWrite, "promote_tails"),
    ):
        count(monkeypatch, owner, name, counts)
    sim = Simulator(scope=scope, layers=3)
    request = sim.request(1, 160, seed=1)
    sim.prefill((request, 8 * sim.page_size - 2))
    for name in ("diff_tables", "move_pages"):
        count(monkeypatch, swap_in, name, counts)
    appends = "append" if scope == "query_head" else "tail_pages"
    once = dict.fromkeys((appends, "swap_in", "diff_tables", "move_pages"), 3)
    counts.clear()
    sim.decode(request)
    assert counts == once
    counts.clear()
    sim.decode(request)
    assert counts == once | {"promote_tails": 3}


@dataclass(frozen=True, kw_only=True)
class Forgetful(Quest):
    """Has no kernel for new tokens, but says that it has."""

    def appends(self, policy: SelectionPolicy) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class ByTails(Sketch):
    """Ranks the tail page beside the others in ways of its own."""

    kernel: bool = True  # Whether the one that scores gets new tokens.
    keys: bool = True

    def appends(self, policy: SelectionPolicy) -> bool:
        return self.kernel and super().appends(policy)

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        scores, _ = self.score(queries, layer_id, step, tail=None)
        query = step.scaled(queries)
        if self.keys:
            rest = tail_logits(query, layer_id, step).logsumexp(-1)
        else:
            rest = step.tail_lse(layer_id, query)
        rule = step.policy.select_rule_with(within=1.0)
        return select(scores, step.num_pages, rule, forced=step.forced_pages, rest=rest)


@pytest.mark.parametrize(
    "algorithms",
    [
        (Quest(), Forgetful()),
        (ByTails(kernel=False), ByTails()),
        (ByTails(kernel=False, keys=False), ByTails(keys=False)),
    ],
    ids=["no-kernel", "keys", "lse"],
)
def test_new_tokens_that_no_kernel_takes_are_appended(
    algorithms: tuple[BaseSparseAlgorithm, BaseSparseAlgorithm],
) -> None:
    """Before anything reads their page."""
    outputs = []
    for algorithm in algorithms:
        sim = Simulator(algorithm=algorithm, layers=2)
        request = sim.request(1, 160, seed=1)
        sim.prefill((request, 8 * sim.page_size - 2))
        outputs.append(torch.stack([sim.decode(request) for _ in range(20)]))
    assert torch.equal(*outputs)
