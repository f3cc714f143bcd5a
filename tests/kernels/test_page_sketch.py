"""``page_sketch`` and ``sketch_score``: bytes, what they stand for, and scores against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.errors import KernelError
from hisparse.kernels import SketchLayout, page_sketch, sketch_score
from hisparse.kernels.sketch.layout import SCALE_OFFSET
from hisparse.kernels.sketch.reference import sketch_keys
from tests.kernels.conftest import check_unwritten
from tests.kernels.gpu.on_gpu import ON_GPU

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
SHAPES = {
    "usual": (16, 2, 64, 20),
    "wide": (16, 1, 128, 40),
    "odd": (7, 3, 21, 5),
    "token-pages": (1, 2, 24, 0),
    "long-pages": (40, 1, 32, 10),
    "all-channels": (8, 1, 16, 16),
    "latents": (20, 1, 264, 83),
}


def some_keys(pages: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """As a chunk's keys lie, more columns in between; channels differ in mean and in spread."""
    noise = torch.randn(pages * size, heads, dim + 8) * torch.logspace(-2, 1, dim + 8)
    fused = noise + 3 * torch.randn(heads, dim + 8)
    return fused.to(dtype)[..., :dim].unflatten(0, (pages, size))


def sketched(
    keys: Tensor, channels: int, impl: str, *, scored_by: str | None = None
) -> tuple[Tensor, SketchLayout]:
    """Sketches of ``keys [P, S, Hkv, D]``, in order, as ``scored_by`` reads them."""
    pages, size, heads, dim = keys.shape
    layout = SketchLayout(dim, size, channels, (scored_by or impl) != "cpu")
    sketches = torch.zeros(pages + 1, heads, layout.num_bytes, dtype=torch.uint8)
    # A GPU leaves out page 0, which is padding.
    page_sketch(keys, sketches, torch.arange(1, pages + 1), layout, impl=impl)
    return sketches[1:], layout


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, "fp32") for shape in SHAPES), ("usual", "bf16"), ("odd", "fp16")],
)
def test_bytes_are_the_references(impl: str, shape: str, dtype: str) -> None:
    torch.manual_seed(0)
    size, heads, dim, channels = SHAPES[shape]
    keys = some_keys(6, size, heads, dim, DTYPES[dtype])
    layout = SketchLayout(dim, size, channels, impl != "cpu")
    got, expected = (torch.full((9, heads, layout.num_bytes), 99).byte() for _ in range(2))
    where = 1 + torch.randperm(8)[:6].int()
    where[::4] = -1
    page_sketch(keys, got, where, layout, impl=impl)
    page_sketch(keys, expected, where, layout, impl="reference")
    assert torch.equal(got, expected)
    assert ((got == 99).flatten(1).all(1)).sum() == 5


@pytest.mark.parametrize("shape", SHAPES)
def test_what_gpus_and_cpus_read_stands_for_the_same_keys(shape: str) -> None:
    torch.manual_seed(7)
    size, heads, dim, channels = SHAPES[shape]
    keys = some_keys(4, size, heads, dim, torch.float32)
    of_gpu, of_cpu = (
        sketch_keys(*sketched(keys, channels, "reference", scored_by=x)) for x in (ON_GPU, "cpu")
    )
    assert torch.equal(of_gpu, of_cpu)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_sketch_stands_for(impl: str, shape: str) -> None:
    """Against float64: one value a channel, and in the widest channels four levels."""
    torch.manual_seed(1)
    size, heads, dim, channels = SHAPES[shape]
    keys = some_keys(4, size, heads, dim, torch.float32)
    sketches, layout = sketched(keys, channels, impl)
    got = sketch_keys(sketches, layout).transpose(1, 2).double()
    exact = keys.double()
    span = exact.amax(1) - exact.amin(1)
    widest = span.argsort(dim=-1, descending=True)[..., :channels]
    detailed = torch.zeros_like(span, dtype=torch.bool).scatter_(-1, widest, True)
    base = torch.where(detailed, (exact.amax(1) + exact.amin(1)) / 2, exact.mean(1))
    blocks = torch.nn.functional.pad(base.abs(), (0, -dim % 8)).unflatten(-1, (-1, 8)).amax(-1)
    # Half a step of 8 bits, its scale rounded up by an eighth at most.
    slack = (blocks / 127 * 1.126 / 2 + 1e-6).repeat_interleave(8, dim=-1)[..., :dim]
    plain = (got - base[:, None]).abs().amax(1)
    assert (plain[~detailed] <= slack[~detailed]).all()
    # A quarter of the range is a step at its least, half a step the error.
    worst = (got - exact).abs().amax(1)
    assert (worst <= (span / 2 + slack) / 4 * 1.126 + 1e-5)[detailed].all()


