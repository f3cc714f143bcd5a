"""Other indexes beside those of ``dipr``, on a model's own queries and keys: build, query, recall.

``python -m scripts.range_indexes MODEL CONTEXT FILE`` prints JSON; FILE is that of
``scripts.range_recall``, and faiss has to be installed. Each index ranks pages for the same
queries, those of the last 512 tokens over the keys before, on one thread; times are processor time.
An inverted list finds the tokens in range by its bound, and its pages are ranked by the sums of
their weights, untimed. A reduced rank scans projected keys; the projection loses least of the
products with other queries of the same tokens. Both take keys less their mean, which moves all
products with a query alike.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import faiss
import torch
from torch import Tensor

from hisparse.algorithms.sketch import Sketch
from hisparse.doctor import provenance
from hisparse.kernels import HostKeys, SketchLayout, key_score, page_sketch, sketch_score
from scripts.range_recall import ALPHA, LAST, SIZE, STRIDE, found_pages, recorded

#: Layers that are measured, of those of a model; lists, of which some are probed; ranks.
EACH, LISTS, PROBES, RANKS = 3, 256, (16, 32, 64, 128), (16, 32)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """A result and its processor time."""
    start = time.process_time()
    found = run()
    return found, time.process_time() - start


def scan(keys: Tensor) -> Callable[[Tensor], Tensor]:
    """Exact scores of queries times the softmax scale, by ``keys [N, Hkv, D]``."""
    pages = HostKeys(keys.unflatten(0, (-1, SIZE)).transpose(1, 2).contiguous())

    def search(query: Tensor) -> Tensor:
        return key_score(query, pages, *table_of(query, len(keys)), reduce="lse")

    return search


def table_of(query: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Page table and numbers of pages: all queries look at the same keys."""
    count = tokens // SIZE
    table = torch.arange(count, dtype=torch.int32).repeat(len(query), 1)
    return table, torch.full((len(query),), count, dtype=torch.int32)


def sketches(keys: Tensor, bits: int) -> Callable[[Tensor], Tensor]:
    """Scores by sketches."""
    pages, dim = keys.unflatten(0, (-1, SIZE)), keys.shape[-1]
    channels = dim if bits == 4 else round(Sketch.detail * dim)
    layout = SketchLayout(dim, SIZE, channels, numbered=False, bits=bits)
    stored = torch.zeros(*pages.shape[::2], layout.num_bytes, dtype=torch.uint8)
    page_sketch(pages, stored, torch.arange(len(pages)), layout)

    def search(query: Tensor) -> Tensor:
        table = table_of(query, len(keys))
        return sketch_score(query.to(keys.dtype), stored, *table, layout, scale=1.0)[0]

    return search


def centred(keys: Tensor) -> Tensor:
    """Keys less their mean, ``[Hkv, N, D] float32``."""
    return (keys.float() - keys.float().mean(0)).transpose(0, 1).contiguous()


def reduced(keys: Tensor, rank: int, others: Tensor) -> Callable[[Tensor], Tensor]:
    """Scores by projected keys; ``others [T, Hq, D]`` are queries to fit the projection to."""
    heads = centred(keys)
    queries = others.unflatten(1, (len(heads), -1)).transpose(0, 1).flatten(1, 2)
    # Least squares of q.k: principal directions of the keys, in the metric of the queries.
    squares, axes = torch.linalg.eigh(queries.mT @ queries)
    lengths = squares.clamp(min=squares.amax() * 1e-6).sqrt()[..., None]
    metric = lengths * axes.mT
    products = metric @ (heads.mT @ heads) @ metric.mT
    directions = torch.linalg.eigh(products).eigenvectors[..., -rank:]
    search = scan((heads @ (metric.mT @ directions)).transpose(0, 1).to(keys.dtype))
    inverse = axes @ (directions / lengths)

    def projected(query: Tensor) -> Tensor:
        return search((query.unflatten(1, (len(heads), -1)) @ inverse).flatten(1, 2))

    return projected


