"""The example plug-ins of other papers, against plain reckoning by the papers' formulas."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms import ALGORITHMS, entry_bytes
from hisparse.testing import Case, cases_of, run_checks
from tests.sizes import SWEEPS

FOLDER = Path(__file__).parents[2] / "examples" / "hisparse-rivals"
CLASSES = ("PQCache", "ShadowKV", "Twilight", "ArkVale", "ParisKV", "RetroInfer")
PAGES, SIZE, HEADS, DIM, GROUP = 3, 16, 2, 32, 3


@pytest.fixture(scope="module")
def rivals() -> Iterator[Any]:
    """The modules of the plug-in; what they register is forgotten again."""
    names = ("entries", "clusters", *map(str.lower, CLASSES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
        patch.syspath_prepend(FOLDER)
        yield SimpleNamespace(**{x: import_module(f"hisparse_rivals.{x}") for x in names})
        for name in [x for x in sys.modules if x.partition(".")[0] == "hisparse_rivals"]:
            del sys.modules[name]


def class_of(rivals: Any, name: str) -> Any:
    return getattr(getattr(rivals, name.lower()), name)


def keys(*shape: int) -> Tensor:
    """Keys with channels of other ranges and a mean, as real keys have."""
    made = torch.Generator().manual_seed(len(shape))
    spread = torch.rand(shape[-1], generator=made) ** 3 + 0.01
    mean = 4 * torch.randn(shape[-1], generator=made)
    return mean + spread * torch.randn(*shape, generator=made)


def dot(a: Tensor, b: Tensor) -> float:
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def test_numbers_of_few_bits_come_back(rivals: Any) -> None:
    for bits in (1, 2, 4):
        codes = torch.randint(0, 1 << bits, (5, 16))
        packed = rivals.entries.pack(codes, bits)
        assert packed.shape == (5, 2 * bits) and packed.dtype == torch.uint8
        assert torch.equal(rivals.entries.unpack(packed, bits).long(), codes)


def test_arkvale_scores_the_best_corner_of_a_cuboid(rivals: Any) -> None:
    pages, query = keys(PAGES, SIZE, HEADS, DIM), torch.randn(1, HEADS * GROUP, DIM)
    cuboids = rivals.arkvale.make_cuboid(pages)
    scores = rivals.arkvale.largest_product(query, cuboids[None])
    for page, head in ((0, 0), (2, 5)):
        expected = 0.0
        for channel, q in enumerate(query[0, head].tolist()):
            found = pages[page, :, head // GROUP, channel].tolist()
            middle = (max(found) + min(found)) / 2
            radius = sum(abs(k - middle) for k in found) / SIZE
            expected += max(q * (middle + radius), q * (middle - radius))
        assert float(scores[0, head, page]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_shadowkv_scores_the_softmax_of_mean_keys(rivals: Any) -> None:
    pages, query = keys(PAGES, SIZE, HEADS, DIM), torch.randn(1, HEADS * GROUP, DIM)
    landmarks, cosines = rivals.shadowkv.make_landmarks(pages, 2)
    absent = torch.tensor([[False, False, True]])
    scores = rivals.shadowkv.shares(query, landmarks[None], absent)
    for head in (1, 4):
        chunks = [pages[p, c : c + 8, head // GROUP].double() for p in (0, 1) for c in (0, 8)]
        logits = [dot(query[0, head], x.mean(0)) for x in chunks]
        weights = [math.exp(x - max(logits)) for x in logits]
        expected = sum(weights[:2]) / sum(weights)
        assert scores[0, head].tolist() == pytest.approx([expected, 1 - expected, 0], abs=1e-4)
    least = 1.0
    for one in (pages[2, :8, 1], pages[2, 8:, 1]):
        mean = one.mean(0)
        found = [dot(k, mean) / math.sqrt(dot(k, k) * dot(mean, mean)) for k in one]
        least = min(least, *found)
    assert float(cosines[2, 1]) == pytest.approx(least, abs=1e-5)


def test_shadowkv_takes_the_oddest_pages_in_any_case(rivals: Any) -> None:
    cosines = torch.tensor([[[0.9, 0.1, 0.5, -1.0], [0.2, 0.2, 0.3, 0.0]]]).expand(2, 2, 4)
    odd = rivals.shadowkv.oddest(cosines, torch.tensor([3, 1], dtype=torch.int32), 0.5)
    assert odd.tolist() == [
        [[False, True, True, False], [True, True, False, False]],
        [[True, False, False, False]] * 2,
    ]


def test_pariskvs_levels_are_the_published_ones(rivals: Any) -> None:
    """To a hundredth, with 8 channels and 3 bits; of a sign alone, the mean of |u|."""
    published = [0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633]
    assert rivals.pariskv.magnitudes(8, 8).tolist() == pytest.approx(published, rel=0.01)
    directions = torch.randn(200_000, 8)
    mean = (directions[:, 0].abs() / directions.norm(dim=-1)).mean()
    assert float(rivals.pariskv.magnitudes(8, 1)[0]) == pytest.approx(float(mean), abs=3e-3)


@pytest.mark.parametrize(("bits", "block", "most"), [(4, 8, 0.12), (1, 8, 0.75), (1, 32, 0.9)])
def test_pariskv_rounds_directions(rivals: Any, bits: int, block: int, most: float) -> None:
    paris, vectors = rivals.pariskv, torch.randn(50, DIM)
    rotation = paris.random_rotation(DIM)
    assert torch.allclose(rotation @ rotation.mT, torch.eye(DIM), atol=1e-5)
    levels = paris.magnitudes(block, 1 << bits - 1)
    blocks = vectors.unflatten(-1, (-1, block))
    codes, weights = paris.encode(blocks, levels)
    again = paris.decode(codes, weights, levels)
    # A block's product with what it is rounded to is its square: RaBitQ's estimate is unbiased.
    assert torch.allclose((again * blocks).sum(-1), blocks.square().sum(-1), rtol=1e-4)
    assert (again.flatten(1) - vectors).norm() <= most * vectors.norm()
    number, value = int(codes[7, 0, 3]), float(blocks[7, 0, 3])
    share = abs(value) / float(blocks[7, 0].norm())
    nearest = min(range(len(levels)), key=lambda x: abs(float(levels[x]) - share))
    assert (number >> 1, number & 1) == (nearest, value < 0)


def test_twilight_keeps_the_fewest_pages_with_the_share(rivals: Any) -> None:
    scores, rest = 2 * torch.randn(4, 2, 9), torch.randn(4, 2)
    scores[0, 0, 5:] = -torch.inf
    forced = torch.zeros(4, 9, dtype=torch.bool)
    forced[:, 0] = forced[1, 3] = True
    found = rivals.twilight.top_p(scores, rest, forced, 0.8)
    for request in range(4):
        for head in range(2):
            weights = [math.exp(x) for x in scores[request, head].tolist()]
            always = [p for p in range(9) if forced[request, p]]
            attended = math.exp(rest[request, head]) + sum(weights[p] for p in always)
            enough = 0.8 * (math.exp(rest[request, head]) + sum(weights))
            expected = set()
            for page in sorted(set(range(9)) - {*always}, key=lambda p: -weights[p]):
                if attended < enough:
                    expected.add(page)
                    attended += weights[page]
            assert {*found[request, head].nonzero()[:, 0].tolist()} == expected


def test_twilights_keys_have_sixteen_steps(rivals: Any) -> None:
    vectors = keys(40, DIM)
    codes, span = rivals.twilight.encode(vectors)
    assert codes.min() == 0 and codes.max() == 15 and span.dtype == torch.float16
    step = (vectors.amax(-1) - vectors.amin(-1)) / 15
    error = (rivals.twilight.decode(codes, span) - vectors).abs().amax(-1)
    # Half a step, and float16.
    assert (error <= 0.5 * step + 0.01).all()


def clustered(algorithm: Any, vectors: Tensor) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Logits ``[Hkv, G, n]`` of ``vectors [n, Hkv, D]``, what is kept of them, and the queries."""
    policy = Case.of(lambda: algorithm, "kv_head", SIZE).start().sim.policy
    kinds = algorithm.representations(policy)
    kept = {name: torch.zeros(1, 3, *kind.shape, dtype=kind.dtype) for name, kind in kinds.items()}
    parts = [(0, vectors[:20]), (20, vectors[20:])]
    prompt = SimpleNamespace(
        end=len(vectors),
        is_last=True,
        policy=policy,
        representations=kept,
        slot=1,
        context_keys=lambda _: iter(parts),
    )
    algorithm.construct_representations(vectors[:0], vectors[:0], 0, prompt)
    query = torch.randn(1, HEADS, GROUP, DIM)
    step = SimpleNamespace(
        max_pages=len(vectors) // SIZE,
        policy=policy,
        representations=kept,
        slots=torch.tensor([1]),
        num_pages=torch.tensor([len(vectors) // SIZE], dtype=torch.int32),
    )
    return algorithm.logits(query, 0, step)[0].flatten(2), kept, (query[0], step)


def test_pqcache_adds_the_products_of_the_nearest_centroids(rivals: Any) -> None:
    algorithm = rivals.pqcache.PQCache(parts=2, bits=3, tokens=5 * SIZE)
    vectors = keys(4 * SIZE + 5, HEADS, DIM)
    logits, kept, (query, step) = clustered(algorithm, vectors)
    centroids = kept["centroids"][0, 1].float()
    for token, head, group in ((0, 0, 0), (40, 1, 2), (63, 1, 0)):
        expected = 0.0
        for part in range(2):
            channels = slice(part * DIM // 2, (part + 1) * DIM // 2)
            key, q = vectors[token, head, channels], query[head, group, channels]
            of_part = list(centroids[head, part])
            nearest = min(range(8), key=lambda c: float((of_part[c] - key).square().sum()))
            expected += dot(q, of_part[nearest])
        assert float(logits[head, group, token]) == pytest.approx(expected, abs=0.02)
    # A generated page takes the nearest centroids, too.
    page = vectors[7:8] + torch.zeros(1, SIZE, HEADS, DIM)
    algorithm.update_representations(page, 0, torch.tensor([9]), step)
    codes = kept["codes"][0, 1]
    assert (codes[..., 4 * SIZE : 5 * SIZE] == codes[..., 7, None]).all()


def test_kmeans_finds_what_is_apart(rivals: Any) -> None:
    """From evenly spaced keys, both kinds; centroids are the means of their keys."""
    groups = torch.eye(4, DIM) * 30
    vectors = groups[torch.arange(64) % 4] + 0.1 * torch.randn(64, DIM)
    given = vectors[torch.randperm(64)][None, None]
    for algorithm in (rivals.pqcache.PQCache(), rivals.retroinfer.RetroInfer(size=4)):
        centroids, own = algorithm.fit(given, 16)
        for cluster in own.unique().tolist():
            members = given[0, 0][own[0, 0] == cluster]
            assert torch.allclose(centroids[0, 0, cluster], members.mean(0), atol=1e-3)
            assert len({int(x) for x in members.argmax(-1)}) == 1


def test_retroinfer_gives_a_token_its_centroids_logit(rivals: Any) -> None:
    algorithm = rivals.retroinfer.RetroInfer(size=8, tokens=5 * SIZE)
    vectors = keys(4 * SIZE + 5, HEADS, DIM)
    logits, kept, (query, _) = clustered(algorithm, vectors)
    codes = kept["codes"][0, 1, :, 0]
    for token, head, group in ((0, 0, 0), (40, 1, 2)):
        members = (codes[head, : 4 * SIZE] == codes[head, token]).nonzero()[:, 0]
        expected = dot(query[head, group], vectors[members, head].double().mean(0))
        assert float(logits[head, group, token]) == pytest.approx(expected, abs=0.15)


def test_a_request_beyond_what_codes_have_room_for_is_refused(rivals: Any) -> None:
    with pytest.raises(ValueError, match="tokens: got 64, expected the prompt's 69 or more"):
        clustered(rivals.pqcache.PQCache(bits=3, tokens=64), keys(69, HEADS, DIM))


@pytest.mark.parametrize(
    ("name", "options", "page", "request_bytes"),
    [
        ("ArkVale", {}, 4 * 32, 0),
        ("ShadowKV", {}, 2 * 2 * 32 + 2, 0),
        ("ParisKV", {}, 16 * (4 * 32 // 8 + 2 * 4), 0),
        ("ParisKV", {"bits": 1, "block": 64}, 16 * (32 // 8 + 2), 0),
        ("Twilight", {}, 16 * (32 // 2 + 4), 0),
        ("PQCache", {"tokens": 4096}, 0, 2 * 4096 + 2 * 32 * 64),
        ("RetroInfer", {"tokens": 4096}, 0, 4096 + 256 * 2 * 32),
    ],
)
def test_bytes_are_as_the_classes_say(
    rivals: Any, name: str, options: dict[str, Any], page: int, request_bytes: int
) -> None:
    algorithm = class_of(rivals, name)(**options)
    policy = Case.of(lambda: algorithm, "kv_head", SIZE).start().sim.policy
    kinds = algorithm.representations(policy)
    assert entry_bytes(kinds, "page") == HEADS * page
    assert entry_bytes(kinds, "request") == HEADS * request_bytes


@pytest.mark.sweeps
@pytest.mark.parametrize("name", CLASSES if SWEEPS else CLASSES[:3])
def test_contract(rivals: Any, name: str) -> None:
    """In `make test`, one case of what differs in kind."""
    make = class_of(rivals, name)
    cases = cases_of(make) if SWEEPS else [Case.of(make, "kv_head", 8)]
    assert [r for r in run_checks(make, cases) if r.status != "passed"] == []
