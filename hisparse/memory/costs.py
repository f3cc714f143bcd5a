"""What a plan is charged for: what the sizing formula is told of a configuration and a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hisparse.adapters import BackendAdapter
from hisparse.algorithms import BaseSparseAlgorithm, Representation
from hisparse.cache.last_pages import last_pages_bytes
from hisparse.config import HiSparseConfig
from hisparse.engine.modes import attended_tables
from hisparse.engine.representations import entry_bytes, list_representations
from hisparse.engine.step import SelectionPolicy
from hisparse.memory.sizing import SizingRequest
from hisparse.types import KVSpec

__all__ = ["Resources", "kept_representations", "make_sizing_request", "tile_pages"]

#: Powers of two of requests that an adapter is asked about: up to 65,536.
_WORKSPACES = 17


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one rank has, and what it is asked to hold.

    Attributes:
        host_bytes: for the KV pool.
        device_bytes: for all that hisparse keeps on the device.
        context_length: tokens, the longest sequence.
        max_requests: requests at once; None: ``sizing.DEFAULT_MAX_REQUESTS``.
        device_type: "cuda" or "cpu", where the model runs.
    """

    host_bytes: int
    device_bytes: int
    context_length: int
    max_requests: int | None
    device_type: str


def make_sizing_request(
    config: HiSparseConfig,
    algorithm: BaseSparseAlgorithm,
    policy: SelectionPolicy,
    adapter: type[BackendAdapter],
    resources: Resources,
) -> SizingRequest:
    """What a token, a page, a row and all that is allocated once take on one rank.

    Args:
        config: the settings.
        algorithm: what to keep.
        policy: shapes of the model and what selections have to keep to.
        adapter: attends.
        resources: what there is.
    """
    spec = policy.kv
    kept = kept_representations(config, algorithm, policy)
    stored_heads = spec.num_kv_heads if policy.heads == 1 else 1
    staging_bytes = config.staging_bytes or _default_staging_bytes(spec, resources.device_bytes)
    request_bytes = entry_bytes(kept, "request")
    if config.overlap == "attention":
        request_bytes += last_pages_bytes(policy.heads, policy.max_pages)
    request = SizingRequest(
        kv_token_bytes=spec.token_bytes + algorithm.host_token_bytes(spec),
        representation_page_bytes=entry_bytes(kept, "page") * spec.num_layers,
        page_size=spec.page_size,
        num_layers=spec.num_layers,
        rows_per_request=policy.heads,
        device_page_bytes=spec.page_size * stored_heads * spec.head_bytes,
        host_bytes=resources.host_bytes,
        device_bytes=resources.device_bytes,
        staging_bytes=_num_tiles(config) * staging_bytes,
        device_buffer_size=config.device_buffer_size,
        max_row_capacity=config.max_row_capacity,
        context_length=resources.context_length,
        max_requests=resources.max_requests,
        request_state_bytes=request_bytes * spec.num_layers,
        layer_state_bytes=entry_bytes(kept, "layer") * spec.num_layers,
        captured=config.cuda_graph,
    )
    return replace(request, workspace_bytes=_workspace_bytes(config, adapter, policy, request))


def _workspace_bytes(
    config: HiSparseConfig,
    adapter: type[BackendAdapter],
    policy: SelectionPolicy,
    request: SizingRequest,
) -> tuple[int, ...]:
    """What the adapter keeps for steps of up to 1, 2, 4, ... requests."""

    def needed(max_requests: int) -> int:
        tables = attended_tables(
            config,
            policy,
            max_requests=max_requests,
            max_row_pages=request.max_row_pages,
            tile_pages=tile_pages(config, policy.kv, request.staging_bytes),
            context_pages=-(-request.context_length // request.page_size),
        )
        return adapter.workspace_bytes(policy.kv, tables)

    return tuple(needed(1 << power) for power in range(_WORKSPACES))


def kept_representations(
    config: HiSparseConfig, algorithm: BaseSparseAlgorithm, policy: SelectionPolicy
) -> dict[str, Representation]:
    """What is remembered beside K and V."""
    return list_representations(
        algorithm,
        policy,
        tail_estimate=config.tail_estimate,
        speculate=config.speculate == "step",
    )


def tile_pages(config: HiSparseConfig, spec: KVSpec, staging_bytes: int) -> int:
    """Pages that fit a tile, of which all take ``staging_bytes``."""
    tile_bytes = staging_bytes // _num_tiles(config)
    return max(1, tile_bytes // (spec.page_size * spec.staged_token_bytes))


def _num_tiles(config: HiSparseConfig) -> int:
    """Tiles of staging: with two of them one arrives while the other is attended."""
    return 1 if config.overlap is None else 2


def _default_staging_bytes(spec: KVSpec, device_bytes: int) -> int:
    """A tile of 8,192 tokens, or a sixteenth of the device memory where that is less."""
    return min(8192 * spec.staged_token_bytes, device_bytes // 16)
