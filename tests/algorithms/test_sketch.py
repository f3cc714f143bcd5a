"""Sketch against Quest on keys with the structure of real ones, and its options."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.kernels import SketchLayout, page_score, page_sketch, page_summary, sketch_score
from hisparse.types import KVSpec
from tests.shapes import LLAMA

DIM, SIZE, PAGES = 64, 16, 256


def structured_keys(seed: int) -> tuple[Tensor, Tensor]:
    """Keys ``[P, S, 1, D]`` and queries ``[n, D]`` as rotary attention makes them.

    Topics change slowly from page to page, half of the channels rotate with the position, some
    are outliers, and each query looks for one token that a few channels tell from its neighbours.
    """
    rng = torch.Generator().manual_seed(seed)
    count = PAGES * SIZE
    position = torch.arange(count)[:, None].double()
    speed = 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2)).double()
    angle = (position * speed).float()
    topic = torch.randn(count // 64, DIM, generator=rng).repeat_interleave(64, dim=0)
    content = topic + 0.7 * torch.randn(count, DIM, generator=rng)
    first, second = content.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    keys = torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
    keys[:, [5, 40]] += torch.tensor([12.0, -9.0])
    wanted = torch.randint(count, (64,), generator=rng)
    return keys.view(PAGES, SIZE, 1, DIM), keys[wanted] + torch.randn(64, DIM, generator=rng)


def mass_of_best(scores: Tensor, exact: Tensor, count: int) -> float:
    """Attention mass of the ``count`` best pages by score, as a fraction of the possible mass."""
    shares = exact.softmax(-1)
    kept = shares.gather(-1, scores.topk(count).indices).sum(-1)
    return float((kept / shares.topk(count).values.sum(-1)).mean())


@pytest.mark.parametrize("seed", range(3), ids=lambda s: f"seed{s}")
def test_better_than_quest_in_fewer_bytes(seed: int) -> None:
    keys, queries = structured_keys(seed)
    table = torch.arange(PAGES, dtype=torch.int32)[None]
    lens = torch.tensor([PAGES], dtype=torch.int32)
    query = queries[None] / math.sqrt(DIM)
    exact = torch.einsum("hd,psd->hps", query[0], keys[:, :, 0]).logsumexp(-1)

    layout = SketchLayout(DIM, SIZE, 20, numbered=False)
    sketches = torch.zeros(PAGES, 1, layout.num_bytes, dtype=torch.uint8)
    page_sketch(keys, sketches, table[0], layout)
    ours = sketch_score(query, sketches, table, lens, layout)[0][0]
    summaries = torch.zeros(PAGES, 1, 2 * DIM, dtype=torch.bfloat16)
    page_summary(keys, summaries[:, None], table[0])
    quests = page_score(query, summaries[:, None], table, lens)[0]

    assert sketches.nbytes < 0.11 * 2 * keys.numel() < summaries.nbytes
    found = torch.corrcoef(torch.stack([x.flatten() for x in (exact, ours, quests)]))[0]
    assert found[1] > 0.98 > found[2]
    kept = [mass_of_best(scores, exact, 12) for scores in (ours, quests)]
    assert kept[0] > 0.95
    assert kept[0] > kept[1] + 0.02


def spec(page_size: int = SIZE, head_dim: int = DIM) -> KVSpec:
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "v_head_dim": head_dim}
    return replace(LLAMA, num_layers=1, page_size=page_size, **heads)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 576])
def test_about_a_tenth_of_the_key_bytes(head_dim: int) -> None:
    kv = spec(head_dim=head_dim)
    key_bytes = kv.page_size * head_dim * kv.dtype.itemsize
    on_gpu, on_cpu = (Sketch().layout(kv, x).num_bytes / key_bytes for x in ("cuda", "cpu"))
    quests = math.prod(Quest(ranges=1).summary_shape(kv)) / kv.num_kv_heads * 2 / key_bytes
    assert 0.08 < on_cpu < 0.09 < on_gpu < 0.11 < quests == 0.125


def test_a_page_of_one_token_has_no_detail() -> None:
    assert Sketch().layout(spec(page_size=1)).num_channels == 0
