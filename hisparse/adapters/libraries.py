"""What adapters to attention libraries share: import, prefill, layout and results."""

import functools
import importlib
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hisparse.adapters.base import Attended
from hisparse.adapters.torch import TorchAdapter
from hisparse.errors import ConfigError
from hisparse.types import AttentionRule


def token_major(pages: Tensor) -> Tensor:
    """View pages ``[N, Hr, S, D]``, any dtype, as ``[N, S, Hr, D]``.

    The result is contiguous, because device pages and staging tiles are stored in this order.
    FlashAttention takes it, and FlashInfer calls it NHD.
    """
    return pages.transpose(1, 2)


def to_attended(out: Tensor, lse: Tensor, seq_lens: Tensor, *, base_2: bool = False) -> Attended:
    """Convert a library's results, in place where that can be, to a natural lse.

    Rows without tokens, such as the padding of a CUDA graph, get output 0 and lse -inf: libraries
    return inf or -inf for them, or do not write them.

    Args:
        out: ``[R, Q, Dv]``, any floating dtype.
        lse: ``[R, Q] float32``.
        seq_lens: ``[R] int32``, tokens attended by each row.
        base_2: whether the lse has base 2 instead of e.
    """
    empty = (seq_lens == 0)[:, None]
    lse = lse * math.log(2) if base_2 else lse
    return Attended(out.masked_fill_(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf))


class LibraryAdapter(TorchAdapter):
    """Attends with functions of a library for GPUs, in 16 bits.

    Raises:
        ConfigError: the library cannot be used; why.
    """

    scaled = False
    device_types = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16)
    #: What the adapter is registered as, for messages.
    name: ClassVar[str]
    #: The library's functions, and the modules that may have them, in order.
    functions: ClassVar[tuple[str, ...]]
    modules: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        reason = self.missing()
        if reason is not None:
            raise ConfigError(f"adapter {self.name!r} cannot be used here: {reason}")
        self._functions: list[Any] = [import_function(x, *self.modules) for x in self.functions]

    @classmethod
    def missing(cls) -> str | None:
        found = [import_function(name, *cls.modules) for name in cls.functions]
        return next((reason for reason in found if isinstance(reason, str)), None)

    @abstractmethod
    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, causal: bool, left: int
    ) -> Attended:
        """:meth:`attend_prefill` by the library, which aligns the ends of queries and keys.

        Args:
            q, k, v, rule, causal: as there; all in the keys' dtype, keys as wide as values.
            left: tokens before its own position that a query attends; -1: all.
        """

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
        if k.shape[-1] != v.shape[-1]:
            return super().attend_prefill(q, k, v, rule, causal=causal, first_key=first_key)
        q = q.to(k.dtype)
        if not rule.window:
            return self.prefill(q, k, v, rule, causal, -1)
        # The library gets the queries that attend any key: a later one's window begins after the
        # last key, which is the last query's own to the library.
        count = min(max(first_key + len(k) + rule.window - 1, 0), len(q))
        left = len(k) - count + rule.window - 1 + first_key
        if count == len(q) > 0:
            return self.prefill(q, k, v, rule, causal, left)
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
        if count:
            out[:count], lse[:count] = self.prefill(q[:count], k, v, rule, causal, left)
        return Attended(out, lse)


@functools.cache
def compute_capability_major() -> int:
    """Major compute capability of the GPU; 9 (sm_90) on machines without a GPU."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9


def import_function(name: str, *modules: str) -> Callable[..., Any] | str:
    """Import a function from the first module that has it.

    Args:
        name: name of the function.
        modules: modules to try, in order.

    Returns:
        The function, or the reasons why no module has it.
    """
    reasons = []
    for module in modules:
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            reasons.append(str(error).splitlines()[0] if str(error) else module)
        else:
            return function
    return "; ".join(reasons)