def lists(keys: Tensor) -> list[faiss.IndexIVFFlat]:
    """An inverted list of each head."""
    found = []
    for head in centred(keys):
        dim = head.shape[-1]
        near = faiss.IndexFlatIP(dim)
        index = faiss.IndexIVFFlat(near, dim, LISTS, faiss.METRIC_INNER_PRODUCT)
        index.train(head.numpy())
        index.add(head.numpy())
        found.append(index)
    return found


def probe(indexes: list[faiss.IndexIVFFlat], query: Tensor, probes: int) -> tuple[Tensor, float]:
    """Scores of pages by tokens in range of the best one found, and the time to find them."""
    # A page in range has a token that weighs a sixteenth of it or more.
    within, spent, count = math.log(SIZE / ALPHA), 0.0, indexes[0].ntotal // SIZE
    grouped = query.unflatten(1, (len(indexes), -1))
    scores = torch.full((*grouped.shape[:3], count), -math.inf)
    for at in torch.cartesian_prod(*map(torch.arange, grouped.shape[:3])).tolist():
        index, one = indexes[at[1]], grouped[tuple(at)][None].numpy()
        index.nprobe = probes
        start = time.process_time()
        best = index.search(one, 1)[0][0, 0]
        _, found, tokens = index.range_search(one, float(best) - within)
        spent += time.process_time() - start
        weights = torch.zeros(count, dtype=torch.float64)
        pages, logits = torch.from_numpy(tokens) // SIZE, torch.from_numpy(found).double()
        scores[tuple(at)] = weights.index_add(0, pages, (logits - best).exp()).log().float()
    return scores.flatten(1, 2), spent


def measured(
    query: Tensor, keys: Tensor, others: Tensor
) -> Iterator[tuple[str, float, float, Tensor]]:
    """Index, time to build it, time of all queries, and scores; the exact ones first."""
    made = {
        "flat": scan,
        "sketch, 4 bits": partial(sketches, bits=4),
        "sketch, 2 bits": partial(sketches, bits=2),
        **{f"reduced rank {rank}": partial(reduced, rank=rank, others=others) for rank in RANKS},
    }
    for name, make in made.items():
        search, build = timed(partial(make, keys))
        scores, spent = timed(partial(search, query))
        yield name, build, spent, scores
    indexes, build = timed(partial(lists, keys))
    for probes in PROBES:
        scores, spent = probe(indexes, query, probes)
        yield f"faiss IVF{LISTS}, {probes} probed", build, spent, scores


def main(name: str, context: int, file: str) -> None:
    """Print the result of a model."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    builds, spents = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    recalls = defaultdict[str, list[Tensor]](list)
    for layer in recorded(name, context, file)["layers"][::EACH]:
        query = layer["q"][::STRIDE].float() * layer["q"].shape[-1] ** -0.5
        others = layer["q"][STRIDE // 2 :: STRIDE].float()
        keys = layer["k"][:-LAST].contiguous()
        exact = None
        for index, build, spent, scores in measured(query, keys, others):
            exact = scores if exact is None else exact
            builds[index].append(build * 8 / keys.shape[1])
            spents[index].append(spent / query.shape[:2].numel() * 1e6)
            recalls[index].append(found_pages(exact, scores)["recall, 1 times as many"])
    rows = {}
    for index, found in recalls.items():
        heads = torch.cat(found)
        rows[index] = {
            "build_s of 8 heads": statistics.median(builds[index]),
            "query_us of a head": statistics.median(spents[index]),
            "recall": {"mean": float(heads.mean()), "least": float(heads.min())},
        }
    about = {"line": f"python -m scripts.range_indexes {name} {context} FILE"}
    about |= provenance.origin() | {"faiss": faiss.__version__, "model": name, "context": context}
    about["instruction_sets"] = provenance.instruction_sets()
    print(json.dumps(about | {"indexes": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
