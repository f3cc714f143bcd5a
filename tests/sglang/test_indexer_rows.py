"""What an indexer returns, and what its keys cost."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hisparse.sglang.features.dsa import around_compute_indexer_cell_size
from hisparse.sglang.models import RowwiseInputs


def test_rows_of_all_fields_are_taken() -> None:
    """SGLang cuts them as it cuts a tensor, also to fewer rows than there are fields."""
    whole = RowwiseInputs(torch.rand(5, 4, 8), torch.rand(5, 8), torch.rand(5, 4))
    for count in (1, 2, 4):
        part = whole[:count]
        assert [x.shape[0] for x in part] == [count] * 3
        assert torch.equal(part.keys, whole.keys[:count])
        assert torch.equal(part.take(slice(1)).weights, whole.weights[:1])
    assert whole[1] is whole.keys


def test_index_keys_are_counted_once() -> None:
    """hisparse counts them as representations. Counted twice, they would shrink SGLang's pool."""
    for backend, expected in (("hisparse", 0), ("torch_native", 264)):
        kvc = SimpleNamespace(server_args=SimpleNamespace(attention_backend=backend))
        found = around_compute_indexer_cell_size(
            lambda configurator, *, kvc, num_layers: 132 * num_layers, None, kvc=kvc, num_layers=2
        )
        assert found == expected
