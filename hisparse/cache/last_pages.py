"""Pages that are resident whatever the row's capacity: those that the row asked for last.

What else a row holds depends on its capacity, and so on who else runs. Attention that is split by
these pages depends on the request alone, and so does its rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.engine.step import DecodeStep
from hisparse.types import Selection

__all__ = ["LastPages", "last_pages_bytes"]

#: Above every page index.
_NONE = torch.iinfo(torch.int32).max


def last_pages_bytes(heads: int, num_pages: int) -> int:
    """What is kept for one request in one layer."""
    return 4 * heads * (num_pages + 1)


class LastPages:
    """Pages of the last difference that was made to each row, until its request's next token.

    They stay: the row has room for them and for a tail page that fills in between, and only colder
    pages make way when the row shrinks.

    Args:
        num_layers: L.
        num_rows: state rows.
        num_pages: K, pages of a difference at most; rows have one device page more, or more.
        device: where it lies.
    """

    def __init__(
        self, num_layers: int, num_rows: int, num_pages: int, device: torch.device
    ) -> None:
        shape = (num_layers, num_rows, num_pages)
        self._pages = torch.full(shape, _NONE, dtype=torch.int32, device=device)
        # Tokens that the request had then: more than one token more makes them unfit. 0: none.
        self._seq_lens = torch.zeros(num_layers, num_rows, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""
        return self._pages.nbytes + self._seq_lens.nbytes

    def forget(self, rows: Tensor) -> None:
        """The rows ``[M] int64`` change hands."""
        self._seq_lens[:, rows] = 0

    def find(self, layer_id: int, selection: Selection, step: DecodeStep) -> Tensor:
        """``[R, K'] bool``, which selected pages are among the last ones."""
        pages = selection.pages.flatten(0, 1).contiguous()
        last = self._pages[layer_id].index_select(0, step.rows)
        since = step.row_seq_lens - self._seq_lens[layer_id].index_select(0, step.rows)
        # One token, or none: what was brought in ahead for this very step.
        known = (since == 0) | (since == 1)
        place = torch.searchsorted(last, pages)
        found = last.gather(1, place.clamp(max=last.shape[1] - 1)) == pages
        return found & known[:, None]

    def remember(self, layer_id: int, selection: Selection, step: DecodeStep, who: Tensor) -> None:
        """A difference was made.

        Args:
            layer_id: layer number.
            selection: its pages; more than K only of rows that are not ``who``.
            step: the step.
            who: ``[R] bool``; of the other rows nothing is remembered.
        """
        width = self._pages.shape[2]
        kept = selection.pages.flatten(0, 1)[:, :width]
        kept = torch.nn.functional.pad(kept, (0, width - kept.shape[1]), value=-1)
        self._pages[layer_id, step.rows] = torch.where(kept < 0, _NONE, kept)
        self._seq_lens[layer_id, step.rows] = torch.where(who, step.row_seq_lens, 0)
