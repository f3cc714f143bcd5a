"""Sizes the KV cache: one formula, in whole bytes, for the server and for every tool.

``kv_tokens = min(host / kv_token, (device - staging - workspace - tables - max_requests * row)
/ host_page)``; a host page costs device memory for its representations, for its tokens in the pool
of a draft model, and in a GPU's page tables. The formula also pays for two kinds of padding: page 0
of the host pool, and one request slot beside ``max_requests``. Inputs and intermediates of captured
steps count as tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hisparse.errors import CapacityError
from hisparse.kernels.rows.op import REBALANCE_BYTES
from hisparse.units import format_bytes

#: Default for the number of concurrent requests.
DEFAULT_MAX_REQUESTS = 256

#: The limit that determines ``kv_tokens``.
SizingLimit = Literal["host_memory", "device_memory", "max_total_tokens"]


@dataclass(frozen=True, kw_only=True)
class SizingRequest:
    """Available memory, and the costs of a token, a page and a row, on one rank.

    Attributes:
        kv_token_bytes: host memory of one token, all layers; of a pool that ranks share, this
            rank's part.
        representation_page_bytes: representations of one page, all layers.
        page_size: S, tokens.
        num_layers: L.
        rows_per_request: H of the selection scope.
        device_page_bytes: K and V of one device page: one layer, one row.
        host_bytes: host memory for the KV pool.
        device_bytes: device memory for everything that hisparse keeps there.
        staging_bytes: device memory of the staging tile.
        device_buffer_size: tokens, smallest capacity of a row.
        max_row_capacity: tokens, largest capacity of a row; None: ``context_length``.
        context_length: tokens, the longest sequence.
        max_requests: concurrent requests; None: ``DEFAULT_MAX_REQUESTS``.
        request_state_bytes: representations of one request, all layers.
        layer_state_bytes: representations of the layers themselves, all layers.
        workspace_bytes: the adapter's workspace for steps of up to 1, 2, 4, 8, ... requests; the
            last value holds for all larger steps; empty: no workspace.
        captured: whether decode steps are captured, with static input tensors.
        captured_request_bytes: the algorithm's intermediates for a request of a captured step.
        indexed: whether each row has an index of its pages, as on a GPU.
        draft_page_bytes: device memory of the tokens of one page in a draft model's own pool.
        mapping_page_bytes: device memory of a GPU's page tables for one page of the host pool.
    """

    kv_token_bytes: int
    representation_page_bytes: int
    page_size: int
    num_layers: int
    rows_per_request: int
    device_page_bytes: int
    host_bytes: int
    device_bytes: int
    staging_bytes: int
    device_buffer_size: int
    max_row_capacity: int | None
    context_length: int
    max_requests: int | None
    request_state_bytes: int = 0
    layer_state_bytes: int = 0
    workspace_bytes: tuple[int, ...] = ()
    captured: bool = False
    captured_request_bytes: int = 0
    indexed: bool = False
    draft_page_bytes: int = 0
    mapping_page_bytes: int = 0

    @property
    def context_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.context_length // self.page_size)

    @property
    def min_row_pages(self) -> int:
        """Smallest capacity of a row in device pages, tail page not counted."""
        return self.device_buffer_size // self.page_size

    @property
    def max_row_pages(self) -> int:
        """C as requested."""
        tokens = self.context_length if self.max_row_capacity is None else self.max_row_capacity
        return max(-(-tokens // self.page_size), self.min_row_pages)

    @property
    def slot_table_bytes(self) -> int:
        """LRU tables of one request per page of row capacity: three int32 per device slot."""
        return 12 * self.num_layers * self.rows_per_request

    @property
    def pool_page_bytes(self) -> int:
        """One device page in every layer, and its entry in the free lists."""
        return self.num_layers * (self.device_page_bytes + 4)

    def workspace(self, max_requests: int) -> int:
        """The adapter's workspace for steps of up to ``max_requests``."""
        if not self.workspace_bytes:
            return 0
        index = max(max_requests - 1, 0).bit_length()
        return self.workspace_bytes[min(index, len(self.workspace_bytes) - 1)]

    def usable_bytes(self, max_requests: int) -> int:
        """Device memory minus staging and the adapter's workspace."""
        return self.device_bytes - self.staging_bytes - self.workspace(max_requests)

    @property
    def page_bytes(self) -> int:
        """Device memory of one host page, of all kinds."""
        return self.representation_page_bytes + self.draft_page_bytes + self.mapping_page_bytes

    @property
    def min_pages_bytes(self) -> int:
        """Device memory of the host pages of one minimal request, and of the padding page."""
        return (self.min_row_pages + 1) * self.page_bytes

    def min_device_pages(self, max_requests: int) -> int:
        """Fewest device pages per layer, including tail pages, also of the padding request."""
        pages = self.rows_per_request * (self.min_row_pages + 1)
        return max_requests * pages + self.rows_per_request

    def table_bytes(self, max_requests: int, row_pages: int, device_pages: int) -> int:
        """Tables and request state of ``max_requests`` and of the padding request."""
        slots = max_requests + 1
        rows = slots * self.rows_per_request
        lru = slots * self.slot_table_bytes * row_pages
        index = 4 * rows * self.num_layers * self.context_pages * self.indexed
        page_ids = 4 * self.num_layers * (device_pages + 1)
        # The page tables of a step, and those of the requests' last prefills.
        host_pages = 2 * 4 * slots * self.context_pages
        state = slots * self.request_state_bytes + self.layer_state_bytes
        scratch = max(REBALANCE_BYTES, 8 * self.num_layers * row_pages) * self.indexed
        return lru + index + page_ids + 4 * rows + host_pages + state + scratch

    def captured_bytes(self, max_requests: int) -> int:
        """What captured steps keep, if steps are captured: inputs and intermediates.

        The inputs are a ``StaticBatch``: three int64 and an int32 page table per request, and an
        int32 count.
        """
        each = 3 * 8 + 4 * self.context_pages + self.captured_request_bytes
        return (max_requests * each + 4) * self.captured

    def fixed_bytes(self, max_requests: int, row_pages: int) -> int:
        """The fewest device pages, the tables, and what captured steps keep."""
        pages = self.min_device_pages(max_requests)
        pool = self.num_layers * pages * self.device_page_bytes
        tables = self.table_bytes(max_requests, row_pages, pages)
        return pool + tables + self.captured_bytes(max_requests)


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The division of host and device memory.

    Attributes:
        request: the inputs.
        kv_tokens: capacity of the KV pool, padding page not counted.
        max_requests: concurrent requests.
        max_row_capacity: tokens, ``C * page_size``.
        num_device_pages: N, device pages per layer, including a tail page for each
            row of ``max_requests`` and of the padding request.
        device: device memory by what takes it, in bytes: "tables" are LRU tables, free lists, page
            tables, also a GPU's own, and the state of requests; "representations" are those of all
            host pages.
        limit: the limit that determines ``kv_tokens``.
    """

    request: SizingRequest
    kv_tokens: int
    max_requests: int
    max_row_capacity: int
    num_device_pages: int
    device: Mapping[str, int]
    limit: SizingLimit

    @property
    def host_bytes(self) -> int:
        """Host memory of the KV pool, including the padding page."""
        return (self.kv_tokens + self.request.page_size) * self.request.kv_token_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory of all parts."""
        return sum(self.device.values())

    def describe(self) -> str:
        """One line for the log."""
        requested = self.request.max_requests or DEFAULT_MAX_REQUESTS
        fewer = f" (of {requested})" if self.max_requests < requested else ""
        parts = [f"{term} {format_bytes(size)}" for term, size in self.device.items() if size]
        return (
            f"kv_tokens {self.kv_tokens:,} (limited by {self.limit}), "
            f"max_requests {self.max_requests}{fewer}, "
            f"device pages per row {self.request.device_buffer_size:,} to "
            f"{self.max_row_capacity:,} tokens; host {format_bytes(self.host_bytes)}; "
            f"device {format_bytes(self.device_bytes)}: {', '.join(parts)}"
        )


