"""Builds the engine and the row store of a cache from a model, its settings and its limits."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hisparse.adapters.base import device_limits
from hisparse.cache import HostKVPool
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.build import EngineSetup, build_engine, choose_selection, resolve
from hisparse.engine.capabilities import row_tokens, stored_spec
from hisparse.errors import CapacityError, ConfigError
from hisparse.memory.costs import Resources, host_token_bytes
from hisparse.memory.host import free_host_memory
from hisparse.memory.sizing import resize
from hisparse.model_config import read_model_shape, text_config
from hisparse.transformers.rows import RowStore
from hisparse.units import format_bytes, resolve_memory


def read_config(
    config: HiSparseConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> HiSparseConfig:
    """Merge the two ways to give settings: as ``config`` or by keyword.

    Raises:
        ConfigError: both a ``HiSparseConfig`` and keywords are given, or a setting is invalid.
    """
    if isinstance(config, HiSparseConfig):
        if settings:
            raise ConfigError(
                f"settings: got a HiSparseConfig and also {', '.join(sorted(settings))}, "
                "expected one of the two"
            )
        return config
    return HiSparseConfig.from_dict({**(config or {}), **settings})


def build_store(
    model: Any,
    config: HiSparseConfig,
    max_rows: int,
    max_length: int | None,
    max_tokens: int | None,
    device: torch.device | str | None,
) -> tuple[RowStore, int]:
    """Allocate the host pool and build the engine on it; arguments as of :class:`HiSparseCache`.

    Returns:
        The row store, and the maximum number of columns per row.

    Raises:
        ConfigError: the model or a setting is not supported.
        CapacityError: the sizes do not fit into memory.
    """
    sizes = {"max_batch_size": max_rows, "max_length": max_length, "max_tokens": max_tokens}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}: got {value}, expected at least 1")
    device = torch.device(device or getattr(model, "device", None) or "cpu")
    max_length = max_length or _longest(model)
    spec, scale = read_model_shape(model, config.page_size, max_length)
    spec = stored_spec(config, spec)
    row_pages = -(-max_length // spec.page_size)
    tokens = max_rows * row_pages * spec.page_size if max_tokens is None else max_tokens
    # Sizing requires room for at least one row of device_buffer_size tokens.
    num_pages = -(-max(tokens, row_tokens(config, spec)) // spec.page_size)
    needed = (num_pages + 1) * spec.page_size
    _, _, kept = choose_selection(config, spec, scale, device.type)
    needed *= format_of(spec).token_bytes + host_token_bytes(kept, spec)
    host_bytes, device_bytes = _memory(config, needed, device)
    setup = resolve(
        config,
        spec,
        scale,
        Resources(
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            context_length=max_length,
            max_requests=max_rows,
            device_type=device.type,
            captures=False,  # `generate` captures no steps.
            device=device_limits(device.type),
        ),
    )
    _check_sizes(setup, max_rows, num_pages)
    kv_tokens = num_pages * spec.page_size
    setup = replace(setup, sizing=resize(setup.sizing, kv_tokens=kv_tokens))
    pinned = device.type == "cuda"
    with torch.cuda.device(device) if pinned else contextlib.nullcontext():
        host = HostKVPool(spec, num_pages + 1, setup.resolved.layout, pin=pinned)
    coordinator = build_engine(setup, host, device=device)
    shape = {"max_rows": max_rows, "row_pages": row_pages, "num_pages": num_pages}
    return RowStore(coordinator, **shape, device=device), max_length


def _check_sizes(setup: EngineSetup, max_rows: int, num_pages: int) -> None:
    """Raise ``CapacityError`` if memory holds fewer rows or tokens than requested."""
    sizing, kv_tokens = setup.sizing, num_pages * setup.spec.page_size
    if sizing.max_requests < max_rows:
        raise CapacityError(
            f"max_batch_size: got {max_rows}, expected at most {sizing.max_requests} rows "
            f"in {format_bytes(sizing.request.device_bytes)} of device memory; lower "
            f"device_buffer_size ({setup.resolved.device_buffer_size} tokens) or raise "
            "device_memory"
        )
    if sizing.kv_tokens < kv_tokens:
        raise CapacityError(
            f"max_tokens: got {kv_tokens}, expected at most {sizing.kv_tokens}, which "
            f"{sizing.limit} limits; raise {sizing.limit}, or lower max_batch_size, max_length or "
            "max_tokens"
        )


def _longest(model: Any) -> int:
    length: int | None = getattr(text_config(model), "max_position_embeddings", None)
    if length is None:
        raise ConfigError(
            "max_length: got None and a model configuration without max_position_embeddings, "
            "expected a number of tokens"
        )
    return length


def _memory(config: HiSparseConfig, needed: int, device: torch.device) -> tuple[int, int]:
    """Bytes of host memory for the pool, at most ``needed``, and bytes of device memory."""
    free = free_host_memory()
    host = min(resolve_memory(config.host_memory, free, "host_memory"), needed)
    # Without a GPU, host memory that the pool leaves free stands in for device memory.
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free - host
    if config.device_memory is not None:
        on_device = min(on_device, resolve_memory(config.device_memory, on_device, "device_memory"))
    return host, on_device
