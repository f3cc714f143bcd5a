"""The algorithm ``qsa`` against SGLang's own functions, those that a CPU runs.

They are its references of pooling, scores, top-k, expansion and attention. What stops the rest is
``qwen_sparse_fa2_cu_seqlens_triton``, with which its backend gathers K and V.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_qsa import (
    BUDGET,
    LAYERS,
    LENGTH,
    POSITIONS,
    PROMPT,
    SIZE,
    Indexed,
    request_of,
    simulator,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def expected_slots(model: Indexed, layer: int) -> Tensor:
    """``[n, K] int32``, the tokens that SGLang attends for each query, padded with -1."""
    from sglang.srt.layers.attention.qsa.kernel import (
        average_pool_qsa_keys,
        expand_qsa_block_indices,
        qsa_fast_topk,
    )
    from sglang.srt.layers.attention.qsa.mqa import qsa_mqa_prefill

    new, full = model.inputs(layer), LENGTH // SIZE * SIZE
    pooled = average_pool_qsa_keys(new.keys[:full].unflatten(0, (-1, SIZE))[:, :, None])
    # The model's norm and rotation of a key, as :class:`QSA` takes them too.
    keys = model.compress(layer, pooled, POSITIONS[:full:SIZE])
    at = torch.arange(LENGTH)
    rows = torch.zeros(LENGTH, dtype=torch.int32), ((at + 1) // SIZE).int()
    logits = qsa_mqa_prefill(new.queries, keys[:, None], *rows)
    blocks = qsa_fast_topk(logits, *rows, BUDGET // SIZE)
    return expand_qsa_block_indices(blocks, at, at + 1, SIZE, BUDGET)


def test_the_output_is_that_of_sglangs_functions() -> None:
    """In prefill and decoding."""
    from sglang.srt.layers.attention.qsa.kernel import qsa_sparse_attention

    sim = simulator(Indexed(16, seed=11))
    request = request_of(sim)
    outs = [sim.prefill((request, PROMPT))[0]]
    while request.done < LENGTH:
        outs.append(sim.decode(request))
    found = torch.cat(outs, 1)
    for layer in range(LAYERS):
        q, k, v = (x[layer] for x in (request.q, request.k, request.v))
        slots = expected_slots(sim.model, layer)
        assert int((slots[-1] >= 0).sum()) < LENGTH // 4
        expected = qsa_sparse_attention(q, k, v, slots, sim.scale)
        torch.testing.assert_close(found[layer], expected, rtol=1e-4, atol=1e-5)
