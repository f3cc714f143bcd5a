"""Memory costs of a configuration and a model: the inputs of the sizing formula."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from hisparse.adapters import BackendAdapter, TableLimits
from hisparse.adapters.base import DeviceLimits
from hisparse.algorithms import Representation, SelectionPolicy, entry_bytes
from hisparse.cache.formats import format_of
from hisparse.config import EXTENSIONS, HiSparseConfig, Resolved
from hisparse.memory.sizing import DEFAULT_MAX_REQUESTS, SizingRequest
from hisparse.types import KVSpec

#: Number of batch sizes for which an adapter states its workspace: powers of two up to 65,536.
_WORKSPACES = 17


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Memory and limits of one rank.

    Attributes:
        host_bytes: host memory for the KV pool.
        device_bytes: device memory for everything that hisparse keeps there.
        context_length: tokens, the longest sequence.
        max_requests: concurrent requests; None: ``sizing.DEFAULT_MAX_REQUESTS``.
        device_type: "cuda" or "cpu", the device of the model.
        captures: whether the front end can capture decode steps in CUDA graphs.
        device: the GPU, whose limits are then checked; None if it is not known.
        node_ranks: ranks of the node, which share one copy of an MLA model's latents.
        chunk_tokens: the most tokens of a prefill; 0: what they take is not charged.
        draft_token_bytes: device memory of one token in a draft model's own pool; 0: there is none.
    """

    host_bytes: int
    device_bytes: int
    context_length: int
    max_requests: int | None
    device_type: str
    captures: bool = True
    device: DeviceLimits | None = None
    node_ranks: int = 1
    chunk_tokens: int = 0
    draft_token_bytes: int = 0


