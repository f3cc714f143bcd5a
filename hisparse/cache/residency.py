"""Decides how many device pages each running request owns, and applies it between forwards."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.device_pool import DevicePool, PoolSizes
from hisparse.errors import CapacityError
from hisparse.kernels import drop_pages, rebalance, reset_rows, upload, verify_capacity


class RowCapacities:
    """Divides the device pages of a layer among live requests; all layers get the same numbers.

    Each live request gets ``min_pages`` per row. The rest is divided equally among requests that
    need more. Pages that no other request needs stay where they are.

    Args:
        heads: H; each row of a request gets the request's capacity.
        sizes: of the device pages, of rows, and request slots; slot 0 has no live request.

    Attributes:
        min_pages: smallest capacity of a live request.
        live: ``[slots] bool``, slots of the requests that have begun and not ended.
        held: ``[slots]``, device pages that each row of a slot holds as of the last :meth:`fit`.
    """

    def __init__(self, heads: int, sizes: PoolSizes) -> None:
        least, most, num_slots = sizes.min_row_pages, sizes.max_row_pages, sizes.num_slots
        total = sizes.device_pages - num_slots * heads  # Without tail pages.
        if total < (num_slots - 1) * heads * least:
            raise CapacityError(
                f"device pages: got {total} per layer, expected at least max_requests "
                f"({num_slots - 1}) * rows of a request ({heads}) * min_row_pages ({least})"
            )
        if most < least:
            raise CapacityError(
                f"max_row_pages: got {most}, expected at least min_row_pages ({least})"
            )
        self._rows, self._pages = heads, total // heads
        self.min_pages, self._max, self._max_requests = least, most, num_slots - 1
        self.live = np.zeros(num_slots, dtype=bool)
        # The full pages of the context, and the largest need without a new division.
        self.held, self._needs, self._covered = np.zeros((3, num_slots), dtype=np.int64)
        self._changed = False

    @property
    def live_pages(self) -> int:
        """Device pages of one layer that live requests hold; the next forward frees all others."""
        return self._rows * int(self.held[self.live].sum())

    def begin(self, slot: int) -> None:
        """Start a request in a slot; it replaces a request that has not ended."""
        if not self.live[slot] and self.live.sum() == self._max_requests:
            raise CapacityError(
                f"live requests: got {self._max_requests + 1} with request slot {slot}, expected "
                f"at most max_requests ({self._max_requests})"
            )
        self.live[slot], self._needs[slot], self._changed = True, 0, True

    def end(self, slot: int) -> None:
        """End a request; the next :meth:`fit` frees its pages."""
        self.live[slot], self._changed = False, True

    def fit(self, slots: np.ndarray, needs: np.ndarray) -> np.ndarray:
        """Fit capacities to the running requests; called once per forward.

        Args:
            slots: ``[B] int64``, request slots.
            needs: ``[B]``, device pages that their contexts fill.

        Returns:
            the slots whose number in :attr:`held` has changed; those that shrink come first.
        """
        self._needs[slots] = needs = np.minimum(needs, self._max)
        if not self._changed and (needs <= self._covered[slots]).all():
            return slots[:0]
        self._changed = False
        old, self.held = self.held, self._divide()
        # A request that got less than its need waits until the need exceeds its target.
        waits = self._needs > self.held
        self._covered = np.where(waits, _with_headroom(self._needs), self.held)
        return np.concatenate([np.flatnonzero(self.held < old), np.flatnonzero(self.held > old)])

    def _divide(self) -> np.ndarray:
        """The new capacities, ``[slots]``."""
        new = np.where(self.live, self.held, 0)
        held, needs, target = new[self.live], self._needs[self.live], self._targets()
        grows = held < np.minimum(target, needs.clip(min=self.min_pages))
        missing = held.sum() + (target - held)[grows].sum() - self._pages
        # Requests with the largest surplus shrink first.
        surplus = (held - target).clip(min=0)
        order = np.argsort(-surplus, kind="stable")
        before = surplus[order].cumsum() - surplus[order]
        held[order] -= (missing - before).clip(0, surplus[order])
        new[self.live] = np.where(grows, target, held)
        return new

    def _targets(self) -> np.ndarray:
        """Targets of the live requests ``[n]``, in pages: the smallest rise until all are used."""
        needs, held = self._needs[self.live], self.held[self.live]
        wanted, required = _with_headroom(needs), needs.clip(self.min_pages, self._max)
        if required.sum() <= self._pages:
            low, high = required, wanted
        else:  # No request gets more headroom while another one lacks pages.
            low = np.full_like(needs, self.min_pages)
            high = np.where(held >= needs, held.clip(max=wanted), wanted)
        high = high.clip(self.min_pages, self._max)
        level, above = self.min_pages, self._max + 1
        while above - level > 1:
            middle = (level + above) // 2
            if np.clip(middle, low, high).sum() <= self._pages:
                level = middle
            else:
                above = middle
        targets: np.ndarray = np.clip(level, low, high)
        return targets


def _with_headroom(needs: np.ndarray) -> np.ndarray:
    """``needs [n]`` pages and a sixteenth more, rounded up to the next multiple of 16.

    With this headroom a decoding row changes its capacity only once in some hundred tokens.
    """
    wanted: np.ndarray = (needs + needs // 16) // 16 * 16 + 16
    return wanted


class Residency:
    """Applies resets and capacity changes to the device tables.

    Requests come and go at schedule time, while an earlier forward may still be running.
    :meth:`begin`, :meth:`end` and :meth:`replace_pages` therefore only note the change;
    :meth:`start_forward` and :meth:`drop_replaced` apply them on the forward stream.

    Args:
        device: the device pages and the rows' tables.
        capacities: decides the capacity of each row, on the host.
        checked: verify that each row got its capacity; waits for the device.

    Attributes:
        capacities: as given.
    """

    def __init__(
        self, device: DevicePool, capacities: RowCapacities, *, checked: bool = False
    ) -> None:
        self.capacities = capacities
        self._checked = checked
        self._device = device
        self._resets: set[int] = set()
        self._cold: set[int] = set()
        # By request slot, the host pages of the last prefill, and slots where these may be others.
        self._host_pages: dict[int, Tensor] = {}
        self._replaced: set[int] = set()

    def begin(self, slot: int) -> None:
        """Start a request in a slot; the slot's rows still hold pages of an earlier request."""
        self._resets.add(slot)
        self._cold.add(slot)
        self._host_pages.pop(slot, None)
        self.capacities.begin(slot)

    def end(self, slot: int) -> None:
        """End a request; the next forward returns its device pages to the pool."""
        self.capacities.end(slot)
        self._host_pages.pop(slot, None)

    def replace_pages(self, slot: int) -> None:
        """Note that a request may have other host pages for tokens that are already computed."""
        self._replaced.add(slot)

    def keep_pages(self, slot: int, host_pages: Tensor) -> None:
        """Keep the host pages ``[P] int32`` of a prefill, to see later which ones were replaced."""
        self._host_pages[slot] = host_pages

    def drop_replaced(self, slots: np.ndarray, host_pages: Sequence[Tensor] | Tensor) -> None:
        """Drop resident pages whose host page was replaced, so that they are read from the new one.

        Both host pages were computed from the same tokens, but not in the same batch: what a
        request attends must not depend on which of its pages are resident.

        Args:
            slots: ``[B] int64``, request slots of this forward.
            host_pages: for each request ``[P] int32``, the host pages now.
        """
        if not self._replaced:
            return
        for slot, now in zip(slots.tolist(), host_pages, strict=True):
            before = self._host_pages.get(slot)
            if slot in self._replaced and before is not None:
                now = now[: len(before)].clone()
                replaced = before != now
                # We do not read this from the GPU: the read would wait for the previous forward.
                if replaced.is_cuda or bool(replaced.any()):
                    drop_pages(self._state_rows([slot]), replaced, self._device.states)
                    self._host_pages[slot] = now
            self._replaced.discard(slot)

    def is_cold(self, slot: int) -> bool:
        """Whether a request has no resident pages because none of its prefills has ended."""
        return slot in self._cold

    def mark_warm(self, slots: Iterable[int]) -> None:
        """Record that a prefill of these requests has ended."""
        self._cold.difference_update(slots)

    def held(self, slots: np.ndarray) -> np.ndarray:
        """Device pages that each row of the request slots ``[B]`` holds, ``[B]``."""
        pages: np.ndarray = self.capacities.held[slots]
        return pages

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Reset the rows of new requests, and fit capacities to the running requests.

        Args:
            slots: ``[B] int64``, request slots of this forward.
            needs: ``[B]``, full pages of each context after the forward.
        """
        if self._resets:
            rows = self._state_rows(sorted(self._resets))
            reset_rows(rows, self._device.capacity, self._device.states)
            self._resets.clear()
        changed = self.capacities.fit(slots, needs).tolist()
        if changed:
            self._apply(changed)

    def _apply(self, slots: list[int]) -> None:
        """Set the capacities of request slots on the device, one after the other."""
        device, pages = self._device, self.capacities.held[slots]
        rows = self._state_rows(slots)
        new = upload(pages.repeat(device.heads), device.device, torch.int32)
        free_pages, num_free = device.free_pages, device.num_free
        rebalance(rows, new, device.capacity, device.states, free_pages, num_free)
        if self._checked:
            verify_capacity(rows, new, device.capacity, num_free)

    def _state_rows(self, slots: list[int]) -> Tensor:
        """``[len(slots) * H] int64``, the state rows of request slots."""
        heads = self._device.heads
        rows = [slot * heads + head for slot in slots for head in range(heads)]
        return upload(rows, self._device.device, torch.int64)
