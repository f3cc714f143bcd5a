"""The sizing formula: no byte is used twice, and the named limit is the one that binds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hisparse.engine.batches import StaticBatch
from hisparse.errors import CapacityError
from hisparse.memory.sizing import DEFAULT_MAX_REQUESTS, Sizing, SizingRequest, resize, size
from hisparse.units import format_bytes

GIB = 1 << 30

#: Llama-3.1-8B, bf16, Quest per KV head: 128 KiB a token, 514 MiB of device pages a request.
LLAMA = SizingRequest(
    kv_token_bytes=32 * 8 * 256 * 2,
    representation_page_bytes=32 * 8 * 256 * 2,
    page_size=16,
    num_layers=32,
    rows_per_request=8,
    device_page_bytes=16 * 256 * 2,
    host_bytes=512 * GIB,
    device_bytes=80 * GIB,
    staging_bytes=64 << 20,
    device_buffer_size=4096,
    max_row_capacity=None,
    context_length=131072,
    max_requests=64,
)


@st.composite
def requests(draw: st.DrawFn) -> SizingRequest:
    page_size = draw(st.sampled_from([1, 4, 16]))
    heads = draw(st.sampled_from([1, 2, 8]))
    num_layers = draw(st.integers(1, 4))
    token = draw(st.sampled_from([8, 64, 512]))
    pages = draw(st.integers(4, 40))
    request = SizingRequest(
        kv_token_bytes=num_layers * heads * token,
        representation_page_bytes=num_layers * draw(st.integers(0, 4 * token)),
        page_size=page_size,
        num_layers=num_layers,
        rows_per_request=heads,
        device_page_bytes=page_size * token,
        host_bytes=0,
        device_bytes=0,
        staging_bytes=draw(st.integers(0, 1 << 16)),
        device_buffer_size=pages * page_size,
        max_row_capacity=draw(
            st.none() | st.integers(pages, 100 * pages).map(lambda n: n * page_size)
        ),
        context_length=draw(st.integers(1, 1 << 16)),
        max_requests=draw(st.none() | st.integers(1, 300)),
        workspace_bytes=tuple(sorted(draw(st.lists(st.integers(0, 1 << 16), max_size=9)))),
        captured=draw(st.booleans()),
        draft_page_bytes=draw(st.just(0) | st.integers(0, 4 * token)),
        mapping_page_bytes=draw(st.just(0) | st.integers(0, token)),
    )
    host = (pages + 1) * page_size * request.kv_token_bytes
    device = request.staging_bytes + request.workspace(1) + request.fixed_bytes(1, pages)
    device += (pages + 1) * request.page_bytes
    return replace(
        request,
        host_bytes=draw(st.integers(host * 7 // 8, host * 2) | st.integers(host, host * 1000)),
        device_bytes=draw(
            st.integers(device * 7 // 8, device * 2) | st.integers(device, device * 1000)
        ),
    )


def size_or_skip(request: SizingRequest) -> Sizing:
    try:
        return size(request)
    except CapacityError as error:
        assert "\n" not in str(error)  # noqa: PT017
        assume(False)
        raise


def check_fits(sizing: Sizing) -> None:
    request = sizing.request
    assert sizing.host_bytes <= request.host_bytes
    assert sizing.device_bytes <= request.device_bytes
    assert sizing.kv_tokens % request.page_size == 0
    assert sizing.kv_tokens >= request.device_buffer_size
    assert sizing.max_row_capacity % request.page_size == 0
    assert sizing.max_row_capacity >= request.device_buffer_size
    assert 1 <= sizing.max_requests <= (request.max_requests or DEFAULT_MAX_REQUESTS)
    least = sizing.max_requests * request.rows_per_request * request.min_row_pages
    most = least // request.min_row_pages * sizing.max_row_capacity // request.page_size
    tail_pages = (sizing.max_requests + 1) * request.rows_per_request
    assert least <= sizing.num_device_pages - tail_pages <= most


@given(requests())
def test_what_is_handed_out_is_there(request: SizingRequest) -> None:
    check_fits(size_or_skip(request))


@given(requests())
def test_limit_is_the_limit(request: SizingRequest) -> None:
    sizing = size_or_skip(request)
    one_more = sizing.kv_tokens + request.page_size
    host = (one_more + request.page_size) * request.kv_token_bytes
    device = (
        request.staging_bytes
        + request.workspace(sizing.max_requests)
        + request.fixed_bytes(sizing.max_requests, sizing.max_row_capacity // request.page_size)
        + (one_more // request.page_size + 1) * request.page_bytes
    )
    if sizing.limit == "host_memory":
        assert host > request.host_bytes
    else:
        assert sizing.limit == "device_memory"
        assert device > request.device_bytes
        assert host <= request.host_bytes


@given(requests(), st.integers(0, 1 << 24))
def test_more_memory_never_means_less(request: SizingRequest, more: int) -> None:
    sizing = size_or_skip(request)
    host = size(replace(request, host_bytes=request.host_bytes + more))
    assert host.max_requests <= sizing.max_requests
    assert host.kv_tokens >= sizing.kv_tokens or host.max_row_capacity > sizing.max_row_capacity
    device = size(replace(request, device_bytes=request.device_bytes + more))
    assert device.max_requests >= sizing.max_requests
    assert (
        device.kv_tokens >= sizing.kv_tokens
        or device.max_requests > sizing.max_requests
        or device.max_row_capacity > sizing.max_row_capacity
    )


@given(requests())
def test_tables_stay_small(request: SizingRequest) -> None:
    sizing = size_or_skip(request)
    row_pages = sizing.max_row_capacity // request.page_size
    tables = (sizing.max_requests + 1) * request.slot_table_bytes * row_pages
    assert tables <= request.device_bytes / 10 or row_pages == request.min_row_pages


@given(requests(), st.data())
def test_resize(request: SizingRequest, data: st.DataObject) -> None:
    sizing = size_or_skip(request)
    tokens = data.draw(st.integers(request.device_buffer_size, sizing.kv_tokens))
    max_requests = data.draw(st.integers(1, sizing.max_requests))
    smaller = resize(sizing, kv_tokens=tokens, max_requests=max_requests)
    check_fits(smaller)
    assert smaller.kv_tokens == tokens // request.page_size * request.page_size
    assert smaller.max_requests == max_requests
    assert smaller.max_row_capacity == sizing.max_row_capacity
    assert (smaller.limit == "max_total_tokens") == (smaller.kv_tokens < sizing.kv_tokens)
    assert resize(sizing).kv_tokens == sizing.kv_tokens


def test_resize_only_lowers() -> None:
    sizing = size(LLAMA)
    with pytest.raises(CapacityError, match=r"max_total_tokens: got 16, expected 4096 "):
        resize(sizing, kv_tokens=16)
    with pytest.raises(CapacityError, match="max_total_tokens: got "):
        resize(sizing, kv_tokens=sizing.kv_tokens + 16)
    with pytest.raises(CapacityError, match="max_running_requests: got 65, expected 1 to 64"):
        resize(sizing, max_requests=65)


def test_host_limits() -> None:
    sizing = size(replace(LLAMA, host_bytes=128 * GIB))
    assert sizing.limit == "host_memory"
    assert sizing.kv_tokens == 128 * GIB // LLAMA.kv_token_bytes - 16
    assert sizing.max_requests == 64
    assert sizing.max_row_capacity == 131072
    assert "limited by host_memory" in sizing.describe()
    assert "\n" not in sizing.describe()


def test_device_limits() -> None:
    sizing = size(replace(LLAMA, device_bytes=16 * GIB))
    assert sizing.limit == "device_memory"
    assert sizing.max_requests < 64
    assert f"max_requests {sizing.max_requests} (of 64)" in sizing.describe()


def test_leftover_becomes_device_pages() -> None:
    alone = size(replace(LLAMA, host_bytes=32 * GIB, max_requests=1))
    tail_pages = 2 * LLAMA.rows_per_request
    assert alone.num_device_pages - tail_pages == LLAMA.rows_per_request * 131072 // 16


@pytest.mark.parametrize("context", [1, 16, 131072, 131073])
def test_what_captured_steps_read_is_charged(context: int) -> None:
    """The term matches to the byte."""
    request = replace(LLAMA, context_length=context, max_requests=5, captured=True)
    sizing, plain = size(request), size(replace(request, captured=False))
    batch = StaticBatch(5, -(-context // 16), 16, torch.device("cpu"))
    allocated = sum(x.nbytes for x in vars(batch).values() if isinstance(x, torch.Tensor))
    assert sizing.device["captured steps"] == allocated
    assert sizing.device_bytes - plain.device_bytes == allocated - LLAMA.pool_page_bytes * (
        plain.num_device_pages - sizing.num_device_pages
    )
    assert f"captured steps {format_bytes(allocated)}" in sizing.describe()
    assert "captured" not in plain.describe()


def test_fewer_requests_get_by_with_a_smaller_workspace() -> None:
    """The workspace is that of the requests that run, not of the requested number."""
    steps = tuple(GIB << power for power in range(9))
    request = replace(LLAMA, max_requests=256, device_bytes=24 * GIB, workspace_bytes=steps)
    sizing = size(request)
    # The workspace of 8, and their rows of 514 MiB; that of 16 leaves 8 GiB, half of it for rows.
    assert (sizing.max_requests, sizing.device["workspace of the adapter"]) == (8, 8 * GIB)
    check_fits(sizing)
    assert "workspace of the adapter 8 GiB" in sizing.describe()
    fewer = resize(sizing, max_requests=3)
    assert fewer.device["workspace of the adapter"] == 4 * GIB
    check_fits(fewer)
    with pytest.raises(CapacityError, match="is left for the adapter's workspace.* another"):
        size(replace(request, device_bytes=GIB))


def test_default_max_requests() -> None:
    tiny = replace(LLAMA, host_bytes=32 * GIB, device_bytes=10_000 * GIB, max_requests=None)
    assert size(tiny).max_requests == DEFAULT_MAX_REQUESTS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host_bytes": GIB // 4}, ["host_memory: got 256 MiB", "514 MiB", "raise host_memory"]),
        ({"staging_bytes": 81 * GIB}, ["left for staging", "needs 81 GiB", "staging_bytes"]),
        ({"device_bytes": 65 << 20}, ["1 MiB is left for tables", "raise device_memory"]),
        ({"device_bytes": 500 << 20}, ["left for row pages", "lower device_buffer_size"]),
        ({"device_bytes": 600 << 20}, ["left for representations", "32.12 MiB"]),
    ],
)
def test_one_request_does_not_fit(change: dict[str, int], words: list[str]) -> None:
    with pytest.raises(CapacityError) as caught:
        size(replace(LLAMA, **change))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
