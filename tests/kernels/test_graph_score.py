"""``graph_score`` of every implementation: the search, and that what it says is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import GraphSearch, KeyGraphs, graph_score, key_score
from tests.sizes import sized

IMPLS = ["reference", "cpu"]
SIZE = 4


def world(tokens: list[int], kv_heads: int, links: int, seed: int) -> dict[str, Tensor]:
    """Requests with keys of small whole numbers, whose products are exact, and random graphs."""
    rng = torch.Generator().manual_seed(seed)
    pages = max(1, *(-(-n // SIZE) for n in tokens))
    host_pages = len(tokens) * pages + 1
    table = torch.randperm(host_pages, generator=rng)[: len(tokens) * pages]
    # Some links lead nowhere, and some beyond what the request has.
    own = [torch.randint(-1, n + 3, (kv_heads, n, links), generator=rng) for n in tokens]
    return {
        "keys": torch.randint(-3, 4, (host_pages, kv_heads, SIZE, 6), generator=rng).float(),
        "table": table.view(len(tokens), pages).int(),
        "num_pages": torch.tensor([n // SIZE for n in tokens], dtype=torch.int32),
        **{f"links{i}": x.int().contiguous() for i, x in enumerate(own)},
    }


def graphs(parts: dict[str, Tensor], tokens: list[int], links: int, stride: int) -> KeyGraphs:
    addresses = [parts[f"links{i}"].data_ptr() for i in range(len(tokens))]
    return KeyGraphs(torch.tensor(addresses), torch.tensor(tokens), links, stride)


@settings(max_examples=sized(20, 400), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    links=st.integers(1, 5),
    stride=st.integers(1, 40),
    within=st.sampled_from([0.0, 3.0, 40.0]),
    threshold=st.integers(1, 30),
    known=st.sampled_from([-torch.inf, 0.0, 20.0]),
    seed=st.integers(0, 2**20),
)
def test_all_implementations_see_the_same_tokens(
    tokens: list[int],
    kv_heads: int,
    group: int,
    links: int,
    stride: int,
    within: float,
    threshold: int,
    known: float,
    seed: int,
) -> None:
    parts = world(tokens, kv_heads, links, seed)
    query = torch.randint(-3, 4, (len(tokens), kv_heads * group, 6)).float()
    inputs = query, parts["keys"], parts["table"], parts["num_pages"]
    found = [
        graph_score(
            *inputs,
            graphs(parts, tokens, links, stride),
            torch.full(query.shape[:2], known),
            GraphSearch(within, threshold),
            impl=impl,
        )
        for impl in IMPLS
    ]
    assert torch.equal(*found)
    # Nothing is seen that is not there, and no page scores more than it holds.
    assert (found[0] <= key_score(*inputs)).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_all_candidates_up_to_the_threshold_then_only_critical_ones(impl: str) -> None:
    """A chain 0, 1, 2, ... of which token i has q.k = values[i]; each page is one token."""
    values = [5.0, 4.0, 1.0, 0.0, 6.0, 3.0, 9.0]
    keys = torch.tensor(values).view(-1, 1, 1, 1)
    chain = torch.tensor([1, 2, 3, 4, 5, 6, -1], dtype=torch.int32).view(1, 7, 1)
    graph = KeyGraphs(torch.tensor([chain.data_ptr()]), torch.tensor([7]), 1, 7)
    table = torch.arange(7, dtype=torch.int32)[None]
    count = torch.tensor([7], dtype=torch.int32)

    def seen(within: float, threshold: int, known: float = -torch.inf) -> int:
        scores = graph_score(
            torch.ones(1, 1, 1),
            keys,
            table,
            count,
            graph,
            torch.full((1, 1), known),
            GraphSearch(within, threshold),
            impl=impl,
        )
        number = int((scores > -torch.inf).sum())
        assert scores[0, 0].tolist() == values[:number] + [-torch.inf] * (7 - number)
        return number

    # 5 and 4 are in range of the best so far; 1 is seen, and not explored.
    assert seen(within=2.0, threshold=1) == 3
    # A third and a fourth candidate are explored in any case; from 6 on the rest is critical but 3.
    assert seen(within=2.0, threshold=4) == 6
    assert seen(within=3.0, threshold=4) == 7
    assert seen(within=5.0, threshold=1) == 7
    # A better one is known: not even the entry is critical.
    assert seen(within=2.0, threshold=1, known=20.0) == 2


@pytest.mark.parametrize("impl", IMPLS)
def test_what_a_graph_has_beyond_the_pages_is_passed_over(impl: str) -> None:
    """A sequence may be cut shorter than its graph."""
    keys = torch.full((3, 1, 2, 4), torch.nan)
    keys[1] = 1.0
    chain = torch.tensor([1, 2, 3, 0], dtype=torch.int32).view(1, 4, 1)
    graph = KeyGraphs(torch.tensor([chain.data_ptr()]), torch.tensor([4]), 1, 1)
    scores = graph_score(
        torch.ones(1, 1, 4),
        keys,
        torch.tensor([[1, 2]], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        graph,
        torch.zeros(1, 1),
        GraphSearch(within=1.0, threshold=9),
        impl=impl,
    )
    assert scores.tolist() == [[[4.0, -torch.inf]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_of_what_is_seen_are_those_of_key_score(dtype: torch.dtype) -> None:
    """Links from each token to all others: everything is seen, as a flat scan sees it."""
    tokens, kv_heads, dim = 48, 2, 24
    keys = torch.randn(2, 20, SIZE, kv_heads, dim).to(dtype)[1].transpose(1, 2)
    links = torch.arange(tokens).expand(kv_heads, tokens, tokens).int().contiguous()
    graph = KeyGraphs(torch.tensor([links.data_ptr()] * 2), torch.tensor([tokens] * 2), tokens, 64)
    table = torch.randperm(20)[:12].int().expand(2, -1)
    num_pages = torch.full((2,), 12, dtype=torch.int32)
    query = torch.randn(2, 6, dim)
    scores = graph_score(
        query, keys, table, num_pages, graph, torch.zeros(2, 6), GraphSearch(0.0, threshold=1)
    )
    torch.testing.assert_close(scores, key_score(query, keys, table, num_pages))


def test_bad_tensors_are_named() -> None:
    query, keys = torch.zeros(1, 4, 8), torch.zeros(3, 2, 4, 8)
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    count = torch.tensor([2], dtype=torch.int32)
    links = torch.zeros(2, 8, 300, dtype=torch.int32)
    graph = KeyGraphs(torch.tensor([links.data_ptr()]), torch.tensor([8]), 300, 1)

    def refused(message: str, **changed: object) -> None:
        inputs = {
            "query": query,
            "keys": keys,
            "host_page_table": table,
            "num_pages": count,
            "graphs": graph,
            "best": torch.zeros(1, 4),
        }
        with pytest.raises(KernelError, match=message):
            graph_score(**(inputs | changed), search=GraphSearch(1.0, 1), impl="cpu")  # type: ignore[arg-type]

    refused(r"links: got 300 per token, expected at most 256")
    refused("num_pages: got device meta, expected cpu", num_pages=count.to("meta"))
    refused("best: got device meta, expected cpu", best=torch.zeros(1, 4, device="meta"))
    refused(r"best: got shape \[1, 2\], expected \[1, 4\]", best=torch.zeros(1, 2))
    refused(r"keys: got dtype torch.int8, expected one of", keys=keys.to(torch.int8))
    refused(r"keys: got 3 heads, expected a divisor of the 4", keys=torch.zeros(3, 3, 4, 8))
    refused(r"graphs.tokens: got shape \[2\]", graphs=graph._replace(tokens=torch.zeros(2).long()))
    small = graph._replace(links_per_token=1)
    refused(r"host_page_table: a page is outside", host_page_table=table + 1, graphs=small)
    refused(r"num_pages: got 3, expected 0 to 2", num_pages=count + 1, graphs=small)