@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "dim", "size", "channels", "pages", "dtype"),
    [
        (1, 14, 2, 64, 16, 20, 70, "fp32"),
        (3, 6, 3, 21, 7, 5, 9, "fp32"),
        (2, 2, 2, 24, 1, 0, 1, "fp32"),
        (2, 8, 1, 128, 40, 40, 19, "fp32"),
        (2, 4, 2, 64, 16, 20, 80, "bf16"),
        (2, 4, 2, 136, 5, 9, 80, "fp16"),
        (2, 4, 2, 24, 1, 0, 80, "bf16"),
        (2, 8, 2, 128, 16, 40, 80, "bf16"),
        (2, 24, 2, 128, 16, 40, 80, "fp16"),
        (2, 6, 2, 256, 16, 80, 80, "bf16"),
        (2, 34, 2, 576, 16, 180, 80, "bf16"),
        (2, 20, 2, 96, 32, 30, 80, "bf16"),
        (1, 4, 1, 128, 32, 40, 40, "bf16"),
        (1, 10, 2, 128, 64, 40, 24, "bf16"),
        # On fibers, which have few multiprocessors, warps score several batches.
        (1, 8, 8, 8, 4, 2, 300, "fp32"),
        # On a GPU they do with so many pages: each warp fills its stages again and again.
        pytest.param(4, 8, 8, 64, 16, 20, 4096, "bf16", marks=NEEDS_GPU),
    ],
)
def test_scores_are_the_log_of_summed_weights(
    impl: str,
    batch: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    size: int,
    channels: int,
    pages: int,
    dtype: str,
) -> None:
    torch.manual_seed(2)
    keys = some_keys(350, size, kv_heads, dim, torch.float32)
    sketches, layout = sketched(keys, channels, "reference", scored_by=impl)
    query, scale = torch.randn(batch, q_heads, 2, dim).to(DTYPES[dtype])[:, :, 1], dim**-0.5
    # The table is a part of a wider one, as the coordinator hands it over.
    table = torch.randint(350, (batch, pages + 3), dtype=torch.int32)[:, :pages]
    num_pages = torch.randint(pages + 1, (batch,), dtype=torch.int32)
    num_pages[0] = pages
    scores, _ = sketch_score(query, sketches, table, num_pages, layout, scale=scale, impl=impl)
    query = scale * query.float()
    own = sketch_keys(sketches, layout)[table.long()].double()
    own = own.repeat_interleave(q_heads // kv_heads, dim=2)
    expected = torch.einsum("bhd,bphsd->bhps", query.double(), own).logsumexp(-1)
    absent = (torch.arange(pages) >= num_pages[:, None])[:, None].expand_as(scores)
    slack = 1e-3 + 1e-4 * expected.abs()
    slack += most_by_rounding(query, sketches, table, layout, impl)
    assert ((scores - expected).abs() <= slack)[~absent].all()
    check_unwritten(impl, scores, absent)


def most_of_detail(
    query: Tensor, sketches: Tensor, table: Tensor, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    """The most that detailed channels add to a score, and a page's largest scale: ``[B, Hq, P]``.

    A code stands for 1.5 scales at most.
    """
    count = layout.num_channels
    codes = sketches[..., layout.channel_scales : layout.channel_scales + count].int()
    scales = ((codes + SCALE_OFFSET) << 20).view(torch.float32)[table.long()].amax(-1)
    scale = scales.repeat_interleave(query.shape[1] // sketches.shape[1], 2).transpose(1, 2)
    return 1.5 * scale * query.abs().topk(count, dim=-1).values.sum(-1, keepdim=True), scale


def most_by_rounding(
    query: Tensor, sketches: Tensor, table: Tensor, layout: SketchLayout, impl: str
) -> Tensor:
    """What a score may be off by where numbers are rounded, ``[B, Hq, P]``.

    C++ rounds a query to 8 bits, and the scales of a page to 42 parts of the power of two above the
    largest. Without AVX-512 these are 255 parts, but their products with queries have 8 bits, which
    is about as much. CUDA rounds products of queries and scales to 11 bits.
    """
    if impl == "reference" or layout.num_channels == 0:
        return torch.zeros(())
    detail, scale = most_of_detail(query, sketches, table, layout)
    if impl != "cpu":
        return 2**-11 * detail
    step = 2.0 ** (scale.log2().floor() + 1) / 42
    query_step = layout.num_channels * query.abs().amax(-1, keepdim=True) / 127
    return step / 2 * (detail / scale + 0.75 * query_step) + 0.75 * query_step * scale


def test_rounding_is_small_beside_the_error_of_a_sketch(impl: str) -> None:
    """Pages are ranked by scores, so these need only be as good as the sketches are."""
    torch.manual_seed(5)
    keys = some_keys(400, 16, 1, 128, torch.float32)
    sketches, layout = sketched(keys, 40, "reference", scored_by=impl)
    query = torch.randn(1, 4, 128) / 128**0.5
    pages = torch.arange(400, dtype=torch.int32)[None]
    scores, _ = sketch_score(query, sketches, pages, torch.tensor([400]).int(), layout, impl=impl)

    def score(of: Tensor) -> Tensor:
        return torch.einsum("bhd,psd->bhps", query, of).logsumexp(-1)

    decoded = sketch_keys(sketches, layout)[:, 0]
    own = (score(keys[:, :, 0]) - score(decoded)).std()
    assert (scores - score(decoded)).std() < 0.2 * own


def test_logits_far_apart_do_not_overflow(impl: str) -> None:
    keys = torch.zeros(1, 4, 1, 8)
    keys[0, :, 0, 0] = torch.tensor([-3000.0, 0.0, 10.0, 3000.0])
    sketches, layout = sketched(keys, 2, impl)
    one = torch.ones(1, dtype=torch.int32)
    query = torch.eye(8)[:1].expand(1, 2, 8) * torch.tensor([[1.0], [-1.0]])
    scores, _ = sketch_score(query, sketches, one[None] * 0, one, layout, impl=impl)
    assert_close(scores, torch.full((1, 2, 1), 2250.0), rtol=0.15, atol=0)


def test_logits_too_large_for_a_sum_have_the_same_codes(impl: str) -> None:
    """In words and in bytes of lanes, and of tokens beyond the first 16."""
    torch.manual_seed(8)
    keys = 100 * torch.randn(3, 20, 1, 96)
    sketches, layout = sketched(keys, 43, "reference", scored_by=impl)
    query, three = torch.randn(1, 2, 96), torch.arange(3, dtype=torch.int32)
    scores, _ = sketch_score(query, sketches, three[None], three[2:] + 1, layout, impl=impl)
    own = sketch_keys(sketches, layout)[:, 0]
    expected = torch.einsum("bhd,psd->bhps", query, own).logsumexp(-1)
    assert expected.min() > 500
    assert_close(scores, expected, rtol=0.02, atol=0)


def test_keys_beyond_the_largest_scale_are_scored_as_if_at_it(impl: str) -> None:
    keys = torch.full((2, 16, 1, 8), 3e5)
    keys[1] = 243_840
    sketches, layout = sketched(keys, 4, impl)
    two = torch.arange(2, dtype=torch.int32)
    scores, _ = sketch_score(
        torch.ones(1, 1, 8), sketches, two[None], two[1:] + 1, layout, impl=impl
    )
    assert_close(scores, torch.full((1, 1, 2), 8 * 243_840.0), rtol=0.01, atol=0)


def test_equal_keys_are_their_base(impl: str) -> None:
    """Nothing varies: a zero page and a constant one, exact up to 8 bits."""
    keys = torch.stack([torch.zeros(16, 1, 32), torch.full((16, 1, 32), 5.0)])
    sketches, layout = sketched(keys, 10, impl)
    got = sketch_keys(sketches, layout)[:, 0]
    assert_close(got, keys[:, :, 0], rtol=0.01, atol=1e-5)


def test_query_heads_share_key_heads_evenly(impl: str) -> None:
    layout = SketchLayout(8, 4, 3, impl != "cpu")
    one = torch.ones(1, dtype=torch.int32)
    sketches = torch.zeros(4, 2, layout.num_bytes).byte()
    with pytest.raises(KernelError, match="sketches: got 2 heads, expected a divisor of the 3"):
        sketch_score(torch.zeros(1, 3, 8), sketches, one[None], one, layout, impl=impl)


def test_a_page_beyond_the_sketches_is_refused_or_left_out(impl: str) -> None:
    """A GPU cannot say so without a wait; it never writes there."""
    layout = SketchLayout(8, 4, 3, impl != "cpu")
    sketches = torch.zeros(5, 1, layout.num_bytes).byte()
    store = partial(page_sketch, torch.ones(1, 4, 1, 8), sketches[:4], torch.tensor([4]), layout)
    if impl != ON_GPU:
        with pytest.raises((KernelError, IndexError)):
            store(impl=impl)
    else:
        store(impl=impl)
    assert not sketches.any()


def test_cuda_refuses_sketches_without_numbers(fibers: str) -> None:
    keys = torch.randn(3, 16, 1, 64)
    sketches, layout = sketched(keys, 20, "reference", scored_by="cpu")
    table, num_pages = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(KernelError, match="without the numbers of their channels.*expected numb"):
        sketch_score(torch.randn(1, 1, 64), sketches, table, num_pages, layout, impl=fibers)


def four_bits(shape: str, keys: Tensor, impl: str = "cpu") -> tuple[Tensor, SketchLayout]:
    """Sketches with four bits of every number."""
    size, heads, dim, _ = SHAPES[shape]
    layout = SketchLayout(dim, size, dim, numbered=False, bits=4)
    sketches = torch.full((len(keys), heads, layout.num_bytes), 99).byte()
    page_sketch(keys, sketches, torch.arange(len(keys)), layout, impl=impl)
    return sketches, layout


@pytest.mark.parametrize("shape", SHAPES)
def test_four_bits_of_every_number(shape: str) -> None:
    """Of C++ the reference's bytes, and each number within half a step of 16 in its range."""
    torch.manual_seed(9)
    size, heads, dim, _ = SHAPES[shape]
    keys = some_keys(6, size, heads, dim, torch.float32)
    sketches, layout = four_bits(shape, keys)
    assert torch.equal(sketches, four_bits(shape, keys, "reference")[0])
    high, low = keys.amax(1), keys.amin(1)
    base = (high + low).abs() / 2
    blocks = torch.nn.functional.pad(base, (0, -dim % 8)).unflatten(-1, (-1, 8)).amax(-1)
    slack = (blocks / 127 * 1.126 / 2 + 1e-6).repeat_interleave(8, dim=-1)[..., :dim]
    worst = (sketch_keys(sketches, layout).transpose(1, 2) - keys).abs().amax(1)
    assert (worst <= ((high - low) / 2 + slack) / 16 * 1.126 + 1e-5).all()


@pytest.mark.parametrize("spread", [1.0, 100.0], ids=["usual", "one-channel-far-above"])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_four_bits_are_as_good_as_these(shape: str, group: int, spread: float) -> None:
    """Queries and scales are rounded to 8 bits, which adds little to the error of the codes."""
    torch.manual_seed(10)
    size, heads, dim, _ = SHAPES[shape]
    keys = torch.randn(200, size, heads, dim)
    keys[..., 0] *= spread
    sketches, layout = four_bits(shape, keys)
    query, pages = torch.randn(2, heads * group, dim), torch.randint(200, (2, 150)).int()
    query[..., 0] /= spread
    num_pages = torch.tensor([150, 77]).int()
    scores, _ = sketch_score(query, sketches, pages, num_pages, layout, scale=dim**-0.5)
    there = (torch.arange(150) < num_pages[:, None])[:, None].expand_as(scores)

    def exact(of: Tensor) -> Tensor:
        own = of[pages.long()].repeat_interleave(group, dim=2).double()
        logits = torch.einsum("bhd,bphsd->bhps", query.double() * dim**-0.5, own)
        return logits.logsumexp(-1)[there]

    decoded = exact(sketch_keys(sketches, layout))
    own = (exact(keys.transpose(1, 2)) - decoded).std()
    assert (scores[there] - decoded).std() < 0.5 * own + 0.003 * decoded.std()


@pytest.mark.parametrize("huge", [1e5, float("inf")])
def test_a_page_of_huge_numbers_adds_nothing_to_others(huge: float) -> None:
    """Pages that are scored together share the largest scale of a channel: only codes are lost."""
    torch.manual_seed(11)
    keys, query = torch.randn(32, 16, 2, 64), 3 * torch.randn(1, 2, 64)
    keys[3, 0, 0, 0] = huge
    pages, others = torch.arange(32, dtype=torch.int32)[None], torch.arange(32) != 3
    sketches, layout = four_bits("usual", keys)
    scores, _ = sketch_score(query, sketches, pages, torch.tensor([32]).int(), layout, scale=0.125)
    logits = 0.125 * torch.einsum("bhd,pshd->bhps", query, keys)[:, :, others]
    assert (scores[:, :, others] - logits.logsumexp(-1)).std() < 3
    assert (scores[:, :, others] - logits.logsumexp(-1)).max() < 1


@pytest.mark.parametrize(("size", "rtol"), [(100, 0.02), (4000, 0.1)], ids=["", "largest-scales"])
def test_logits_of_four_bits_too_large_for_a_sum(size: int, rtol: float) -> None:
    torch.manual_seed(8)
    keys = size * torch.randn(3, 16, 2, 64)
    sketches, layout = four_bits("usual", keys)
    query, three = torch.randn(1, 2, 64), torch.arange(3, dtype=torch.int32)
    scores, _ = sketch_score(query, sketches, three[None], three[2:] + 1, layout)
    own = sketch_keys(sketches, layout)
    expected = torch.einsum("bhd,phsd->bhps", query, own).logsumexp(-1)
    assert expected.min() > 500
    assert_close(scores, expected, rtol=rtol, atol=0)


def test_four_bits_are_for_cpus_and_for_all_channels() -> None:
    for layout in (SketchLayout(8, 4, 8, True, 4), SketchLayout(8, 4, 5, False, 4)):
        with pytest.raises(KernelError, match="got codes of 4 bits, expected 2, or 4 on a CPU"):
            page_sketch(
                torch.zeros(1, 4, 1, 8), torch.zeros(1, 1, 64).byte(), torch.zeros(1).long(), layout
            )
