"""How much of K and V a step's scores stand for: bytes of representations, as declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hisparse.algorithms import build_algorithm
from hisparse.algorithms.base import entry_bytes
from hisparse.config import HiSparseConfig
from hisparse.engine.build import kept_tensors, make_policy
from hisparse.types import KVSpec
from tests.fake_cuda.engine import CONTEXT, LLAMA, MLA


def score_bytes(config: HiSparseConfig, spec: KVSpec) -> float:
    """Bytes of all pages' representations over those of K and V, for a context of 128k tokens."""
    algorithm = build_algorithm(config)
    policy = make_policy(config, algorithm, spec, 0.1, "layer")
    kept = kept_tensors(config, algorithm, policy)
    page = entry_bytes(kept, "page", "device") + entry_bytes(kept, "page", "host")
    pages = -(-CONTEXT // spec.page_size)
    return pages * page / (CONTEXT * spec.token_bytes / spec.num_layers)


@pytest.mark.parametrize(
    "spec",
    [
        LLAMA,
        replace(LLAMA, num_q_heads=14, num_kv_heads=2, head_dim=64, v_head_dim=64),
        replace(LLAMA, head_dim=256, v_head_dim=256),
        replace(LLAMA, page_size=64),
        MLA,
    ],
    ids=["llama", "qwen-0.5b", "gemma", "pages of 64", "MLA"],
)
def test_the_default_reads_a_sixteenth_of_k_and_v_at_most(spec: KVSpec) -> None:
    config = HiSparseConfig(page_size=spec.page_size)
    assert score_bytes(config, spec) <= 1 / 16
