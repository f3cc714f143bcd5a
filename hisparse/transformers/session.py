"""A session: the cache of one context, which begins with what a store has of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hisparse.errors import ConfigError, HiSparseError
from hisparse.storage import Context, Contexts
from hisparse.transformers.cache import HiSparseCache
from hisparse.transformers.check_inputs import read_token_ids
from hisparse.transformers.stored_pages import StoredPages


class Session:
    """The cache of one context. Free its row with ``with`` or :meth:`close`.

    Args:
        cache: holds the first tokens of the context; the session owns its rows.
        pages: the pages of the store.
        contexts: the contexts of the store.

    Attributes:
        cache: to pass as ``past_key_values``. It has one row at most: :meth:`HiSparseCache.fork`
            makes more.
    """

    def __init__(self, cache: HiSparseCache, pages: StoredPages, contexts: Contexts) -> None:
        self.cache = cache
        self._pages = pages
        self._contexts = contexts
        self._updated: tuple[int, Tensor, Tensor, Tensor] | None = None

    def update(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int) -> None:
        """Give the new tokens of a layer, for an engine that runs its own layers.

        Args:
            q: ``[1, Hq, T, D]``, after the rotary embedding.
            k, v: ``[1, Hkv, T, D]``; K after the rotary embedding.
            layer_id: layer number.
        """
        self._updated = layer_id, q, k, v

    def attention(self, q: Tensor, layer_id: int, sinks: Tensor | None = None) -> Tensor:
        """Attention over the context and the new tokens, which join the cache.

        A call of one token is a decode step: it attends what the algorithm selects. Call each layer
        in order, from 0, :meth:`update` before each.

        Args:
            q: as given to :meth:`update`.
            layer_id: layer number.
            sinks: ``[Hq]``, the logits of attention sinks, for a model that has them.

        Returns:
            ``[1, T, Hq, D]``.

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
        rule = policy.rules[min(layer_id, policy.kv.num_layers - 1)]
        return self.cache.attend(layer_id, q, k, v, None, rule, sinks)

    def store(
        self, token_ids: Tensor | Sequence[int], attributes: Mapping[str, Any] | None = None
    ) -> Context | None:
        """Store the cache as a context that later sessions find.

        The store gets whole pages, up to the first token that a sparse decode step has computed.

        Args:
            token_ids: ``[n]``, the tokens whose K and V the cache holds, padding left out. Tokens
                beyond those of the cache are ignored, such as the last one of ``generate``. Only
                the caller knows that these are the tokens: others would store wrong pages.
            attributes: a JSON object, for filters.

        Returns:
            The context, or None if the store has not even its first page.

        Raises:
            ConfigError: the ids are no vector of tokens, or differ from those that the session
                was created for; ``attributes`` is no JSON object; the model has changed.
            HiSparseError: the cache has several rows, or the contexts cannot be written.
        """
        ids, rows = read_token_ids(token_ids), self.cache.rows
        if rows.slots.size > 1:
            raise HiSparseError(f"store: got {rows.slots.size} rows, expected the one of a session")
        if rows.token_ids is not None:
            _check_beginning(ids, rows.token_ids[0].numpy())
        keys = self._pages.keys(ids[: int(rows.lengths.sum())])
        stored = self._pages.save(rows.slots, keys)
        num_tokens = stored * self._pages.page_tokens
        return self._contexts.add(keys[:stored], num_tokens, attributes or {})

    def close(self) -> None:
        """Free the row of the cache."""
        self.cache.reset()

    def __enter__(self) -> Session:
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