def size(request: SizingRequest) -> Sizing:
    """Divide host and device memory; ``CapacityError`` if one request does not fit."""
    _check_one_request(request)
    max_requests = _fit_requests(request)
    row_pages = _fit_row_pages(request, max_requests)
    kv_pages = _host_pages(request)
    left = request.usable_bytes(max_requests) - request.fixed_bytes(max_requests, row_pages)
    limit: SizingLimit = "host_memory"
    if left < (kv_pages + 1) * request.page_bytes:
        kv_pages = left // request.page_bytes - 1
        limit = "device_memory"
    return _share_rest(request, max_requests, row_pages, kv_pages, limit)


def resize(
    sizing: Sizing, *, kv_tokens: int | None = None, max_requests: int | None = None
) -> Sizing:
    """Reduce a sizing to fewer tokens or requests; freed memory becomes device pages.

    Args:
        sizing: the largest sizing that fits.
        kv_tokens: tokens that the server uses (``--max-total-tokens``); None: all.
        max_requests: requests that the server runs (``--max-running-requests``); None: all.

    Raises:
        CapacityError: a number is larger than the sizing, or too small for one request.
    """
    request = sizing.request
    limit = sizing.limit
    requests = sizing.max_requests if max_requests is None else max_requests
    if not 1 <= requests <= sizing.max_requests:
        raise CapacityError(
            f"max_running_requests: got {requests}, expected 1 to {sizing.max_requests}"
        )
    tokens = sizing.kv_tokens if kv_tokens is None else kv_tokens
    if not request.device_buffer_size <= tokens <= sizing.kv_tokens:
        raise CapacityError(
            f"max_total_tokens: got {tokens}, expected {request.device_buffer_size} "
            f"(device_buffer_size) to {sizing.kv_tokens} (limited by {limit})"
        )
    kv_pages = tokens // request.page_size
    if kv_pages * request.page_size < sizing.kv_tokens:
        limit = "max_total_tokens"
    row_pages = sizing.max_row_capacity // request.page_size
    return _share_rest(
        replace(request, max_requests=requests), requests, row_pages, kv_pages, limit
    )


