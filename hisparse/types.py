"""Shared types, and the glossary of the letters used in shapes.

====  ==========================================================================
B     requests in the batch
T     tokens in the forward (prefill: all chunks, concatenated)
L     layers
S     tokens per page (``page_size``)
P     pages (of a sequence, a pool or a page table, as the name says)
K     width of a selection: the most pages of one row
H     heads of a selection: 1 ("layer"), Hkv ("kv_head") or Hq ("query_head")
Hq    query heads
Hkv   key/value heads
Hr    key/value heads stored in one device page: Hkv for scope "layer", else 1
D     width of a head (Dk of keys, Dv of values)
Hi    heads of a model's indexer, Di their width
R     rows in the batch, ``B * H``; row ``b * H + h`` belongs to request b, head h
N     device pages of one layer's pool
C     most device slots of a row (``max_row_capacity / S``)
====  ==========================================================================

Page indices, slots and page ids are int32; -1 marks an empty entry. Queries, keys and values (q, k
and v) whose dtype is not given have the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from hisparse.errors import HiSparseError

SelectionScope = Literal["layer", "kv_head", "query_head"]
HostLayout = Literal["layer_first", "page_first", "page_head"]
#: "GQA" has keys and values for each KV head (MHA is a group of one); "MLA" has one latent for all
#: query heads, a key whose first Dv columns are the value.
Attention = Literal["GQA", "MLA"]


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """Shapes and dtypes of a model's attention layers, on one rank.

    Attributes:
        num_layers: L.
        num_q_heads: Hq of this rank.
        num_kv_heads: Hkv of this rank.
        head_dim: Dk, elements.
        v_head_dim: Dv, elements.
        dtype: dtype of keys and values as the model computes them and algorithms see them.
        page_size: S, tokens.
        attention: the kind of attention.
        index_head_dim: Di of the model's own indexer; 0: the model has no indexer.
        kv_cache_dtype: how keys and values are stored, a name in ``hisparse.config.FORMATS`` of
            this attention.
        logit_cap: see :class:`AttentionRule`; the same in all layers.
        windows: for each layer the tokens that a query attends, its own included; 0: all up to its
            own. Empty: 0 in all layers.
        unindexed: layers without an indexer in a model that has one. They attend what the layer
            before them selected, unless they are always dense.

    Raises:
        HiSparseError: ``windows`` has not one entry for each layer.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    page_size: int
    attention: Attention = "GQA"
    index_head_dim: int = 0
    kv_cache_dtype: str = "auto"
    logit_cap: float = 0.0
    windows: tuple[int, ...] = ()
    unindexed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.windows) not in (0, self.num_layers):
            raise HiSparseError(
                f"windows: got {len(self.windows)}, expected one for each of {self.num_layers} "
                "layers, or none"
            )

    @property
    def num_indexers(self) -> int:
        """Layers with an indexer of the model's own."""
        return self.num_layers - len(self.unindexed) if self.index_head_dim else 0

    def window(self, layer_id: int) -> int:
        """The window of a layer; 0: it attends the whole context."""
        return self.windows[layer_id] if self.windows else 0

    @cached_property
    def widest_window(self) -> int:
        """The largest window, in tokens; 0: every layer attends the whole context."""
        return max(self.windows, default=0)

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that attend the whole context: an algorithm selects only for them."""
        return tuple(x for x in range(self.num_layers) if not self.window(x))

    @cached_property
    def selecting_layers(self) -> tuple[int, ...]:
        """Those of ``full_layers`` for which the model, if it has an indexer, has one."""
        return tuple(x for x in self.full_layers if x not in self.unindexed)

    def window_pages(self, window: int) -> int:
        """The most full pages that a window reaches, the tail page not counted."""
        return -(-(window - 1) // self.page_size)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    def selection_heads(self, scope: SelectionScope) -> int:
        """H for a selection scope."""
        heads = {"layer": 1, "kv_head": self.num_kv_heads, "query_head": self.num_q_heads}
        return heads[scope]


@dataclass(frozen=True)
class AttentionRule:
    """How a layer attends: the softmax scale, a cap on logits, and a sliding window.

    Attributes:
        scale: softmax scale: a logit is ``scale`` times q.k.
        logit_cap: logits are ``logit_cap * tanh(scale * q.k / logit_cap)``, as in Gemma 2
            (https://arxiv.org/abs/2408.00118); 0: no cap.
        window: a query attends itself and the ``window - 1`` tokens before it; 0: all before it.

    Raises:
        HiSparseError: the cap or the window is negative.
    """

    scale: float
    logit_cap: float = 0.0
    window: int = 0

    def __post_init__(self) -> None:
        for name, got in (("logit_cap", self.logit_cap), ("window", self.window)):
            if not got >= 0:
                raise HiSparseError(f"attention rule: got {name} {got}, expected 0 (none) or more")


#: Logits are q.k.
UNSCALED = AttentionRule(1.0)


class PagedKV(NamedTuple):
    """One layer's keys and values as pages. The tensors are views; strides depend on the layout.

    Attributes:
        k: ``[P, Hr, S, Dk]``, in the model's dtype or the stored dtype.
        v: ``[P, Hr, S, Dv]``, dtype of ``k``.
    """

    k: Tensor
    v: Tensor


class StoredKV(NamedTuple):
    """Keys and values in the stored format, as pages or as consecutive tokens.

    Attributes:
        k: ``[..., Dk]``, in the stored dtype; of latents in eight bits their rows of bytes.
        v: ``[..., Dv]``; of latents the first columns of ``k``.
        scales: ``[..., 2] uint8``, scales of K and V. The factor is 2 ** (scale - 127), the E8M0
            format of OCP's microscaling. None: no scales.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None

    @property
    def kv(self) -> PagedKV:
        """Keys and values without the scales."""
        return PagedKV(self.k, self.v)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that exist; their shapes differ only in the last dimension."""
        return (self.k, self.v) if self.scales is None else (self.k, self.v, self.scales)

    @property
    def pools(self) -> tuple[StoredKV, ...]:
        """What moves alike: keys and values, then their scales, if any, in the place of both."""
        return (self,) if self.scales is None else (self, StoredKV(self.scales, self.scales))


#: Pages as attention takes them: in the model's dtype, or as stored.
Pages = PagedKV | StoredKV


class IndexerInputs(NamedTuple):
    """Outputs of a model's own indexer for the tokens of a forward, in one layer.

    DeepSeek-V3.2's lightning indexer: a token's score is ``sum_h weights_h * relu(queries_h . k)``.

    Attributes:
        queries: ``[T, Hi, Di]``, float32, bfloat16 or float16.
        keys: ``[T, Di]``, the same dtypes.
        weights: ``[T, Hi]``, the same dtypes.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor

    def take(self, tokens: slice | Tensor) -> IndexerInputs:
        """The inputs of ``tokens``, a slice or ``[n] int64``."""
        return IndexerInputs(self.queries[tokens], self.keys[tokens], self.weights[tokens])


class BlockIndexerInputs(IndexerInputs):
    """Outputs of an indexer that scores blocks of S tokens, each of them a page.

    Its ``keys`` are those of tokens.

    Attributes:
        positions: ``[T, 3] int64``, rotary positions along the three axes of text and images.
        compress: takes the tokens' keys ``[N, S, Di]`` of blocks, any float dtype, and the
            positions ``[N, 3]`` of their first tokens; returns the blocks' keys ``[N, Di]``.
    """

    positions: Tensor
    compress: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(
        cls,
        inputs: IndexerInputs,
        positions: Tensor,
        compress: Callable[[Tensor, Tensor], Tensor],
    ) -> Self:
        """Inputs with what makes keys of blocks."""
        made = cls(*inputs)
        made.positions, made.compress = positions, compress
        return made

    def take(self, tokens: slice | Tensor) -> Self:
        return self.of(super().take(tokens), self.positions[tokens], self.compress)


class Selection(NamedTuple):
    """The pages that an algorithm chose for each request and head.

    Attributes:
        pages: ``[B, H, K] int32``, page indices in the sequence, unique, ascending, padded with -1
            at the end.
        lengths: ``[B, H] int32``, number of chosen pages.
    """

    pages: Tensor
    lengths: Tensor