def make_sizing_request(
    resolved: Resolved,
    policy: SelectionPolicy,
    resources: Resources,
    *,
    kept: Mapping[str, Representation],
    adapter: type[BackendAdapter],
    captured_request_bytes: int = 0,
    prefill_choices: int = 0,
) -> SizingRequest:
    """Collect the costs of a token, a page and a row, and fixed costs, on one rank.

    Args:
        kept: tensors of the algorithm and of the extensions.
        captured_request_bytes: the algorithm's intermediates for a request of a captured step.
        prefill_choices: tokens that the algorithm chooses for each token of a prompt; 0: none.
    """
    config, spec, stored = resolved.config, policy.kv, format_of(policy.kv)
    stored_heads = spec.num_kv_heads if policy.heads == 1 else 1
    prefill_tokens = min(resources.chunk_tokens, resources.context_length)
    prefill = prefill_bytes(spec, prefill_tokens, prefill_choices)
    pool_ranks = resources.node_ranks // stored.num_shards(resources.node_ranks)
    # Each rank maps all of a pool that ranks share.
    beside_kv = host_token_bytes(kept, spec)
    mapped_bytes = spec.page_size * (stored.token_bytes + beside_kv)
    pinned = 0
    if config.miss != "transfer" and resources.device_type != "cpu":
        most = resources.max_requests or DEFAULT_MAX_REQUESTS
        pinned = sum(away_bytes(config, policy, most))
    request = SizingRequest(
        kv_token_bytes=-(-stored.token_bytes // pool_ranks) + beside_kv,
        representation_page_bytes=entry_bytes(kept, "page", kv=spec),
        page_size=spec.page_size,
        num_layers=spec.num_layers,
        rows_per_request=policy.heads,
        device_page_bytes=spec.page_size * stored_heads * stored.head_bytes,
        host_bytes=resources.host_bytes - pinned,
        device_bytes=resources.device_bytes,
        staging_bytes=config.staging_bytes or _default_staging_bytes(spec, resources.device_bytes),
        device_buffer_size=resolved.device_buffer_size,
        max_row_capacity=config.max_row_capacity,
        context_length=resources.context_length,
        max_requests=resources.max_requests,
        request_state_bytes=entry_bytes(kept, "request", kv=spec),
        layer_state_bytes=entry_bytes(kept, "layer", kv=spec),
        captured=resolved.captured,
        captured_request_bytes=captured_request_bytes,
        indexed=resources.device_type != "cpu",
        draft_page_bytes=spec.page_size * resources.draft_token_bytes,
        mapping_page_bytes=_mapping_bytes(resources.device_type, mapped_bytes),
    )
    by_power = (1 << power for power in range(_WORKSPACES))
    workspace = partial(_workspace_bytes, request, resolved, policy, adapter)
    return replace(request, workspace_bytes=tuple(prefill + workspace(most) for most in by_power))


def _mapping_bytes(device_type: str, host_bytes: int) -> int:
    """The most device memory that a GPU's page tables take for registered host memory, in bytes.

    An entry of 8 bytes maps 4 KiB: NVIDIA's driver takes larger pages, whatever the host has, only
    if its registry says so (``bAllowSysmemHugePages`` in ``os_desc_mem.c`` and ``mem_mgr.c`` of
    https://github.com/NVIDIA/open-gpu-kernel-modules). The tables are in the GPU's memory:
    https://leimao.github.io/blog/Page-Locked-Host-Memory-Page-Table/
    """
    return -(-host_bytes // 512) if device_type == "cuda" else 0


def _workspace_bytes(
    request: SizingRequest,
    resolved: Resolved,
    policy: SelectionPolicy,
    adapter: type[BackendAdapter],
    max_requests: int,
) -> int:
    """Device memory for decoded pages and the adapter's workspace of ``max_requests``."""
    tables = attended_tables(
        resolved,
        policy,
        max_requests=max_requests,
        max_row_pages=request.max_row_pages,
        tile_pages=tile_pages(policy.kv, request.staging_bytes),
    )
    limits = {"max_requests": max_requests, "context_pages": request.context_pages}
    for name in resolved.config.extensions:
        tables += EXTENSIONS.get(name).attended_tables(policy, **limits)
    decoded = max_requests * format_of(policy.kv).attend_bytes(policy.max_pages)
    away = 0
    if resolved.config.miss != "transfer":
        # What the CPU attended, and both parts merged.
        away = 2 * away_bytes(resolved.config, policy, max_requests).results
    return decoded + away + adapter.workspace_bytes(policy.kv, tables)


class AwayBytes(NamedTuple):
    """Page-locked memory through which a GPU lets the CPU attend, in bytes.

    Attributes:
        queries: in the model's dtype.
        pages: page numbers.
        results: outputs and log-sum-exps, float32.
    """

    queries: int
    pages: int
    results: int


def away_bytes(config: HiSparseConfig, policy: SelectionPolicy, max_requests: int) -> AwayBytes:
    """The memory for one layer of a step of ``max_requests``, and of the padding request."""
    kv, slots = policy.kv, max_requests + 1
    width = max(policy.max_pages, (config.min_sparse_context - 1) // kv.page_size)
    queries = slots * kv.num_q_heads
    return AwayBytes(
        queries * kv.head_dim * kv.dtype.itemsize,
        slots * policy.heads * width * 4,
        queries * (kv.v_head_dim + 1) * 4,
    )


def prefill_bytes(kv: KVSpec, tokens: int, chosen: int = 0) -> int:
    """Device memory for outputs of a prefill while a tile of the prefix is merged, in bytes.

    The merged output in float32, before and after, and the tile's in the model's dtype; their
    log-sum-exps and weights; the tokens that each query attends, as positions and as keys. The
    kernels themselves keep logits in registers.

    Args:
        tokens: tokens of the prefill.
        chosen: tokens that the algorithm chooses for each of them to attend; 0: all before it.
    """
    value_bytes = 4 + 4 + kv.dtype.itemsize
    return tokens * (kv.num_q_heads * (kv.v_head_dim * value_bytes + 5 * 4) + 2 * 4 * chosen)


def host_token_bytes(kept: Mapping[str, Representation], kv: KVSpec) -> int:
    """Host memory for one token beside its K and V, in bytes, all layers.

    Args:
        kept: tensors of the algorithm and of the extensions.
    """
    return -(-entry_bytes(kept, "page", "host", kv) // kv.page_size)


def attended_tables(
    resolved: Resolved,
    policy: SelectionPolicy,
    *,
    max_requests: int,
    max_row_pages: int,
    tile_pages: int,
) -> list[TableLimits]:
    """Page tables that decode steps attend over, without those of extensions.

    Args:
        max_requests: the most requests of a step.
        max_row_pages: the most device pages of a row.
        tile_pages: pages of a staging tile.
    """
    kv, heads = policy.kv, policy.heads
    stored_heads, queries = kv.num_kv_heads if heads == 1 else 1, kv.num_q_heads // heads
    always_dense = resolved.config.min_sparse_context
    widest = max(policy.max_pages, (always_dense - 1) // kv.page_size)
    widest = max(widest, max_row_pages) if resolved.dense_layers else widest
    rows = heads, max_requests * heads
    # One more page: the tail page.
    tables = [TableLimits(*rows, widest + 1, queries, stored_heads, kv.page_size)]
    for window in sorted(set(kv.windows) - {0}):
        width = kv.window_pages(window) + 1
        limits = TableLimits(*rows, width, queries, stored_heads, kv.page_size, window)
        tables.append(limits)
    if resolved.dense_layers or always_dense > resolved.device_buffer_size:
        tile = TableLimits(1, 1, tile_pages, kv.num_q_heads, kv.num_kv_heads, kv.page_size)
        tables.append(tile)
    return tables


def tile_pages(spec: KVSpec, staging_bytes: int) -> int:
    """Pages of a tile of ``staging_bytes``."""
    return max(1, staging_bytes // (spec.page_size * _staged_token_bytes(spec)))


def _default_staging_bytes(spec: KVSpec, device_bytes: int) -> int:
    """A tile of 8,192 tokens, at most a sixteenth of the device memory."""
    return min(8192 * _staged_token_bytes(spec), device_bytes // 16)


def _staged_token_bytes(spec: KVSpec) -> int:
    """Device memory of one token of a staged prefix: as stored and, if that differs, as decoded."""
    stored = format_of(spec)
    return stored.layer_token_bytes + stored.decoded_token_bytes
