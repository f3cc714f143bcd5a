"""Attention mass that ``sketch`` and LOCKS keep at equal bytes, on a model's own queries and keys.

``python -m scripts.mass_kept MODEL`` prints JSON. It needs the plug-in ``examples/hisparse-locks``
on the path. Each method selects pages for the queries of the last 512 tokens of two texts, one
selection per KV head, as a server does with its defaults. Intervals are of the paired differences
of queries, each the mean over layers and heads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hisparse_locks import Summary, approximate_scores, make_summary, sum_of_heads
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hisparse.doctor import provenance
from hisparse.eval.divergence import mean_interval
from hisparse.eval.models import resolve
from hisparse.eval.texts import TEXTS, read_text
from hisparse.kernels import SketchLayout, page_sketch, select, sketch_score
from hisparse.kernels.select.op import SelectRule

CONTEXT, LAST, STRIDE, SIZE = 4096, 512, 8, 16
BUDGETS = (64, 96, 128, 256, 512)
#: Detailed channels of the sketches, and ranks of LOCKS.
CHANNELS, RANKS = (20, 24, 35, 44, 56, 64), (2, 4, 6, 8)
#: Bytes of a page and head, of the two that are compared.
PAIRS = ((180, 198), (200, 198), (256, 298), (300, 298), (360, 398), (400, 398), (400, 498))


def layers(net: Any, tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries ``[T, Hq, D]`` and keys ``[N, Hkv, D]`` of each layer and text, bfloat16."""
    found: list[tuple[Tensor, Tensor]] = []
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def record(module: Any, query: Tensor, key: Tensor, *more: Any, **named: Any) -> Any:
        of_last = query[0, :, -LAST::STRIDE].transpose(0, 1)
        found.append((of_last.bfloat16(), key[0].transpose(0, 1).bfloat16()))
        return usual(module, query, key, *more, **named)

    ALL_ATTENTION_FUNCTIONS.register("record", record)
    net.config._attn_implementation = "record"
    for text in TEXTS:
        ids = tokenizer(read_text(text)).input_ids[:CONTEXT]
        with torch.no_grad():
            net(torch.tensor([ids]), logits_to_keep=1)
        yield from found
        found.clear()


def sketches(queries: Tensor, pages: Tensor, num_pages: Tensor, channels: int) -> Tensor:
    """Scores ``[T, Hq, P]`` by sketches of ``pages [P, S, Hkv, D]``."""
    count, size, heads, dim = pages.shape
    layout = SketchLayout(dim, size, channels, False)
    stored = torch.zeros(count, heads, layout.num_bytes, dtype=torch.uint8)
    page_sketch(pages, stored, torch.arange(count), layout)
    table = torch.arange(count, dtype=torch.int32).repeat(len(queries), 1)
    scale = dim**-0.5
    return sketch_score(queries, stored, table, num_pages, layout, scale=scale, tail=None)[0]


def scores(queries: Tensor, keys: Tensor, num_pages: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """Method, bytes of a page and head, and scores ``[T, Hq, P]``."""
    pages = keys.unflatten(0, (-1, SIZE))
    dim, queries = keys.shape[-1], queries.contiguous()
    for channels in CHANNELS:
        num_bytes = SketchLayout(dim, SIZE, channels, False).num_bytes
        yield "sketch", num_bytes, sketches(queries, pages, num_pages, channels)
    for rank in RANKS:
        stored = make_summary(pages, rank)
        num_bytes = sum(x[0, 0].nbytes for x in stored)
        shared = Summary(*(x.expand(len(queries), *x.shape) for x in stored))
        yield "locks", num_bytes, approximate_scores(queries, shared, dim**-0.5)


def masses(queries: Tensor, keys: Tensor) -> dict[tuple[str, int, int], Tensor]:
    """Mass kept ``[T]``, the mean over heads, by method, bytes and budget."""
    (count, num_heads, dim), kv_heads = queries.shape, keys.shape[1]
    lengths = torch.arange(CONTEXT - LAST + 1, CONTEXT + 1, STRIDE)
    num_pages = (lengths // SIZE).int()
    grouped = queries.float().unflatten(1, (kv_heads, -1))
    logits = torch.einsum("thgd,nhd->thgn", grouped, keys.float()).flatten(1, 2) * dim**-0.5
    token = torch.arange(CONTEXT)
    logits = logits.masked_fill(token >= lengths[:, None, None], -torch.inf)
    in_tail = token >= num_pages[:, None, None] * SIZE
    tail = logits.masked_fill(~in_tail, -torch.inf).logsumexp(-1)
    exact = logits.masked_fill(in_tail, -torch.inf).unflatten(-1, (-1, SIZE)).logsumexp(-1)
    shares = torch.cat([exact, tail[..., None]], -1).softmax(-1)
    page = torch.arange(exact.shape[-1])
    forced = (page == 0) | ((page >= num_pages[:, None] - 2) & (page < num_pages[:, None]))
    found = {}

    def keep(name: str, num_bytes: int, given: Tensor, rest: Tensor | None) -> None:
        for budget in BUDGETS:
            rule = SelectRule(heads=kv_heads, max_pages=budget // SIZE - 1)
            chosen = select(given, num_pages, rule, forced=forced, rest=rest).pages.long()
            kept = torch.zeros(count, kv_heads, exact.shape[-1] + 1)
            kept.scatter_(-1, chosen.masked_fill(chosen < 0, exact.shape[-1]), 1.0)
            kept[..., -1] = 1  # The tail, whose share is the last one.
            kept = kept.repeat_interleave(num_heads // kv_heads, 1)
            found[name, num_bytes, budget] = (shares * kept).sum(-1).mean(1)

    keep("exact", 2 * SIZE * dim, exact, tail)
    absent = forced | (page >= num_pages[:, None])
    for name, num_bytes, given in scores(queries, keys, num_pages):
        keep(name, num_bytes, given, tail)
        if name == "locks":
            keep("locks, its vote", num_bytes, sum_of_heads(given, absent, kv_heads), None)
    return found


def main(name: str) -> None:
    """Print the result of a model."""
    folder = resolve(name)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    parts = [masses(*x) for x in layers(net, AutoTokenizer.from_pretrained(folder))]
    # [T] of the queries of both texts.
    half = len(parts) // len(TEXTS)
    kept = {
        key: np.concatenate(
            [
                torch.stack([part[key] for part in parts[at : at + half]]).mean(0).numpy()
                for at in range(0, len(parts), half)
            ]
        )
        for key in parts[0]
    }
    rows = [
        {"method": method, "bytes": num_bytes, "budget": budget, "mass": round(float(x.mean()), 4)}
        for (method, num_bytes, budget), x in kept.items()
    ]
    pairs = []
    for ours, theirs in PAIRS:
        for method in ("locks", "locks, its vote"):
            for budget in BUDGETS:
                more = kept["sketch", ours, budget] - kept[method, theirs, budget]
                low, high = mean_interval(more)
                pair = {"sketch": ours, "method": method, "bytes": theirs, "budget": budget}
                numbers = {"more": float(more.mean()), "low": low, "high": high}
                pairs.append(pair | {key: round(x, 4) for key, x in numbers.items()})
    about = {"line": f"python -m scripts.mass_kept {name}", **provenance.origin(), "model": name}
    print(json.dumps(about | {"context": CONTEXT, "rows": rows, "pairs": pairs}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
