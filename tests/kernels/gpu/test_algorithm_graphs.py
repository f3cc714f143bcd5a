"""A captured selection replays to what it gives eagerly, for all algorithms that serve on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms import ALGORITHMS, DecodeStep, SelectionPolicy
from hisparse.engine.representations import Representations
from hisparse.kernels import DecodeRows, HostKeys, TailPages
from hisparse.types import IndexerInputs, KVSpec, PagedKV, StoredKV
from tests.shapes import small_spec

NAMES = list(ALGORITHMS)
#: A page more than the longest request has in full: its tail.
BATCH, PAGES, HEADS, DIM = 3, 41, 2, 64


class Tails:
    """Reads keys of tail pages from a static tensor."""

    def __init__(self, kv: KVSpec, device: str) -> None:
        self._keys = torch.randn(BATCH, kv.page_size, kv.num_kv_heads, DIM, device=device)

    def find_tails(self, layer_id: int, step: DecodeStep) -> torch.Tensor:
        raise AssertionError("the step has them")

    def read_tails(self, layer_id: int, step: DecodeStep) -> PagedKV:
        keys = self._keys.transpose(1, 2)
        return PagedKV(keys, keys)

    def tail_pages(self, layer_id: int, step: DecodeStep, *, with_new: bool) -> TailPages:
        keys = self._keys.transpose(1, 2)
        pages = torch.arange(BATCH, dtype=torch.int32, device=keys.device)
        return TailPages(StoredKV(keys, keys, None), pages, torch.full_like(pages, keys.shape[2]))

    def host_keys(self, layer_id: int) -> HostKeys:
        raise AssertionError("only algorithms that read host keys do")


def random_like(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, device=tensor.device).to(tensor.dtype)
    return torch.randint(0, 200, tensor.shape, device=tensor.device).to(tensor.dtype)


def make_step(name: str, device: str) -> DecodeStep:
    """Requests of 30, 35 and 40 pages, all that is remembered drawn at random."""
    torch.manual_seed(0)
    cls: type[Any] = ALGORITHMS.get(name)
    size = 16 if cls.page_sizes is None else min(cls.page_sizes)
    heads = {"num_q_heads": 2 * HEADS, "num_kv_heads": HEADS, "head_dim": DIM, "v_head_dim": DIM}
    heads |= {"index_head_dim": 32 if cls.indexer else 0}
    kv = small_spec(num_layers=1, **heads, dtype=torch.bfloat16, page_size=size)
    policy = SelectionPolicy(
        kv=kv,
        scope=cls.scopes[0],
        budget_pages=9,
        max_pages=9,
        num_sink_pages=1,
        num_recent_pages=2,
        scale=0.125,
    )
    kept = Representations(
        cls().representations(policy),
        kv,
        host_pages=BATCH * PAGES + 1,
        num_slots=BATCH,
        device=torch.device(device),
    )
    for tensor in kept.tensors.values():
        tensor.copy_(random_like(tensor))
    lens = torch.tensor([30, 35, 40], dtype=torch.int32, device=device)
    rows = torch.arange(BATCH * policy.heads, device=device)
    tails = torch.ones_like(rows, dtype=torch.int32)
    table = torch.randperm(BATCH * PAGES + 1, device=device)
    step = DecodeStep(
        policy=policy,
        representations=kept.tensors,
        slots=torch.arange(BATCH, device=device),
        tail_lens=torch.ones(BATCH, dtype=torch.int32, device=device),
        kv_io=Tails(kv, device),
        seq_lens_cpu=lens.cpu().numpy() * size + 1,
        host_slots=torch.zeros(BATCH, dtype=torch.int64, device=device),
        rows=DecodeRows(
            rows=rows,
            capacity=tails,
            num_real_rows=torch.full((1,), len(rows), dtype=torch.int32, device=device),
            host_page_table=table[1:].int().view(BATCH, -1),
            num_pages=lens,
            tail_pages=tails[None],
            tail_lens=tails,
        ),
    )
    shapes = (BATCH, 4, 32), (BATCH, 32), (BATCH, 4)
    step.use_indexer(IndexerInputs(*(torch.randn(x, device=device) for x in shapes)))
    return step


@pytest.mark.parametrize("name", NAMES)
def test_the_step_is_one_that_algorithms_take(name: str) -> None:
    """On a CPU: that the test below has something to capture."""
    step = make_step(name, "cpu")
    queries = torch.randn(BATCH, 2 * HEADS, DIM, dtype=torch.bfloat16)
    pages, lengths = ALGORITHMS.get(name)().retrieve_topk(queries, 0, step)
    assert pages.shape[:2] == lengths.shape == (BATCH, step.policy.heads)
    assert (lengths > 2).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_selection_replays(name: str) -> None:
    step, algorithm = make_step(name, "cuda"), ALGORITHMS.get(name)()
    queries = torch.randn(BATCH, 2 * HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    algorithm.retrieve_topk(queries, 0, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = algorithm.retrieve_topk(queries, 0, step)
    for _ in range(5):
        queries.copy_(torch.randn(queries.shape))
        expected = algorithm.retrieve_topk(queries, 0, step)
        graph.replay()
        assert torch.equal(captured.pages, expected.pages)
        assert torch.equal(captured.lengths, expected.lengths)
