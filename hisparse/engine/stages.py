"""Pipelines: which layers each rank has, and their shapes."""

from __future__ import annotations

from dataclasses import replace

from hisparse.types import KVSpec

__all__ = ["divide_layers", "spec_of_layers"]


def divide_layers(num_layers: int, num_ranks: int) -> tuple[int, ...]:
    """The layers of each rank as SGLang divides them: the last ranks have the rest, one each."""
    each, rest = divmod(num_layers, num_ranks)
    return tuple(each + (rank >= num_ranks - rest) for rank in range(num_ranks))


def spec_of_layers(spec: KVSpec, first: int, num_layers: int) -> KVSpec:
    """The shapes of ``num_layers`` layers from ``first`` on."""
    windows = spec.windows[first : first + num_layers]
    return replace(spec, num_layers=num_layers, windows=windows if any(windows) else ())
