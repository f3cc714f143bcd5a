"""Which host pages a store may share: those with K and V that dense attention computed."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hisparse.kernels import upload


class ShareablePages:
    """One flag for each host page, written by the forwards that write the page.

    A page is exact if prefill or a dense decode step wrote each of its tokens, and all earlier
    pages of the request were exact at that time. Only exact pages may be shared with servers that
    have other settings. The flags lie on the device: neither a prefill nor a decode step waits for
    them.

    Args:
        num_pages: pages of the host pool.
        page_size: S, tokens.
        num_slots: request slots.
        is_dense: ``seq_lens [B]`` to ``[B] bool``, whether the step that appends the last of these
            tokens attends the whole context.
        device: device of the flags.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        is_dense: Callable[[np.ndarray], np.ndarray],
        device: torch.device,
    ) -> None:
        self._size = page_size
        self._is_dense = is_dense
        self._flags = torch.zeros(num_pages, dtype=torch.bool, device=device)
        #: Index of the page that a slot's sparse steps have marked last; -1: none.
        self._marked = np.full(num_slots, -1)

    def begin(self, slot: int) -> None:
        """Start a request in a slot."""
        self._marked[slot] = -1

    def read(self, pages: Tensor) -> Tensor:
        """The flags of ``pages [P] int64``, ``[P] bool`` on the host."""
        return self._flags[upload(pages, self._flags.device)].cpu()

    def set_exact(self, pages: Tensor) -> None:
        """Flag ``pages [P] int64`` that were filled with exact K and V."""
        self._flags[upload(pages, self._flags.device)] = True

    def write(self, pages: Tensor, flags: Tensor) -> None:
        """Give ``pages [P] int64`` the ``flags [P] bool`` that were read with their K and V."""
        device = self._flags.device
        self._flags[upload(pages, device)] = upload(flags, device)

    def copy(self, source: int, target: int) -> None:
        """Flag a page that got the K and V of another one as that page."""
        self._flags[target] = self._flags[source]

    def prefill(self, start: int, host_pages: Tensor) -> None:
        """Flag the pages that a chunk writes: they are as exact as all tokens before it.

        Args:
            start: position of the chunk's first token.
            host_pages: ``[P] int32``, host pages of the request up to the chunk's end.
        """
        pages = host_pages.long()
        # A page that an earlier chunk or step has begun is among those before.
        before = pages[: -(-start // self._size)]
        self._flags[pages[start // self._size :]] = self._flags[before].all()

    def decode(self, slots: np.ndarray, seq_lens: np.ndarray, host_page_table: Tensor) -> None:
        """Flag the pages of a step's new tokens.

        Most steps only append to pages whose flag stays what it is; the host sees that.

        Args:
            slots: ``[B] int64``, request slots.
            seq_lens: ``[B] int64``, tokens of each request, the new one included.
            host_page_table: ``[B, P] int32``.
        """
        page, offset = np.divmod(seq_lens - 1, self._size)
        dense = self._is_dense(seq_lens)
        begun = offset == 0
        spoiled = ~dense & (self._marked[slots] != page)
        self._marked[slots] = np.where(dense, self._marked[slots], page)
        sparse, begins = np.flatnonzero(spoiled | begun & ~dense), np.flatnonzero(begun & dense)
        if len(sparse):
            row, last = self._upload(sparse, page[sparse])
            self._flags[host_page_table[row, last].long()] = False
        if len(begins):
            row, last = self._upload(begins, page[begins])
            pages = host_page_table[row, : int(page[begins].max()) + 1].long()
            earlier = torch.arange(pages.shape[1], device=pages.device) < last[:, None]
            # Entries after a row's last page belong to no page of the row.
            exact = self._flags[pages.where(earlier, 0)] | ~earlier
            self._flags[pages.gather(1, last[:, None])[:, 0]] = exact.all(1)

    def _upload(self, rows: np.ndarray, pages: np.ndarray) -> Tensor:
        """Both as ``[2, rows] int64`` on the device, in one copy without a wait."""
        return upload(np.stack([rows, pages]), self._flags.device, torch.int64)
