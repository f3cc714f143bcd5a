"""The rows of the device tables that a decode step uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hisparse.kernels import DecodeRows
from hisparse.types import KVSpec, Selection

__all__ = ["StepRows"]


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Rows of some requests of a decode step; row ``b * H + h`` belongs to request b, head h.

    Attributes:
        heads: H, rows of each request.
        rows: ``[R] int64``, state row of each row.
        num_pages: ``[B] int32``, full pages of each request: the index of its tail page.
        host_page_table: ``[B, P] int32``.
        capacity: ``[R] int32``, device slots of each row.
        num_real_rows: ``[1] int32``, rows before the padding.
        tail_pages: ``[L, R] int32``, device page of each row's tail.
        tail_lens: ``[R] int32``, tokens in the tail page, the new one included.
    """

    heads: int
    rows: Tensor
    num_pages: Tensor
    host_page_table: Tensor
    capacity: Tensor
    num_real_rows: Tensor
    tail_pages: Tensor
    tail_lens: Tensor

    def of_layer(
        self, layer_id: int, *, dense: Tensor | None = None, malformed: Tensor | None = None
    ) -> DecodeRows:
        """The rows in one layer.

        Args:
            layer_id: layer number.
            dense: ``[B] bool``, requests that attend every page; None: no request does.
            malformed: ``[1] int64``, counter of malformed selections; None: none are counted.
        """
        return DecodeRows(
            self.rows,
            self.capacity,
            self.num_real_rows,
            self.host_page_table,
            self.num_pages,
            self.tail_pages[layer_id],
            self.tail_lens,
            dense,
            malformed,
        )

    def every_page(self, width: int) -> Selection:
        """A selection of every full page, ``width`` entries wide."""
        pages = torch.arange(max(width, 1), dtype=torch.int32, device=self.num_pages.device)
        pages = torch.where(pages < self.num_pages[:, None], pages, -1)
        return Selection(
            pages[:, None].expand(-1, self.heads, -1),
            self.num_pages[:, None].expand(-1, self.heads),
        )

    def window_pages(self, window: int, kv: KVSpec) -> Selection:
        """A selection of the full pages that the last ``window`` tokens of each request touch.

        Its width depends on the window alone, so that steps can be captured.

        Args:
            window: tokens, the new one included.
            kv: shapes of the model.
        """
        size = kv.page_size
        tails = self.tail_lens.view(-1, self.heads)[:, 0]
        first = (self.num_pages * size + tails - window).clamp(min=0) // size
        width = max(1, kv.window_pages(window))
        pages = first[:, None] + torch.arange(width, dtype=torch.int32, device=first.device)
        pages = torch.where(pages < self.num_pages[:, None], pages, -1)
        # Contiguous, for all layers that use them.
        return Selection(
            pages[:, None].repeat(1, self.heads, 1),
            (self.num_pages - first)[:, None].repeat(1, self.heads),
        )

    def take(self, index: Tensor) -> StepRows:
        """The rows of the requests ``index [n] int64``."""
        head = index.new_tensor(range(self.heads))
        rows = (index[:, None] * self.heads + head).flatten()
        return replace(
            self,
            rows=self.rows[rows],
            num_pages=self.num_pages[index],
            host_page_table=self.host_page_table[index],
            capacity=self.capacity[rows],
            num_real_rows=self.num_real_rows.new_full((1,), rows.numel()),
            tail_pages=self.tail_pages[:, rows],
            tail_lens=self.tail_lens[rows],
        )
