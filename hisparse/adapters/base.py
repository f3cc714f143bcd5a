"""The interface of adapters: attention over pages in decode, over contiguous tokens in prefill."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from hisparse.kernels import cap_logits, merge_attention
from hisparse.kernels.operation import new_tensors
from hisparse.registry import Registry
from hisparse.types import Attention, AttentionRule, KVSpec, Pages, SelectionScope

#: Queries that :meth:`BackendAdapter.attend_chosen` takes at once, which limits the memory of the
#: logits.
_QUERY_BLOCK = 512


class Attended(NamedTuple):
    """Attention over a part of the keys. :func:`merge_attended` merges two parts.

    Attributes:
        out: ``[..., Dv]``, attention output, float32 or in the dtype of q.
        lse: ``[...] float32``, natural log-sum-exp of the logits.
    """

    out: Tensor
    lse: Tensor


def merge_attended(
    a: Attended,
    b: Attended | None = None,
    *,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Attended:
    """Merge attention over two disjoint parts of the keys, and add sinks; in float32.

    Sinks are logits without a value that join the softmax, as in gpt-oss, neither scaled nor
    capped; https://arxiv.org/abs/2508.10925. They belong to the whole softmax: add them once for
    each layer and query, when all parts are merged.

    Args:
        a, b: the parts, out ``[R, Q, Dv]`` and lse ``[R, Q]``, -inf without keys; None: there is
            one part.
        sinks: ``[Q]``, any float dtype; None: there are none.
        dtype: of the output; None: float32 for two parts, that of ``a`` for one.

    Returns:
        out ``[R, Q, Dv]``, 0 for a query without keys, and lse ``[R, Q]`` of the keys alone.
    """
    dtype = dtype or (a.out.dtype if b is None else torch.float32)
    if b is not None or sinks is not None:
        return Attended(*merge_attention(*a, *(b or ()), sinks=sinks, dtype=dtype))
    if a.out.dtype == dtype:
        return a
    (cast,) = new_tensors("attended", [(a.out.shape, dtype)], a.out.device)
    return Attended(cast.copy_(a.out), a.lse)


class TableLimits(NamedTuple):
    """Limits of the page tables that decode steps pass to :meth:`BackendAdapter.attend`.

    Attributes:
        min_rows, max_rows: R with one request, and with the maximum number of requests.
        max_pages: maximum P.
        num_queries: Q, query heads per row.
        num_heads: Hr, KV heads per page.
        page_size: S, tokens per page.
        window: window of the layers that attend by these tables; 0: none.
    """

    min_rows: int
    max_rows: int
    max_pages: int
    num_queries: int
    num_heads: int
    page_size: int
    window: int = 0


class DeviceLimits(NamedTuple):
    """Properties of one GPU."""

    name: str  # such as "NVIDIA L40S (sm_89)"
    # Shared memory that one block may take: 163 KiB on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB
    # on sm_86, sm_89 and sm_120.
    shared_bytes: int


class BackendAdapter(ABC):
    """Converts page tables and lengths into calls of one attention library.

    A subclass declares its capabilities as class attributes. The function
    :func:`hisparse.adapters.choose_adapter` compares them with the model and the configuration, so
    that only supported adapters are instantiated.
    """

    #: Supported selection scopes, best first.
    scopes: tuple[SelectionScope, ...]
    #: Supported kinds of attention.
    attention: tuple[Attention, ...] = get_args(Attention)
    #: Supported device types, "cuda" and "cpu"; None for any.
    device_types: tuple[str, ...] | None = None
    #: Whether :meth:`attend` reads keys and values in eight bits with their scales.
    scaled: bool = False
    #: Whether all methods apply ``AttentionRule.logit_cap``.
    logit_cap: bool = False
    #: Whether all methods but :meth:`attend_chosen` apply ``AttentionRule.window``.
    window: bool = False
    #: Supported dtypes of keys and values without scales; None for any.
    dtypes: tuple[torch.dtype, ...] | None = None
    #: Whether a CUDA graph can hold :meth:`attend`, which has run with the same shapes before.
    capturable: bool = True
    #: Supported page sizes, tokens; None for any.
    page_sizes: tuple[int, ...] | None = None

    @classmethod
    def missing(cls) -> str | None:
        """Why the library cannot run on this machine, in a few words; None if it can."""
        return None

    @classmethod
    def widths_refused(cls, kv: KVSpec) -> str | None:
        """The supported head widths, in words, if the model's are not; None if they are."""
        return None

    @classmethod
    def device_refused(cls, kv: KVSpec, device: DeviceLimits) -> str | None:
        """Why this GPU cannot run the library's kernels for the model, in words; None if it can."""
        return None

    @classmethod
    def workspace_bytes(cls, kv: KVSpec, tables: Sequence[TableLimits]) -> int:
        """Maximum device memory that an instance keeps between calls, in bytes.

        Args:
            kv: shapes of the model.
            tables: limits of all page tables that :meth:`attend` will get.
        """
        return 0

    @abstractmethod
    def attend(
        self, q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        """Attend from one query token per row over the pages of that row.

        Args:
            q: ``[R, Q, D]``, model's dtype; Q is a multiple of Hr, and query heads of one KV head
                are adjacent.
            kv: ``[N, Hr, S, D]``, pages in the model's dtype, or in eight bits with scales if the
                adapter declares ``scaled``.
            page_table: ``[R, P] int32``, page ids; entries beyond ``seq_lens``, or before the
                window, may be -1 and are not read.
            seq_lens: ``[R] int32``, tokens to attend; every page but the last one is full.
            rule: scale, cap and window. With a window a row attends only the last ``window`` of
                its tokens, which have to be consecutive and end with the query's own.

        Returns:
            out ``[R, Q, Dv]``, float32 or in the dtype of q; lse ``[R, Q] float32``, natural log.
            0 and -inf for a row without tokens.
        """

    @abstractmethod
    def attend_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        *,
        causal: bool,
        first_key: int = 0,
    ) -> Attended:
        """Attend from many query tokens over contiguous keys.

        Args:
            q: ``[T, Hq, D]``, model's dtype.
            k, v: ``[Tk, Hkv, D]``, model's dtype.
            rule: scale, cap and window.
            causal: query t attends key j only if ``first_key + j <= t``, and the last query is the
                last key's; if False, every query attends all.
            first_key: position of key 0 less the position of query 0; negative for a tile of the
                prefix, T - Tk if ``causal``. A window depends on it: query t attends key j only if
                ``first_key + j > t - window``.

        Returns:
            out ``[T, Hq, Dv]``, float32 or in the dtype of q; lse ``[T, Hq] float32``, natural log.
            0 and -inf for a query without keys.
        """

    def attend_chosen(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, chosen: Tensor
    ) -> Attended:
        """Attend from many query tokens, each over its own keys. This default uses PyTorch.

        Args:
            q: ``[T, Hq, D]``, model's dtype.
            k, v: ``[Tk, Hkv, D]``, model's dtype.
            rule: scale and cap; ``chosen`` takes the place of a window.
            chosen: ``[T, K] int32``, distinct key indices per query; values outside 0 to Tk - 1
                are padding.

        Returns:
            out ``[T, Hq, Dv]``, float32 or in the dtype of q; lse ``[T, Hq] float32``, natural log.
            0 and -inf for a query without keys.
        """
        num_keys, kv_heads = k.shape[:2]
        keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
        outs, lses = [], []
        for block, own in zip(q.split(_QUERY_BLOCK), chosen.split(_QUERY_BLOCK), strict=True):
            own = own.long()
            # Padding goes to one extra column, which is cut off below.
            own = torch.where((own >= 0) & (own < num_keys), own, num_keys)
            hidden = torch.ones(len(own), num_keys + 1, dtype=torch.bool, device=own.device)
            hidden = hidden.scatter_(1, own, False)[:, :num_keys]
            queries = block.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
            logits = cap_logits((queries @ keys[:, None]) * rule.scale, rule.logit_cap)
            logits.masked_fill_(hidden, -torch.inf)
            lse = logits.logsumexp(-1)
            # For a query without keys -inf - -inf is NaN; its weights must be 0.
            largest = lse.clamp(min=torch.finfo(lse.dtype).min)
            out = (logits - largest[..., None]).exp_() @ values[:, None]
            outs.append(out.flatten(0, 1).transpose(0, 1).contiguous())
            lses.append(lse.flatten(0, 1).transpose(0, 1))
        return Attended(torch.cat(outs), torch.cat(lses))


ADAPTERS: Registry[BackendAdapter] = Registry(
    "adapter", package="hisparse.adapters", entry_point_group="hisparse.adapters"
)


def device_limits(device_type: str) -> DeviceLimits | None:
    """Properties of the current GPU; None if ``device_type`` is not "cuda", or without a GPU."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return None
    # PyTorch's stubs lack the last property.
    about: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = f"{about.name} (sm_{about.major}{about.minor})"
    return DeviceLimits(name, about.shared_memory_per_block_optin)
