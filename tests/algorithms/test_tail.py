"""The tail page's logits, as a step gives them to algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.algorithms import DecodeStep, tail_logits
from hisparse.kernels import cap_logits
from hisparse.testing import Simulator
from hisparse.types import Selection


@pytest.mark.parametrize(
    "settings",
    [
        {"scope": "layer"},
        {"scope": "kv_head"},
        {"scope": "query_head"},
        {"scope": "kv_head", "kv_cache_dtype": "fp8_e4m3"},
        {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16},
        {"logit_cap": 2.0, "scale": 0.6},
    ],
    ids=["layer", "kv-head", "query-head", "fp8", "mla", "capped"],
)
def test_the_log_sum_exp_is_that_of_the_logits(settings: dict[str, Any]) -> None:
    lengths = set[int]()

    def compare(layer_id: int, queries: Tensor, step: DecodeStep, _: Selection) -> None:
        query = queries.float() * step.policy.scale
        logits = tail_logits(query, layer_id, step)
        capped = cap_logits(logits.clone(), step.policy.logit_cap)
        expected = capped.masked_fill(logits == -torch.inf, -torch.inf).logsumexp(-1)
        assert_close(step.tail_lse(layer_id, query), expected, rtol=1e-5, atol=1e-5)
        lengths.update(step.tail_lens.tolist())

    sim = Simulator(**settings)
    requests = [sim.request(slot, 140, seed=slot) for slot in (1, 2)]
    sim.prefill((requests[0], 120), (requests[1], 125))
    sim.coordinator.observe(compare)
    for _ in range(9):
        sim.decode(*requests)
    # Tail pages of all lengths were seen.
    assert lengths == set(range(1, sim.policy.kv.page_size + 1))
