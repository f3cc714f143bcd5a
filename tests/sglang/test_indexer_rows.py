"""SGLang cuts what an indexer returns to the rows that are not padding, as if it were a tensor."""

from __future__ import annotations

import torch

from hisparse.sglang.dsa_indexer import RowwiseInputs


def test_rows_of_all_fields_are_taken() -> None:
    """Also fewer rows than there are fields, which a tuple would drop."""
    whole = RowwiseInputs(torch.rand(5, 4, 8), torch.rand(5, 8), torch.rand(5, 4))
    for count in (1, 2, 4):
        part = whole[:count]
        assert [x.shape[0] for x in part] == [count] * 3
        assert torch.equal(part.keys, whole.keys[:count])
        assert torch.equal(part.take(slice(1)).weights, whole.weights[:1])
    assert whole[1] is whole.keys
