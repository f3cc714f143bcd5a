"""One forward of a model: passes the columns that hold tokens to the coordinator."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import SelectionPolicy
from hisparse.engine.batches import DecodeBatch, PrefillBatch
from hisparse.engine.prefill import PrefillChunk
from hisparse.errors import ConfigError, HiSparseError, quoted, shorten
from hisparse.kernels import upload
from hisparse.transformers.rows import RowStore
from hisparse.types import AttentionRule


def check_layer(
    layer_id: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    policy: SelectionPolicy,
    device: torch.device,
    max_length: int,
) -> None:
    """Check that a layer's tensors and rule are those that the cache was built for.

    Args:
        q: ``[B, Hq, T, D]``, any float dtype.
        k, v: ``[B, Hkv, T, D]``, expected in the model's dtype.
        max_length: columns of the cache; a window that holds them is none.

    Raises:
        HiSparseError: a shape, a dtype, the device or the rule differs.
    """
    kv = policy.kv
    if layer_id >= kv.num_layers:
        raise HiSparseError(f"got layer {layer_id}, expected 0 to {kv.num_layers - 1}")
    known = policy.layer_rules[layer_id]
    expected = {
        "heads and width of q": (tuple(q.shape[1::2]), (kv.num_q_heads, kv.head_dim)),
        "heads and width of k": (tuple(k.shape[1::2]), (kv.num_kv_heads, kv.head_dim)),
        "heads and width of v": (tuple(v.shape[1::2]), (kv.num_kv_heads, kv.v_head_dim)),
        "dtype of k": (k.dtype, kv.dtype),
        "dtype of v": (v.dtype, kv.dtype),
        "device type": (q.device.type, device.type),
        "softmax scale": (rule.scale, known.scale),
        "cap of logits": (rule.logit_cap, known.logit_cap),
        "window": (rule.window if rule.window < max_length else 0, known.window),
    }
    for what, (got, want) in expected.items():
        if got != want:
            raise HiSparseError(
                f"layer {layer_id}: got {what} {got}, expected {want}; make the cache from this "
                "model"
            )


def read_mask(mask: Tensor | None, cached: np.ndarray, width: int) -> np.ndarray:
    """Find out which new columns hold tokens and which hold padding.

    Args:
        mask: ``[B, columns + T]``, any dtype, non-zero at tokens; None if every column
            holds a token.
        cached: ``[B, columns] bool``, True at tokens, for the columns in the cache.
        width: T, new columns.

    Returns:
        ``[B, T] bool``, True at tokens.

    Raises:
        HiSparseError: the mask has another shape, or differs from ``cached``.
    """
    batch, columns = cached.shape
    if mask is None:
        return np.ones((batch, width), dtype=np.bool_)
    if tuple(mask.shape) != (batch, columns + width):
        raise HiSparseError(
            f"attention_mask: got shape {list(mask.shape)}, expected {[batch, columns + width]}: "
            f"{columns} cached columns and {width} new ones, True at tokens"
        )
    is_token: np.ndarray = mask.to(device="cpu", dtype=torch.bool).numpy()
    changed = (is_token[:, :columns] != cached).any(1)
    if changed.any():
        row = int(changed.argmax())
        raise HiSparseError(
            f"attention_mask: row {row} has {int(is_token[row, :columns].sum())} tokens in the "
            f"{columns} cached columns, expected the same {int(cached[row].sum())} as before"
        )
    return is_token[:, columns:]


def read_token_ids(token_ids: Tensor | Sequence[int]) -> np.ndarray:
    """The tokens of one context.

    Args:
        token_ids: ``[n]``, a tensor of any integer dtype, or a list.

    Returns:
        ``[n] int64``.

    Raises:
        ConfigError: they are no vector of token ids, or there is none.
    """
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError):
        raise _not_tokens(quoted(token_ids)) from None
    if ids.dim() != 1 or not ids.numel():
        raise _not_tokens(f"shape {shorten(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise _not_tokens(str(ids.dtype))
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= 2**32:
        raise _not_tokens(f"numbers of {low} to {high}")
    numbers: np.ndarray = ids.cpu().numpy().astype(np.int64)
    return numbers


def _not_tokens(got: str) -> ConfigError:
    return ConfigError(
        f"token_ids: got {got}, expected a vector of one or more token ids from 0 to 2^32 - 1, "
        "such as ids[0]"
    )


class Forward:
    """A forward of the rows of a cache, with host pages for its tokens; the coordinator begins it.

    A forward of one column is a decode step; a forward of more columns is part of a prompt.

    Args:
        slots: ``[B]``, request slots.
        is_token: ``[B, T] bool``, False at padding, for the columns of this forward.

    Attributes:
        is_token: as given.

    Raises:
        CapacityError: too few host pages are free; nothing has changed.
    """

    def __init__(self, store: RowStore, slots: np.ndarray, is_token: np.ndarray) -> None:
        self._store, self._slots, self.is_token = store, slots, is_token
        counts, self._before = is_token.sum(1), store.lengths[slots]
        store.grow(slots, counts)
        #: ``[tokens] int64``, places of the tokens among the B * T columns; None: no padding.
        self._index: Tensor | None = None
        if not is_token.all():
            self._index = upload(np.flatnonzero(is_token), store.device)
        if is_token.any():
            active = counts > 0
            make = _decode_batch if is_token.shape[1] == 1 else _prefill_batch
            batch = make(store, slots[active], self._before[active], counts[active])
            try:
                store.coordinator.forward_begin(batch)
            except BaseException:
                self.undo()
                raise

    def attention(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer; shapes and dtypes as of :meth:`HiSparseCache.attend`."""
        batch, heads, width, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        index, attention = self._index, self._store.coordinator.attention
        if index is None:
            out = attention(layer_id, q, k, v, sinks=sinks)
            return out.view(batch, width, heads, -1)
        padded = q.new_zeros(batch * width, heads, v.shape[-1])
        if index.numel():
            padded[index] = attention(layer_id, q[index], k[index], v[index], sinks=sinks)
        return padded.view(batch, width, heads, -1)

    def end(self) -> None:
        """End the coordinator's forward, after the last layer."""
        if self.is_token.any():
            self._store.coordinator.forward_end()

    def undo(self) -> None:
        """Give the rows the lengths from before a forward that an exception ended."""
        self._store.shrink(self._slots, self._before)


def _decode_batch(
    store: RowStore, slots: np.ndarray, lengths: np.ndarray, counts: np.ndarray
) -> DecodeBatch:
    new_lengths = lengths + counts
    return DecodeBatch(
        slots=upload(slots, store.device),
        slots_cpu=slots,
        seq_lens=upload(new_lengths, store.device),
        seq_lens_cpu=new_lengths,
        host_slots=store.host_slots(slots, lengths, counts),
        host_page_table=store.page_table(slots, int(store.num_pages(new_lengths).max())),
    )


def _prefill_batch(
    store: RowStore, slots: np.ndarray, lengths: np.ndarray, counts: np.ndarray
) -> PrefillBatch:
    pages = store.num_pages(lengths + counts)
    offsets = counts.cumsum() - counts
    chunks = [
        PrefillChunk(
            slot=slot,
            start=start,
            length=count,
            offset=offset,
            host_pages=store.page_table(slots[row : row + 1], int(pages[row]))[0],
        )
        for row, (slot, start, count, offset) in enumerate(
            zip(slots.tolist(), lengths.tolist(), counts.tolist(), offsets.tolist(), strict=True)
        )
    ]
    return PrefillBatch(chunks=chunks, host_slots=store.host_slots(slots, lengths, counts))
