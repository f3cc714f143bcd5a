"""A session: the cache of one context, which begins with what a store has of it."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.serializer import PageSerializer
from hisparse.config import HiSparseConfig
from hisparse.engine.prefill import PrefillChunk
from hisparse.errors import ConfigError, HiSparseError
from hisparse.storage import FileStore, page_keys
from hisparse.storage.fingerprint import page_namespace
from hisparse.transformers.cache import HiSparseCache
from hisparse.transformers.fingerprint import UnchangedModel
from hisparse.transformers.forward import read_token_ids
from hisparse.transformers.rows import RowStore

#: Bytes that one call reads from the store.
_BLOCK_BYTES = 8 * 2**20


class StoredPages:
    """The pages of a store that the rows of a cache may use, in the format of a server.

    Args:
        rows: owner of the rows; nothing has run on it yet.
        model: checks that the model is still that of ``fingerprint``.
        page_tokens: tokens of a page of the store, a multiple of the rows' page size.
    """

    def __init__(
        self,
        rows: RowStore,
        store: FileStore,
        config: HiSparseConfig,
        fingerprint: str,
        model: UnchangedModel,
        page_tokens: int,
    ) -> None:
        coordinator = rows.coordinator
        self._rows, self._store, self._model = rows, store, model
        self._exact, self._loaded = coordinator.share_pages()
        host, entries = coordinator.manager.host, coordinator.stored_entries()
        self._serializer = PageSerializer(host, page_tokens, entries)
        self.namespace = page_namespace(
            [fingerprint], coordinator.policy, coordinator.algorithm, config, self._serializer
        )
        self.page_tokens = page_tokens
        self._block_rows = max(1, _BLOCK_BYTES // self._serializer.record_bytes)

    def keys(self, token_ids: np.ndarray) -> list[str]:
        """Keys of the whole pages of ``token_ids [n]``."""
        return page_keys(token_ids, self.page_tokens)

    def find(self, keys: Sequence[str]) -> int:
        """Length of the longest prefix of ``keys`` whose pages are stored.

        Raises:
            ConfigError: the model has changed.
        """
        self._model.check()
        return self._store.find(self.namespace, keys)

    def load(self, keys: Sequence[str]) -> np.ndarray:
        """Read pages into a new row, up to the first that is absent or damaged.

        Returns:
            Request slot of the row, ``[1]``; ``[0]`` if there is no page.

        Raises:
            CapacityError: the row does not fit.
        """
        slots = self._rows.open(1, len(keys) * self.page_tokens)
        try:
            count = self._read(keys, self._pages(slots))
            self._rows.shrink(slots, np.array([count * self.page_tokens]), reused=True)
            self._exact.set_exact(self._pages(slots))
            self._represent(slots)
        except BaseException:
            self._rows.close(slots)
            raise
        if not count:
            self._rows.close(slots)
        return slots[:count]

    def save(self, slots: np.ndarray, keys: Sequence[str]) -> int:
        """Store the first pages of a row, ``slots [1]``, up to the first that is not exact.

        Returns:
            Tokens from the first on that the store has now, in whole pages.

        Raises:
            ConfigError: the model has changed.
        """
        self._model.check()
        if not keys:
            return 0
        per_record = self._serializer.pages_per_record
        pages = self._pages(slots)[: len(keys) * per_record]
        exact = self._exact.read(pages).view(len(keys), per_record).all(1).long()
        keys = keys[: int(exact.cumprod(0).sum())]
        known = self._store.find(self.namespace, keys)
        self._wait()
        for first in range(known, len(keys), self._block_rows):
            part = keys[first : first + self._block_rows]
            data = torch.empty(len(part), self._serializer.record_bytes, dtype=torch.uint8)
            self._serializer.read(pages[first * per_record :][: len(part) * per_record], data)
            for key, record in zip(part, data, strict=True):
                self._store.put(self.namespace, key, record.numpy().data)
        return self._store.find(self.namespace, keys) * self.page_tokens

    def save_layers(
        self, layers: Sequence[tuple[Tensor, Tensor]], length: int, keys: Sequence[str]
    ) -> int:
        """Store pages that were computed elsewhere, by way of a row that lasts for the call.

        Args:
            layers: K ``[T, Hkv, D]`` and V ``[T, Hkv, Dv]`` of each layer, model's dtype.
            length: T.
            keys: of the whole pages.

        Returns:
            Tokens from the first on that the store has now, in whole pages.

        Raises:
            CapacityError: the row does not fit.
        """
        slots = self._rows.open(1, length)
        try:
            host_slots = self._rows.host_slots(slots, np.array([0]), np.array([length]))
            for layer, (k, v) in enumerate(layers):
                self._rows.coordinator.manager.kv_io.write(layer, host_slots, k, v)
            self._exact.set_exact(self._pages(slots))
            return self.save(slots, keys)
        finally:
            self._rows.close(slots)

    def _pages(self, slots: np.ndarray) -> Tensor:
        """``[P] int64``, host pages of the row in ``slots [1]``, on the host."""
        count = self._rows.num_pages(self._rows.lengths[slots])
        return self._rows.page_table(slots, int(count[0]))[0].long().cpu()

    def _read(self, keys: Sequence[str], pages: Tensor) -> int:
        """Fill ``pages [P] int64`` with records up to an absent one; returns how many records."""
        per_record, rows = self._serializer.pages_per_record, self._block_rows
        data = torch.empty(min(rows, len(keys)), self._serializer.record_bytes, dtype=torch.uint8)
        self._wait()
        for first in range(0, len(keys), rows):
            part = keys[first : first + rows]
            buffers = [record.numpy().data for record in data[: len(part)]]
            found = self._store.get(self.namespace, part, buffers)
            whole = next((i for i, ok in enumerate(found) if not ok), len(found))
            if whole:
                self._serializer.write(
                    pages[first * per_record :][: whole * per_record], data[:whole]
                )
            if whole < len(part):
                return first + whole
        return len(keys)

    def _represent(self, slots: np.ndarray) -> None:
        """Build the representations of all pages of the row in ``slots [1]``."""
        length = self._rows.lengths[slots]
        table = self._rows.page_table(slots, int(self._rows.num_pages(length)[0]))[0]
        after = PrefillChunk(
            slot=int(slots[0]), start=int(length[0]), length=0, offset=0, host_pages=table
        )
        self._loaded.add(table.long().cpu())
        self._loaded.begin([after])
        for layer in range(self._rows.coordinator.policy.kv.num_layers):
            self._loaded.prepare(layer)

    def _wait(self) -> None:
        """Wait for the kernels that read or write host pages."""
        if self._rows.device.type == "cuda":
            torch.cuda.synchronize(self._rows.device)


class Session:
    """The cache of one context. Free its row with ``with`` or :meth:`close`.

    Args:
        cache: holds the first tokens of the context; the session owns its rows.
        pages: the pages of the store.

    Attributes:
        cache: to pass as ``past_key_values``. It has one row at most: :meth:`HiSparseCache.fork`
            makes more.
    """

    def __init__(self, cache: HiSparseCache, pages: StoredPages) -> None:
        self.cache = cache
        self._pages = pages
        self._updated: tuple[int, Tensor, Tensor, Tensor] | None = None

    def update(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> None:
        """Give the new tokens of a layer, for an engine that runs its own layers.

        Args:
            q: ``[1, Hq, T, D]``, model's dtype, after the rotary embedding.
            k, v: ``[1, Hkv, T, D]``, model's dtype; K after the rotary embedding.
        """
        self._updated = layer_id, q, k, v

    def attention(self, q: Tensor, layer_id: int, sinks: Tensor | None = None) -> Tensor:
        """Attention over the context and the new tokens, which join the cache.

        A call of one token is a decode step: it attends what the algorithm selects. Call each layer
        in order, from 0, :meth:`update` before each.

        Args:
            q: as given to :meth:`update`.
            sinks: ``[Hq]``, any float dtype, the logits of attention sinks, for a model that has
                them.

        Returns:
            ``[1, T, Hq, Dv]`` in the dtype of q.

        Raises:
            HiSparseError: :meth:`update` of the layer did not come before, or a tensor has another
                shape or dtype than the model's.
            CapacityError: the tokens do not fit.
        """
        if self._updated is None or self._updated[0] != layer_id:
            before = "nothing" if self._updated is None else f"layer {self._updated[0]}"
            raise HiSparseError(
                f"attention: got layer {layer_id} after an update of {before}, expected "
                f"update(q, k, v, {layer_id}) before"
            )
        _, queries, k, v = self._updated
        if q.shape != queries.shape:
            raise HiSparseError(
                f"attention: got q {list(q.shape)}, expected {list(queries.shape)} as in update"
            )
        self._updated = None
        policy = self.cache.coordinator.policy
        # A layer that does not exist is the cache's to refuse.
        rule = policy.layer_rules[min(layer_id, policy.kv.num_layers - 1)]
        return self.cache.attend(layer_id, q, k, v, None, rule, sinks)

    def store(self, token_ids: Tensor | Sequence[int]) -> int:
        """Store the cache as a context that later sessions find.

        The store gets whole pages, up to the first token that a sparse decode step has computed.

        Args:
            token_ids: ``[n]``, any integer dtype, the tokens whose K and V the cache holds, padding
                left out. Tokens beyond those of the cache are ignored, such as the last one of
                ``generate``. Only the caller knows that these are the tokens: others would store
                wrong pages.

        Returns:
            Tokens from the first on that the store has now, in whole pages.

        Raises:
            ConfigError: the ids are no vector of tokens, or differ from those that the session
                was created for; the model has changed.
            HiSparseError: the cache has several rows.
        """
        ids, slots, loaded = read_token_ids(token_ids), self.cache.slots, self.cache.token_ids
        if slots.size > 1:
            raise HiSparseError(f"store: got {slots.size} rows, expected the one of a session")
        if loaded is not None:
            _check_beginning(ids, loaded[0].numpy())
        return self._pages.save(slots, self._pages.keys(ids[: sum(self.cache.row_lengths)]))

    def close(self) -> None:
        """Free the row of the cache."""
        self.cache.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_beginning(ids: np.ndarray, loaded: np.ndarray) -> None:
    """Require that ``ids [n]`` begin with the tokens of the pages that were loaded, ``[m]``."""
    length = min(len(ids), len(loaded))
    other = np.flatnonzero(ids[:length] != loaded[:length])
    if other.size:
        at = int(other[0])
        raise ConfigError(
            f"token_ids: got {ids[at]} at position {at}, expected {loaded[at]}, as in "
            "create_session: the cache holds K and V of that token"
        )
