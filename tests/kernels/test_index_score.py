"""``index_score`` and ``store_index_keys``: DeepSeek-V3.2's indexer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.kernels import chunk_index_score, index_score, store_index_keys
from hisparse.types import IndexerInputs
from tests.kernels.conftest import check_unwritten
from tests.kernels.test_raw_queries import read_as_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED = DTYPES | {"fp8": torch.float8_e4m3fn}


def pool(pages: int, dim: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """Empty keys and their scales."""
    keys = torch.zeros(pages, dim, dtype=STORED[kind])
    return keys, torch.zeros(pages) if kind == "fp8" else None


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "kind"),
    [
        *((4, 24, dtype, kind) for dtype in DTYPES for kind in STORED),
        (4, 24, "bf16", "fp8-bytes"),
        (20, 128, "bf16", "fp8"),
    ],
)
def test_scores_are_the_papers_sum(
    impl: str, heads: int, dim: int, dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "fp8-bytes":
        read_as_bytes("index", impl, monkeypatch)
        kind = "fp8"
    torch.manual_seed(0)
    keys, scales = pool(100, dim, kind)
    spread = torch.logspace(-2, 1, dim)
    store_index_keys(
        torch.randn(99, dim) * spread, keys, torch.arange(1, 100), scales=scales, impl="reference"
    )
    to = DTYPES[dtype]
    new = IndexerInputs(
        (torch.randn(3, heads, dim) / spread).to(to),
        torch.randn(3, dim).to(to),
        torch.randn(3, heads).to(to),
    )
    table = torch.randint(1, 100, (3, 145), dtype=torch.int32)[:, :141]
    num_pages = torch.tensor([140, 63, 0], dtype=torch.int32)
    scores = index_score(new, keys, table, num_pages, scales=scales, impl=impl)
    own = keys.double() if scales is None else keys.double() * scales[:, None]
    own = own[table.long()]
    for row, count in enumerate(num_pages.tolist()):
        own[row, count] = new.keys[row].double()
    queries, weights = new.queries.double(), new.weights.double()
    products = torch.einsum("bhd,bpd->bhp", queries, own)
    expected = (products.relu() * weights[..., None]).sum(1)
    size = torch.einsum("bhd,bpd->bhp", queries.abs(), own.abs())
    size = (size * weights.abs()[..., None]).sum(1)
    present = torch.arange(141) <= num_pages[:, None]
    assert scores.shape == (3, 1, 141)
    assert ((scores[:, 0] - expected).abs() <= 2e-6 * size)[present].all()
    if impl != "cpu":  # which runs plain PyTorch
        check_unwritten(impl, scores[:, 0], ~present)


@pytest.mark.parametrize("kind", STORED)
def test_few_programs_score_rows_of_any_length(impl: str, kind: str) -> None:
    """In Triton's interpreter three of them take 14 turns at 40 blocks of tokens, or 27 at 80."""
    torch.manual_seed(3)
    width = 2560
    keys, scales = pool(200, 16, kind)
    store_index_keys(
        torch.randn(199, 16), keys, torch.arange(1, 200), scales=scales, impl="reference"
    )
    num_pages = torch.tensor([2559, 2496, 1400, 65, 64, 63, 0], dtype=torch.int32)
    new = IndexerInputs(torch.randn(7, 2, 16), torch.randn(7, 16), torch.randn(7, 2))
    table = torch.randint(1, 200, (7, width), dtype=torch.int32)
    inputs = new, keys, table, num_pages
    scores = index_score(*inputs, scales=scales, impl=impl)
    expected = index_score(*inputs, scales=scales, impl="reference")
    present = (torch.arange(width) <= num_pages[:, None])[:, None]
    torch.testing.assert_close(scores[present], expected[present], rtol=1e-5, atol=1e-4)
    if impl != "cpu":
        check_unwritten(impl, scores, ~present)


@pytest.mark.parametrize("kind", STORED)
def test_tokens_of_a_prompt_are_scored_by_stored_keys(impl: str, kind: str) -> None:
    """Their own keys too, which eight bits have rounded."""
    torch.manual_seed(2)
    keys, scales = pool(200, 24, kind)
    store_index_keys(
        torch.randn(199, 24), keys, torch.arange(1, 200), scales=scales, impl="reference"
    )
    new = IndexerInputs(torch.randn(70, 6, 24), torch.zeros(70, 24), torch.randn(70, 6))
    table = 1 + torch.randperm(199)[:131].int()
    num_tokens = torch.arange(62, 132, dtype=torch.int32)
    scores = chunk_index_score(new, keys, table, num_tokens, scales=scales, impl=impl)
    own = (keys.double() if scales is None else keys.double() * scales[:, None])[table.long()]
    products = torch.einsum("thd,pd->thp", new.queries.double(), own).relu()
    expected = (products * new.weights.double()[..., None]).sum(1)
    assert scores.shape == (70, 1, 131)
    present = torch.arange(131) < num_tokens[:, None]
    torch.testing.assert_close(
        scores[:, 0].double()[present], expected[present], rtol=1e-4, atol=1e-4
    )
    if impl != "cpu":
        # Triton scores the token behind them too.
        check_unwritten(impl, scores[:, 0], torch.arange(131) > num_tokens[:, None])


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("dtype", [*DTYPES, "fp16"])
@pytest.mark.parametrize("dim", [24, 128])
def test_stored_keys_are_the_references(impl: str, dim: int, dtype: str, kind: str) -> None:
    torch.manual_seed(1)
    new = torch.randn(40, 2, dim)[:, 1] * torch.logspace(-6, 3, 40)[:, None]
    new = new.to({**DTYPES, "fp16": torch.float16}[dtype])
    new[3] = 0
    where = 1 + torch.randperm(60)[:40]
    stored = [pool(61, dim, kind) for _ in range(2)]
    for (keys, scales), by in zip(stored, (impl, "reference"), strict=True):
        store_index_keys(new, keys, where, scales=scales, impl=by)
    (got, got_scales), (expected, expected_scales) = stored
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    if got_scales is not None:
        assert torch.equal(got_scales, expected_scales)
        mantissa, _ = torch.frexp(got_scales[where])
        assert (mantissa == 0.5).all()
        largest = new.float().abs().amax(-1)
        largest = (largest / got_scales[where])[largest > 1e-4]
        assert (largest <= 448).all()
        assert (largest > 224).all()


def test_padding_changes_no_key_of_a_request(impl: str) -> None:
    keys, scales = pool(4, 16, "fp8")
    new = torch.ones(3, 16)
    new[1:] = torch.nan
    store_index_keys(new, keys, torch.tensor([2, 0, -1]), scales=scales, impl=impl)
    assert scales is not None
    assert torch.equal(keys[2].float() * scales[2], torch.ones(16))
    assert not keys[[1, 3]].float().any()
    if impl not in ("reference", "cpu"):
        assert not keys[0].float().any()
