"""Dense decode attention over contexts that exceed the device pages: tiles from host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.adapters import Attended, add_sinks, merge_attended
from hisparse.cache import Tile
from hisparse.engine.parts import EngineParts
from hisparse.engine.step import DecodePart

__all__ = ["StagedAttention"]


class StagedAttention:
    """Streams host pages through staging and merges the tiles by log-sum-exp.

    Args:
        parts: the parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._kv = parts.policy.kv
        self._rule = parts.policy.attention
        self._manager = parts.manager
        self._adapter = parts.adapter

    def attend(self, layer_id: int, q: Tensor, part: DecodePart, sinks: Tensor | None) -> Tensor:
        """Attend ``q [B, Hq, D]`` over whole contexts -> ``[B, Hq, Dv] float32``.

        ``sinks [Hq]``: see :meth:`SparseCoordinator.attention`.
        """
        out = q.new_empty(*q.shape[:-1], self._kv.v_head_dim, dtype=torch.float32)
        seq_lens = part.view.seq_lens
        # Requests run one by one: the tiles, hence the order of summation, depend on one request.
        attended: Attended | None = None
        tiles = self._tiles(layer_id, part)
        for tile, next_tile in zip(tiles, [*tiles[1:], None], strict=True):
            request = slice(~tile.owner, ~tile.owner + 1)
            lens = seq_lens[request] - tile.first * self._kv.page_size
            new = self._attend_tile(q[request], tile, next_tile, lens)
            attended = new if attended is None else merge_attended(attended, new)
            if next_tile is None or next_tile.owner != tile.owner:
                if sinks is not None:
                    attended = add_sinks(attended, sinks)
                out[request], attended = attended.out, None
        return out

    def _tiles(self, layer_id: int, part: DecodePart) -> list[Tile]:
        """Tiles of all pages of all requests, including tail pages, request by request.

        Their owners are negative: those of chunks in the same forward are request slots.
        """
        size, width = self._kv.page_size, self._manager.staging_pages
        tiles = []
        for request, seq_len in enumerate(part.seq_lens_cpu.tolist()):
            pages = part.rows.host_page_table[request, : -(-seq_len // size)]
            for first in range(0, pages.numel(), width):
                end = min((first + width) * size, seq_len)
                tiles.append(Tile(layer_id, ~request, first, end, pages[first : first + width]))
        return tiles

    def _attend_tile(self, q: Tensor, tile: Tile, next_tile: Tile | None, lens: Tensor) -> Attended:
        """Attend ``q [1, Hq, D]`` over a tile; the context has ``lens [1]`` tokens from it on."""
        kv, count = self._kv, tile.host_pages.numel()
        pages = self._manager.read_prefix(tile, next_tile)
        table = torch.arange(count, dtype=torch.int32, device=q.device)[None]
        lens = lens.clamp(0, count * kv.page_size)
        num_bytes = count * kv.page_size * self._manager.host.format.layer_token_bytes
        self._manager.counters.add("staged_decode_bytes", num_bytes)
        return self._adapter.attend(q, pages, table, lens, self._rule)
