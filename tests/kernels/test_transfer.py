"""Moving pages and tokens: bytes, layouts, heads, and that nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import append_tokens, gather_pages, gather_tokens, scatter_tokens
from hisparse.types import PagedKV
from tests.kernels.world import i32

LAYOUTS = {"layer_first": "PSHD", "page_first": "PSHD", "page_head": "PHSD"}
DTYPES = [torch.float32, torch.bfloat16]


def pages(
    layout: str,
    num: int,
    heads: int,
    size: int,
    widths: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    fill: float | None = None,
) -> PagedKV:
    """Random pages, or all ``fill``, as ``[P, H, S, D]`` views; page_first has layers between."""

    def make(width: int) -> Tensor:
        sizes = {"P": num, "H": heads, "S": size, "D": width}
        order = LAYOUTS[layout]
        shape = [sizes[x] for x in order]
        if layout == "page_first":
            shape.insert(1, 3)
        memory = torch.randn(shape).to(dtype) if fill is None else torch.full(shape, fill).to(dtype)
        if layout == "page_first":
            memory = memory[:, 1]
        return memory.permute([order.index(x) for x in "PHSD"])

    return PagedKV(*map(make, widths))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bytes(got: PagedKV, expected: PagedKV) -> None:
    for name, a, b in zip("kv", got, expected, strict=True):
        wrong = (bits(a) != bits(b)).nonzero()
        assert not len(wrong), f"{name} differs first at {wrong[0].tolist()}"


def random_pairs(rows: int, width: int, num_src: int, num_dst: int) -> tuple[Tensor, Tensor]:
    """Unique destinations; a third of the entries is -1 on one side or on both."""
    src = torch.randint(0, num_src, (rows, width), dtype=torch.int32)
    dst = torch.randperm(num_dst)[: rows * width].view(rows, width).int()
    src[torch.rand(rows, width) < 0.2] = -1
    dst[torch.rand(rows, width) < 0.2] = -1
    return src, dst


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("widths", [(64, 64), (24, 8), (5, 3)], ids=["d64", "d24v8", "odd"])
@pytest.mark.parametrize("size", [16, 1, 7], ids=lambda s: f"page{s}")
@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_pages_arrive_and_nothing_else_changes(
    impl: str, layout: str, to: str, size: int, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    src = pages(layout, 40, 3, size, widths, dtype)
    dst = pages(to, 50, 3, size, widths, dtype, fill=torch.nan)
    expected = PagedKV(dst.k.clone(), dst.v.clone())
    src_pages, dst_pages = random_pairs(5, 7, 40, 50)
    for a, b in zip(src_pages.flatten().tolist(), dst_pages.flatten().tolist(), strict=True):
        if a >= 0 and b >= 0:
            expected.k[b], expected.v[b] = src.k[a], src.v[a]
    gather_pages(src, src_pages, dst, dst_pages, impl=impl)
    assert_same_bytes(dst, expected)


@pytest.mark.parametrize(
    ("heads", "src_heads"),
    [(1, 2), (2, 2), (6, 2), (4, 4), (3, 3)],
    ids=["one-row", "kv_head", "query_head", "kv_head4", "kv_head3"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_of_a_head_gets_its_own_head(
    impl: str, layout: str, heads: int, src_heads: int
) -> None:
    torch.manual_seed(heads)
    requests, width = 3, 4
    src = pages(layout, 30, src_heads, 16, (8, 12))
    num_dst = requests * heads * width + 3
    dst = pages("page_head", num_dst, 1, 16, (8, 12), fill=torch.nan)
    expected = PagedKV(dst.k.clone(), dst.v.clone())
    src_pages, dst_pages = random_pairs(requests * heads, width, 30, num_dst)
    for row in range(requests * heads):
        head = (row % heads) * src_heads // heads
        for a, b in zip(src_pages[row].tolist(), dst_pages[row].tolist(), strict=True):
            if a >= 0 and b >= 0:
                expected.k[b, 0], expected.v[b, 0] = src.k[a, head], src.v[a, head]
    gather_pages(src, src_pages, dst, dst_pages, heads=heads, impl=impl)
    assert_same_bytes(dst, expected)


@pytest.mark.parametrize(
    "shape", [(0, 3), (2, 0), (2, 3)], ids=["no-rows", "no-entries", "all-off"]
)
def test_nothing_to_move_is_fine(impl: str, shape: tuple[int, int]) -> None:
    src, dst = pages("layer_first", 4, 2, 4, (8, 8)), pages("page_head", 4, 1, 4, (8, 8), fill=5.0)
    off = torch.full(shape, -1, dtype=torch.int32)
    gather_pages(src, off, dst, off, heads=2, impl=impl)
    assert (dst.k == 5).all()


def test_indices_may_be_strided(impl: str) -> None:
    src = pages("page_head", 9, 2, 4, (8, 8))
    dst = pages("page_head", 9, 2, 4, (8, 8), fill=torch.nan)
    index = i32([[8, 7], [0, 1], [5, 6]]).t()
    gather_pages(src, index, dst, index.flip(0).t().contiguous().t(), impl=impl)
    for a, b in [(8, 7), (0, 1), (5, 6)]:
        assert torch.equal(dst.k[a], src.k[b])
        assert torch.equal(dst.v[b], src.v[a])
    slots = torch.arange(36)[::5]
    k, v = gather_tokens(src, slots, impl=impl)
    scatter_tokens(k + 1, v + 1, src, slots, impl=impl)
    again = gather_tokens(src, slots.contiguous(), impl=impl)
    assert_same_bytes(PagedKV(*again), PagedKV(k + 1, v + 1))


@pytest.mark.parametrize("name", ["src_pages", "dst_pages", "slots"])
def test_indices_out_of_range_are_refused(impl: str, name: str) -> None:
    pool, pair = pages("page_head", 4, 2, 4, (8, 8)), i32([[0, 1]])
    before = PagedKV(pool.k.clone(), pool.v.clone())
    if name == "slots":
        call = partial(gather_tokens, pool, torch.tensor([16]), impl=impl)
    elif name == "src_pages":
        call = partial(gather_pages, pool, i32([[0, 4]]), pool, pair, impl=impl)
    else:
        call = partial(gather_pages, pool, pair, pool, i32([[0, 4]]), impl=impl)
    with pytest.raises((KernelError, IndexError), match=name if impl == "cpu" else None):
        call()
    assert_same_bytes(pool, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [0, 1, 63, 500], ids=lambda n: f"tokens{n}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_go_to_their_slots_and_come_back(
    impl: str, layout: str, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(count)
    pool = pages(layout, 80, 3, 7, (24, 8), dtype, fill=torch.nan)
    expected = PagedKV(pool.k.clone(), pool.v.clone())
    slots = torch.randperm(80 * 7)[:count]
    # Tokens as they come out of a fused projection: rows with a stride.
    fused = torch.randn(count, 3, 32).to(dtype)
    k, v = fused[..., :24], fused[..., 24:]
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, 7)
        expected.k[page, :, offset], expected.v[page, :, offset] = k[token], v[token]
    scatter_tokens(k, v, pool, slots, impl=impl)
    assert_same_bytes(pool, expected)
    back = PagedKV(*gather_tokens(pool, slots, impl=impl))
    assert_same_bytes(back, PagedKV(k, v))


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 4, 8), (10, 1, 4, 8), (10, 2, 2, 8), (1, 10, 2, 4, 8), (10, 8)],
    ids=["pages", "heads", "page size", "layers", "2-d"],
)
def test_values_whose_pages_are_not_those_of_the_keys_are_refused(
    shape: tuple[int, ...],
) -> None:
    """Slots and pages are checked only against K, so V with fewer of them would be overrun."""
    good = PagedKV(*(torch.zeros(10, 2, 4, 8) for _ in "kv"))
    bad = PagedKV(good.k, torch.zeros(shape))
    token, slot, page = torch.zeros(1, 2, 8), torch.tensor([39]), i32([[9]])
    calls: list[tuple[str, Callable[[], object]]] = [
        ("src", lambda: gather_pages(bad, page, good, page)),
        ("dst", lambda: gather_pages(good, page, bad, page)),
        ("src", lambda: gather_tokens(bad, slot)),
        ("dst", lambda: scatter_tokens(token, token, bad, slot)),
        ("host", lambda: append_tokens(token, token, bad, slot, good, slot)),
        ("device", lambda: append_tokens(token, token, good, slot, bad, slot)),
    ]
    for pool, call in calls:
        with pytest.raises(KernelError, match=rf"{pool}\.v: got shape"):
            call()