def _host_pages(request: SizingRequest) -> int:
    """Host pages for tokens, without the padding page."""
    return request.host_bytes // (request.kv_token_bytes * request.page_size) - 1


def _check_one_request(request: SizingRequest) -> None:
    """Raise ``CapacityError`` if one request of minimal size does not fit, term by term."""
    pages = request.min_row_pages
    host_need = (pages + 1) * request.page_size * request.kv_token_bytes
    if host_need > request.host_bytes:
        raise CapacityError(
            f"host_memory: got {format_bytes(request.host_bytes)}, but one request of "
            f"device_buffer_size ({request.device_buffer_size} tokens) needs "
            f"{format_bytes(host_need)} of KV; raise host_memory or lower device_buffer_size"
        )
    tables = request.table_bytes(1, pages, request.min_device_pages(1))
    captured = request.captured_bytes(1)
    pool = request.fixed_bytes(1, pages) - tables - captured
    terms = (
        ("staging", request.staging_bytes, "lower staging_bytes"),
        ("the adapter's workspace", request.workspace(1), "take another adapter"),
        ("captured steps", captured, 'lower the context length or set "cuda_graph": false'),
        ("tables", tables, "lower device_buffer_size"),
        ("row pages", pool, "lower device_buffer_size"),
        ("representations and page tables", request.min_pages_bytes, "lower device_buffer_size"),
    )
    left = request.device_bytes
    for term, need, remedy in terms:
        if need > left:
            raise CapacityError(
                f"device_memory: got {format_bytes(request.device_bytes)}, of which "
                f"{format_bytes(left)} is left for {term}, but one request needs "
                f"{format_bytes(need)}; raise device_memory or {remedy}"
            )
        left -= need


def _fit_requests(request: SizingRequest) -> int:
    """The requested number of requests, reduced if rows leave too little memory."""
    upper = request.max_requests or DEFAULT_MAX_REQUESTS
    while upper > 1:
        fitting = min(_fit_rows(request, upper), upper)
        # The adapter's workspace grows at powers of two of requests.
        smaller = 1 << (upper - 1).bit_length() - 1
        if fitting > smaller:
            return fitting
        upper = smaller
    return 1


def _fit_rows(request: SizingRequest, max_requests: int) -> int:
    """The most requests that fit, with the workspace for ``max_requests``.

    Rows may use the larger of two limits: half of the device memory, or all of it except the
    costs of the whole host pool's pages and a tenth for larger tables.
    """
    usable = request.usable_bytes(max_requests)
    pages = (_host_pages(request) + 1) * request.page_bytes
    allowed = max(usable // 2, usable - usable // 10 - pages)
    allowed = min(allowed, usable - request.min_pages_bytes)
    # Costs are linear in the number of requests.
    base = request.fixed_bytes(0, request.min_row_pages)
    per_request = request.fixed_bytes(1, request.min_row_pages) - base
    return (allowed - base) // per_request


def _fit_row_pages(request: SizingRequest, max_requests: int) -> int:
    """C as requested, reduced so that LRU tables use at most a tenth of the device memory."""
    min_pages = request.min_row_pages
    page_table_bytes = (max_requests + 1) * request.slot_table_bytes
    usable = request.usable_bytes(max_requests)
    left = usable - request.fixed_bytes(max_requests, min_pages) - request.min_pages_bytes
    spare = min(usable // 10 - min_pages * page_table_bytes, left)
    return min(request.max_row_pages, min_pages + max(0, spare // page_table_bytes))


def _share_rest(
    request: SizingRequest, max_requests: int, row_pages: int, kv_pages: int, limit: SizingLimit
) -> Sizing:
    """Build the sizing; remaining device memory becomes device pages."""
    fixed = request.fixed_bytes(max_requests, row_pages)
    rest = request.usable_bytes(max_requests) - fixed - (kv_pages + 1) * request.page_bytes
    growth = max_requests * request.rows_per_request * (row_pages - request.min_row_pages)
    extra = min(rest // request.pool_page_bytes, growth)
    device_pages = request.min_device_pages(max_requests) + extra
    return Sizing(
        request=request,
        kv_tokens=kv_pages * request.page_size,
        max_requests=max_requests,
        max_row_capacity=row_pages * request.page_size,
        num_device_pages=device_pages,
        device={
            "device pages": request.num_layers * device_pages * request.device_page_bytes,
            "representations": (kv_pages + 1) * request.representation_page_bytes,
            "tables": request.table_bytes(max_requests, row_pages, device_pages)
            + (kv_pages + 1) * request.mapping_page_bytes,
            "staging": request.staging_bytes,
            "captured steps": request.captured_bytes(max_requests),
            "workspace of the adapter": request.workspace(max_requests),
            "the draft model's pool": (kv_pages + 1) * request.draft_page_bytes,
        },
        limit=limit,
    )
