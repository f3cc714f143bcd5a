"""Attention over MLA's latent: values are the first columns of the keys."""

from __future__ import annotations

import pytest
import torch

from hisparse.kernels import paged_attention
from hisparse.types import PagedKV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("width", "rank", "queries"), [(576, 512, 16), (40, 32, 35)], ids=["deepseek", "small"]
)
@pytest.mark.parametrize("size", [1, 64], ids=lambda s: f"page{s}")
def test_values_are_columns_of_the_keys(
    impl: str, size: int, width: int, rank: int, queries: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    latent = torch.randn(300 // size + 2, 1, size, width).to(dtype)
    kv = PagedKV(latent, latent[..., :rank])
    lens = torch.tensor([0, 1, 150, 101], dtype=torch.int32)
    pages = -(-int(lens.max()) // size)
    table = torch.stack([torch.randperm(latent.shape[0])[:pages] for _ in lens]).int()
    query = (torch.randn(4, queries, width) * width**-0.5).to(dtype).float()
    out, lse = paged_attention(query, kv, table, lens, impl=impl)
    assert out.shape == (4, queries, rank)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    )
    for row, length in enumerate(lens.tolist()):
        keys = latent[table[row].long(), 0].flatten(0, 1)[:length].double()
        logits = query[row].double() @ keys.T
        expected = logits.softmax(-1) @ keys[:, :rank]
        torch.testing.assert_close(out[row].double(), expected, **tolerance)
        torch.testing.assert_close(lse[row].double(), logits.logsumexp(-1), **tolerance)


def test_rows_share_their_places_whatever_the_strides_of_sizes_of_one() -> None:
    """Else tokens as pages of one would have their latents read twice, in blocks too large."""
    from hisparse.kernels.triton_common import same_places

    latents = torch.zeros(5, 1, 576)
    values = latents[..., :512]
    assert same_places(latents[:, :, None], values[:, :, None])
    assert not same_places(latents, values.contiguous())
