"""From a model, settings and limits to a store of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hisparse.algorithms import build_algorithm
from hisparse.cache import HostKVPool
from hisparse.config import HiSparseConfig
from hisparse.engine.build import Resources, build_engine, make_setup
from hisparse.engine.capabilities import stored_spec
from hisparse.errors import CapacityError, ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.memory.sizing import resize
from hisparse.transformers.rows import RowStore
from hisparse.transformers.model_shape import read_model_shape, text_config
from hisparse.units import format_bytes, resolve_memory

__all__ = ["Limits", "build_store", "read_config"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large a cache may become.

    Attributes:
        max_rows: rows at once.
        max_length: columns of a row, padding included; None: what the model's configuration says.
        max_tokens: host memory, tokens of all rows; None: ``max_rows * max_length``.
    """

    max_rows: int
    max_length: int | None
    max_tokens: int | None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                name = "max_batch_size" if name == "max_rows" else name
                raise ConfigError(f"{name}: got {value}, expected at least 1")


def read_config(
    config: HiSparseConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> HiSparseConfig:
    """The settings from whichever way they were given."""
    if isinstance(config, HiSparseConfig):
        if settings:
            raise ConfigError(
                f"settings: got a HiSparseConfig and also {', '.join(sorted(settings))}, "
                "expected one of the two"
            )
        return config
    return HiSparseConfig.from_dict({**(config or {}), **settings})


def build_store(
    model: Any, config: HiSparseConfig, limits: Limits, device: torch.device | str | None
) -> tuple[RowStore, int]:
    """Allocate host pool and device side, and connect them.

    Returns:
        The store, and the columns that a row may have.

    Raises:
        ConfigError: the model or a setting cannot be used.
        CapacityError: it does not fit into memory.
    """
    algorithm = build_algorithm(config)
    spec, scale = read_model_shape(model, config.page_size)
    spec = stored_spec(config, spec)
    where = torch.device(device or getattr(model, "device", None) or "cpu")
    max_length = _max_length(model, limits)
    row_pages = -(-max_length // spec.page_size)
    num_pages = _num_pages(config, limits, row_pages)
    needed = (num_pages + 1) * spec.page_size
    needed *= spec.token_bytes + algorithm.host_token_bytes(spec)
    host_bytes, device_bytes = _memory(config, needed, where)
    setup = make_setup(
        config,
        algorithm,
        spec,
        scale,
        Resources(
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            context_length=max_length,
            max_requests=limits.max_rows,
            device_type=where.type,
        ),
    )
    if setup.sizing.max_requests < limits.max_rows:
        raise CapacityError(
            f"max_batch_size: got {limits.max_rows}, expected at most {setup.sizing.max_requests}, "
            f"which {format_bytes(device_bytes)} of device memory hold; lower device_buffer_size "
            f"({config.min_row_tokens} tokens) or raise device_memory"
        )
    if setup.sizing.kv_tokens < num_pages * spec.page_size:
        raise CapacityError(
            f"max_tokens: got {num_pages * spec.page_size}, expected at most "
            f"{setup.sizing.kv_tokens}, which {setup.sizing.limit} limits; raise that, or lower "
            "max_batch_size, max_length or max_tokens"
        )
    setup.sizing = resize(setup.sizing, kv_tokens=num_pages * spec.page_size)
    host = HostKVPool(spec, num_pages + 1, setup.layout, pin=where.type == "cuda")
    coordinator = build_engine(setup, host, num_slots=limits.max_rows + 1, device=where)
    store = RowStore(
        coordinator,
        max_rows=limits.max_rows,
        row_pages=row_pages,
        num_pages=num_pages,
        device=where,
    )
    return store, max_length


def _num_pages(config: HiSparseConfig, limits: Limits, row_pages: int) -> int:
    """Host pages for all rows together."""
    if limits.max_tokens is None:
        asked = limits.max_rows * row_pages
    else:
        asked = -(-limits.max_tokens // config.page_size)
    # The least that sizing takes is one row of device_buffer_size.
    return max(asked, config.min_row_tokens // config.page_size)


def _max_length(model: Any, limits: Limits) -> int:
    length = limits.max_length or getattr(text_config(model), "max_position_embeddings", None)
    if length is None:
        raise ConfigError(
            "max_length: got None, but the model's configuration names no max_position_embeddings; "
            "expected a number of tokens"
        )
    return int(length)


def _memory(config: HiSparseConfig, needed: int, device: torch.device) -> tuple[int, int]:
    """Bytes for the host pool, at most what is needed, and for the device side."""
    free = free_host_memory()
    host = resolve_memory(config.host_memory, free, "host_memory")
    host = min(host, needed)
    # Without a GPU the device is simulated by host memory that the pool does not take.
    spare = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free - host
    if config.device_memory is not None:
        spare = min(spare, resolve_memory(config.device_memory, spare, "device_memory"))
    return host, spare
