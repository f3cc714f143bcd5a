"""How a backend attends: over pages for decoding, over contiguous tokens for prefill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.adapters.masked_attention import attend_masked, mask_all_but
from hisparse.errors import HiSparseError
from hisparse.registry import Registry
from hisparse.types import KVSpec, PagedKV, SelectionScope, StoredKV

__all__ = ["ADAPTERS", "Attended", "BackendAdapter", "TableLimits", "merge_attended"]


class Attended(NamedTuple):
    """Attention over part of the keys; parts are merged by :func:`merge_attended`.

    Attributes:
        out: ``[..., Dv] float32``.
        lse: ``[...] float32``, natural log of the sum of exponentials of the logits.
    """

    out: Tensor
    lse: Tensor


def merge_attended(a: Attended, b: Attended) -> Attended:
    """Attention over the keys of both parts; a part without keys has lse -inf."""
    lse = torch.logaddexp(a.lse, b.lse)
    # Two empty parts give -inf - -inf: their weight is 0, not NaN.
    weight_a = (a.lse - lse).exp().nan_to_num(0.0)[..., None]
    weight_b = (b.lse - lse).exp().nan_to_num(0.0)[..., None]
    return Attended(a.out * weight_a + b.out * weight_b, lse)


class TableLimits(NamedTuple):
    """Page tables of one kind that decode steps attend over.

    Attributes:
        min_rows, max_rows: R of a step of one request, and of as many as there can be.
        max_pages: P at most; there may be fewer.
        num_queries: Q.
        num_heads: Hr of the pages.
        page_size: S of the pages.
    """

    min_rows: int
    max_rows: int
    max_pages: int
    num_queries: int
    num_heads: int
    page_size: int


class BackendAdapter(ABC):
    """Turns page tables and lengths into calls of one attention library.

    What it can do is declared, and :func:`hisparse.adapters.choose_adapter` holds it against the
    model and the configuration; an instance is made only of an adapter that fits.
    """

    #: Selection scopes that the library can serve, best first.
    scopes: tuple[SelectionScope, ...]
    #: Whether values are the keys' first columns, as with MLA: the cases that it can serve.
    latent: tuple[bool, ...] = (False, True)
    #: "cuda", "cpu"; None: any.
    device_types: tuple[str, ...] | None = None
    #: Whether it has :meth:`attend_fp8`.
    fp8: bool = False
    #: Of keys and values, if they are stored in the model's dtype; None: any.
    dtypes: tuple[torch.dtype, ...] | None = None
    #: Tokens per page; None: any.
    page_sizes: tuple[int, ...] | None = None

    @classmethod
    def missing(cls) -> str | None:
        """Why the library cannot be used on this machine, in a few words; None: it can."""
        return None

    @classmethod
    def widths_refused(cls, kv: KVSpec) -> str | None:
        """Which widths of heads it takes instead of the model's; None: it takes those."""
        return None

    @classmethod
    def workspace_bytes(cls, kv: KVSpec, tables: Sequence[TableLimits]) -> int:
        """Device memory that an instance keeps between its calls, at most.

        Args:
            kv: shapes of the model.
            tables: all that :meth:`attend` is asked for.
        """
        return 0

    @abstractmethod
    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        """One query token per row over the pages of that row.

        Args:
            q: ``[R, Q, D]``; Q is a multiple of Hr, query heads of one KV head side by side.
            kv: ``[N, Hr, S, D]``, pages.
            page_table: ``[R, P] int32``, page ids; entries beyond ``seq_lens`` are not read from,
                and may be -1.
            seq_lens: ``[R] int32``, tokens to attend: all pages are full but the last one.
            scale: softmax scale.

        Returns:
            out ``[R, Q, Dv]``, lse ``[R, Q]``.
        """

    def attend_fp8(
        self, q: Tensor, kv: StoredKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        """:meth:`attend` over float8_e4m3fn keys and values with scales; only where ``fp8`` is set.

        Args:
            q, page_table, seq_lens, scale: as :meth:`attend`.
            kv: ``[N, Hr, S, D]``, pages, with their scales.
        """
        raise HiSparseError(f"{type(self).__name__} does not attend over fp8 K and V")

    @abstractmethod
    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
    ) -> Attended:
        """Many query tokens over contiguous keys.

        Args:
            q: ``[T, Hq, D]``.
            k, v: ``[Tk, Hkv, D]``.
            scale: softmax scale.
            causal: query t sees keys up to t (``T == Tk``); otherwise all.

        Returns:
            out ``[T, Hq, Dv]``, lse ``[T, Hq]``.
        """

    def attend_chosen(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, chosen: Tensor
    ) -> Attended:
        """Many query tokens, each over some of the keys; in PyTorch where no library does it.

        Args:
            q: ``[T, Hq, D]``.
            k, v: ``[Tk, Hkv, D]``.
            scale: softmax scale.
            chosen: ``[T, K] int32``, keys of each query, none twice; what is not in 0 to Tk - 1
                is none.

        Returns:
            out ``[T, Hq, Dv]``, lse ``[T, Hq]``; of a query without keys 0 and -inf.
        """
        return Attended(*attend_masked(q, k, v, scale, mask_all_but(chosen, k.shape[0])))


ADAPTERS: Registry[BackendAdapter] = Registry(
    "adapter", package="hisparse.adapters", entry_point_group="hisparse.adapters"
)
