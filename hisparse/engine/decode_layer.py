"""One layer of a decode step: append the new tokens, attend, finish full tail pages."""

from __future__ import annotations

from torch import Tensor

from hisparse.engine.contract import call
from hisparse.engine.decode import DecodeAttention
from hisparse.engine.extensions.base import overriding
from hisparse.engine.parts import EngineParts
from hisparse.engine.step import DecodeForward, DecodePart, FilledTails
from hisparse.kernels import serial_operators
from hisparse.types import IndexerInputs

__all__ = ["DecodeLayer"]


class DecodeLayer:
    """Runs the layers of decode steps.

    Args:
        parts: the parts of the engine.

    Attributes:
        attention: attends.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.attention = DecodeAttention(parts)
        self._manager = parts.manager
        self._algorithm = parts.algorithm
        self._modes = parts.modes
        self._window = parts.policy.kv.window
        self._storing = overriding("store_pages", parts.extensions)
        self._starting = overriding("before_layer", parts.extensions)

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: DecodeForward,
        indexer: IndexerInputs | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """``q [B, Hq, D]``, ``k, v [B, Hkv, D]`` -> ``[B, Hq, Dv]`` in the dtype of q.

        ``sinks [Hq]``: see :meth:`SparseCoordinator.attention`.
        """
        parts = self._parts_of(layer_id, step)
        if indexer is not None:
            for part in {id(part): part for part in (step.whole, step.last, *parts)}.values():
                part.set_indexer(indexer)
        with serial_operators(q.device):
            self._before_layer(layer_id, step.parts)
            self._manager.append(layer_id, step.tail_slots[layer_id], step.host_slots, k, v)
        out = self.attention.attention(layer_id, q, parts, sinks)
        if step.filled is not None:
            with serial_operators(q.device):
                self._finish(layer_id, step, step.filled)
        return out

    def _parts_of(self, layer_id: int, step: DecodeForward) -> tuple[DecodePart, ...]:
        """The requests by mode in a layer."""
        window = self._window(layer_id)
        if window:
            return step.window_parts[window]
        return step.dense_parts if layer_id in self._modes.dense_layers else step.parts

    def _finish(self, layer_id: int, step: DecodeForward, filled: FilledTails) -> None:
        """Move full tail pages into the LRU, and store their representations."""
        has_entries = not self._window(layer_id)
        tails = self._manager.finish(
            layer_id,
            step.last.rows,
            filled.rows,
            with_values=has_entries and bool(self._storing),
        )
        if not has_entries:
            return
        keys, values = tails[0].transpose(1, 2), tails[-1].transpose(1, 2)
        update = self._algorithm.update_representations
        call(update, layer_id, keys, layer_id, filled.host_pages, step.last.view)
        for extension in self._storing:
            call(extension.store_pages, layer_id, layer_id, keys, values, filled.host_pages)

    def _before_layer(self, layer_id: int, parts: tuple[DecodePart, ...]) -> None:
        for extension in self._starting:
            for part in parts:
                if part.mode == "sparse":
                    call(extension.before_layer, layer_id, layer_id, part)
