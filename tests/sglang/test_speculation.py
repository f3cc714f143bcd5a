"""Speculation: chains of SGLang's drafts, accepted slots, and the stand-in's functions."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.sglang.features.speculation import check_rollback, draft_tokens
from hisparse.sglang.features.speculation.chains import accepted_drafts, keep_chains
from hisparse.testing import Simulator

STANDIN = Path(__file__).parent.parent.parent / "cpu_standins" / "sgl_kernel"


def _load(name: str) -> ModuleType:
    """A module of the stand-in, whichever sgl_kernel is installed."""
    spec = importlib.util.spec_from_file_location(f"standin_{name}", STANDIN / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


TREE, SPECULATION = _load("speculative"), _load("_speculation")


def _mask(parents: list[int]) -> torch.Tensor:
    """``[n, n] bool``: entry ``[i, j]`` says that node j is node i or its ancestor."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        mask[node] |= mask[parent]
    return mask


def _links(trees: list[list[int]], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Positions, indices, first children and next siblings, as SGLang asks for them."""
    count = len(trees[0])
    masks = torch.stack([_mask(parents) for parents in trees]).flatten()
    positions = torch.empty(len(trees) * count, dtype=torch.int64)
    links = [torch.empty(len(trees), count, dtype=torch.int64) for _ in range(3)]
    TREE.reconstruct_indices_from_tree_mask(
        masks, torch.tensor(lengths), positions, *links, len(trees), count
    )
    return (positions, *links)


@pytest.mark.parametrize("seed", range(5))
def test_links_of_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    trees = [[-1, *(rng.randrange(node) for node in range(1, 9))] for _ in range(3)]
    positions, index, children, siblings = _links(trees, [5, 90, 17])
    for parents, first, following in zip(trees, children.tolist(), siblings.tolist(), strict=True):
        for node in range(9):
            of_node = [child for child in range(9) if parents[child] == node]
            assert [first[node], *(following[child] for child in of_node)] == [*of_node, -1]
    assert index.flatten().tolist() == list(range(27))
    depths = [int(row.sum()) - 1 for parents in trees for row in _mask(parents)]
    starts = [length for length in (5, 90, 17) for _ in range(9)]
    assert positions.tolist() == [a + b for a, b in zip(starts, depths, strict=True)]


def test_the_target_follows_its_own_tokens_through_the_tree() -> None:
    # A chain 0-1-2, and two unused nodes with token 0 at the root.
    trees = [[-1, 0, 1, 0, 0], [-1, 0, 1, 0, 0]]
    _, index, children, siblings = _links(trees, [4, 4])
    tokens = torch.tensor([[7, 8, 9, 0, 0], [7, 8, 9, 0, 0]])
    target = torch.tensor([[8, 3, 5, 5, 5], [0, 1, 1, 6, 2]])
    predicts = torch.zeros(10, dtype=torch.int32)
    accepted = torch.full((2, 5), -1, dtype=torch.int32)
    count = torch.empty(2, dtype=torch.int32)
    SPECULATION.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=tokens,
        retrive_index=index,
        retrive_next_token=children,
        retrive_next_sibling=siblings,
        target_predict=target,
    )
    assert accepted.tolist() == [[0, 1, -1, -1, -1], [5, 8, -1, -1, -1]]
    assert count.tolist() == [1, 1]
    assert predicts[[0, 1]].tolist() == [8, 3] and predicts[[5, 8]].tolist() == [0, 6]


def test_slots_are_written_read_and_packed() -> None:
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    slots = torch.tensor([11, 12, 13, 21, 22])
    SPECULATION.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 8)
    assert table[2].tolist() == [0, 11, 12, 13, 0, 0, 0, 0]
    found = torch.empty(5, dtype=torch.int64)
    SPECULATION.assign_extend_cache_locs_cpu(rows, table, start, end, found, 8)
    assert torch.equal(found, slots)
    packed = torch.zeros(5, dtype=torch.int64)
    index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    SPECULATION.fill_accept_out_cache_loc_cpu(index, slots, packed)
    assert packed.tolist() == [11, 13, 21, 0, 0]


@pytest.mark.parametrize("steps", [1, 4])
def test_a_draft_model_has_chains(steps: int) -> None:
    count, lengths = steps + 1, torch.tensor([7, 300])
    mask = torch.ones(2 * count * count, dtype=torch.bool)
    positions = torch.empty(2 * count, dtype=torch.int64)
    index, children, siblings = torch.full((3, 2, count), -1)
    # As SGLang numbers them: each token is the only child of the one before.
    parents, numbers = torch.arange(-1, steps - 1).repeat(2, 1), torch.arange(steps).repeat(2, 1)
    SPECULATION.build_tree_kernel_efficient_cpu(
        parents, numbers, lengths, mask, positions, index, children, siblings, 1, steps, count, 1
    )
    assert children.tolist() == [[*range(1, count), -1]] * 2 and (siblings == -1).all()
    assert mask.view(2, count, count).equal(torch.ones(2, count, count).tril().bool())
    assert positions.tolist() == [*range(7, 7 + count), *range(300, 300 + count)]
    assert index.flatten().tolist() == list(range(2 * count))


def test_drafted_slots_bonus_tokens_and_copies() -> None:
    table = torch.arange(24).view(2, 12).int()
    found = torch.empty(6, dtype=torch.int64)
    SPECULATION.assign_draft_cache_locs_contiguous_cpu(
        torch.tensor([1, 0]), table, torch.tensor([2, 5]), found, 12, 1, 3
    )
    assert found.tolist() == [14, 15, 16, 5, 6, 7]
    bonus = torch.empty(2, dtype=torch.int32)
    SPECULATION.fill_bonus_tokens_cpu(
        torch.tensor([[4, 5, 0], [6, 7, 8]]), torch.tensor([2, 3]), bonus, 3
    )
    assert bonus.tolist() == [5, 8]
    buffers = [torch.arange(8.0).view(4, 2), torch.arange(4)]
    pointers = torch.tensor([x.data_ptr() for x in buffers], dtype=torch.uint64)
    source, target = torch.tensor([0, 1]), torch.tensor([1, 2])
    SPECULATION.copy_all_layer_kv_cache_cpu(pointers, torch.tensor([8, 8]), target, source)
    assert buffers[0].tolist() == [[0, 1], [0, 1], [2, 3], [6, 7]]
    assert buffers[1].tolist() == [0, 0, 1, 3]


def test_the_last_accepted_token_of_each_request() -> None:
    slots = torch.tensor([[50, 51, 52], [16, 17, 18], [33, 34, 35]])
    accepted = torch.tensor([50, 16, 17, 18, 33, 34])
    assert accepted_drafts(slots, accepted).tolist() == [0, 2, 1]


def test_without_speculation_nothing_is_reserved() -> None:
    off = SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=8)
    on = SimpleNamespace(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)
    assert (draft_tokens(off), draft_tokens(on)) == (0, 8)


@pytest.mark.parametrize("name", ["sketch", "quest", "snapkv", "dipr"])
def test_algorithms_with_state_of_requests_are_refused(name: str) -> None:
    config = HiSparseConfig(algorithm=name)
    sim = Simulator()
    setup = SimpleNamespace(
        resolved=SimpleNamespace(config=config),
        algorithm=build_algorithm(config),
        policy=sim.policy,
    )
    if name == "snapkv":
        with pytest.raises(ConfigError, match=f"but algorithm '{name}' keeps state of requests"):
            check_rollback(setup, "NGRAM")
    else:
        check_rollback(setup, "NGRAM")


def test_only_chains_are_kept_and_the_model_reads_the_old_tokens() -> None:
    cases = {
        "two drafts, and two that fill up": ([-1, 0, 1, 0, 0], [5, 6, 0, 0, 0], 3),
        "a draft of token 0 with others after it": ([-1, 0, 1, 2, 0], [5, 0, 7, 0, 0], 4),
        "no draft": ([-1, 0, 0, 0, 0], [5, 0, 0, 0, 0], 1),
        "all drafts": ([-1, 0, 1, 2, 3], [5, 0, 0, 0, 0], 5),
        "a longer and a shorter n-gram": ([-1, 0, 0, 1, 2], [5, 6, 7, 8, 9], 2),
        "a branch at a later draft": ([-1, 0, 1, 1, 2], [5, 6, 7, 8, 9], 3),
    }
    trees = [parents for parents, _, _ in cases.values()]
    tokens = torch.tensor([tokens for _, tokens, _ in cases.values()])
    _, _, children, _ = _links(trees, [4] * len(trees))
    model_input = tokens.flatten()
    drafts = SimpleNamespace(draft_token=model_input, retrieve_next_token=children)
    lengths = keep_chains(drafts)
    assert dict(zip(cases, lengths.tolist(), strict=True)) == {
        k: n for k, (_, _, n) in cases.items()
    }
    compared = drafts.draft_token.view(len(cases), 5)
    for row, given, length in zip(compared.tolist(), tokens.tolist(), lengths, strict=True):
        assert row == given[:length] + [-1] * (5 - length)
    assert torch.equal(model_input, tokens.flatten())
