"""Token-wise sparse MLA with FlashMLA's kernel, or with Triton if FlashMLA is not installed.

The adapter uses SGLang's builds of FlashMLA's sparse kernel for bf16 latents
(https://github.com/deepseek-ai/FlashMLA). SGLang's builds document the base of the log-sum-exp.
The original does not, and changed the base between releases. FlashInfer's sparse MLA is not used:
for bf16 it needs sm_100 and rejects rows without tokens.

Written against sglang-kernel 0.4.10 and sgl-flash-mla 1.0.0, which has run on an H200.
"""

import inspect
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended
from hisparse.adapters.libraries import compute_capability_major, import_function, to_attended
from hisparse.adapters.torch import TritonAdapter, as_rows
from hisparse.types import AttentionRule, PagedKV, Pages, SelectionScope

logger = logging.getLogger(__name__)

#: Widths of keys and values that FlashMLA supports, which are DeepSeek's.
_WIDTHS = (576, 512)
#: FlashMLA requires a multiple of this many indices per query on sm_90; sm_100 accepts it.
_INDEX_BLOCK = 128
#: Supported numbers of query heads, by major compute capability.
_QUERY_BLOCKS = {9: (64, 128), 10: (128,)}


@dataclass(frozen=True, kw_only=True)
class FlashMLACall:
    """Arguments of ``flash_mla_sparse_fwd``, by its names."""

    q: Tensor  # ``[R, Hb, 576] bfloat16``; query heads, padded with zeros to Hb, 64 or 128
    kv: Tensor  # ``[N * S, 1, 576] bfloat16``, a view of the pages
    # ``[R, 1, W] int32``, ``page * S + offset`` of each token in the order of the page table,
    # padded with -1; W is a multiple of 128
    indices: Tensor
    sm_scale: float  # softmax scale
    d_v: int  # 512


def make_flash_mla_call(
    q: Tensor,
    kv: Pages,
    page_table: Tensor,
    seq_lens: Tensor,
    rule: AttentionRule,
    query_block: int,
) -> FlashMLACall:
    """Convert :meth:`BackendAdapter.attend`'s arguments, without a copy of the latents.

    Args:
        q: ``[R, Hq, 576]``, any float dtype; the call has it in the pages' dtype.
        kv, page_table, seq_lens, rule: as for ``attend``, without a cap or a window.
        query_block: number of query heads to pad ``q`` to.
    """
    size, width = kv.k.shape[2:]
    tokens = page_table
    if size > 1:
        offset = torch.arange(size, dtype=torch.int32, device=q.device)
        tokens = (page_table[..., None] * size + offset).flatten(1)
    position = torch.arange(tokens.shape[1], dtype=torch.int32, device=q.device)
    tokens = torch.where(position < seq_lens[:, None], tokens, -1)
    # `pad` copies even what needs no padding.
    q, short = q.to(kv.k.dtype), query_block - q.shape[1]
    q = torch.nn.functional.pad(q, (0, 0, 0, short)) if short else q.contiguous()
    if short := -tokens.shape[1] % _INDEX_BLOCK:
        tokens = torch.nn.functional.pad(tokens, (0, short), value=-1)
    return FlashMLACall(
        q=q,
        # `view` fails for other layouts, where `reshape` would copy all pages.
        kv=kv.k.view(-1, 1, width),
        indices=tokens[:, None],
        sm_scale=rule.scale,
        d_v=kv.v.shape[-1],
    )


@ADAPTERS.register("dsa")
class DSAAdapter(TritonAdapter):
    """Decodes MLA with FlashMLA's sparse kernel if that supports the model, else with Triton."""

    scaled = False
    scopes: tuple[SelectionScope, ...] = ("layer", "kv_head")
    attention = ("MLA",)

    def __init__(self) -> None:
        self._attend, self._options, self._base_2 = _find_flash_mla()
        self._capability_major = compute_capability_major()

    def attend(
        self, q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        block, heads = self._query_block(q.shape[1], kv, rule), q.shape[1]
        if block is None:
            return super().attend(q, kv, page_table, seq_lens, rule)
        call = make_flash_mla_call(q, kv, page_table, seq_lens, rule, block)
        out, _, lse = self._attend(**vars(call), **self._options)
        return to_attended(out[:, :heads], lse[:, :heads], seq_lens, base_2=self._base_2)

    def attend_chosen(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, chosen: Tensor
    ) -> Attended:
        rule, heads = replace(rule, window=0), q.shape[1]
        # Padded heads would take more work, and more memory than is charged for a prefill.
        if self._query_block(heads, PagedKV(k, v), rule) != heads:
            return super().attend_chosen(q, k, v, rule, chosen)
        return self.attend(q, *as_rows(k, v, chosen), rule)

    def _query_block(self, heads: int, kv: Pages, rule: AttentionRule) -> int | None:
        """The number of query heads that FlashMLA pads ``heads`` to; None: it cannot attend."""
        widths = kv.k.shape[-1], kv.v.shape[-1]
        supported = self._attend and widths == _WIDTHS and kv.k.dtype == torch.bfloat16
        # FlashMLA has neither a cap nor a window.
        if not supported or rule.logit_cap or rule.window:
            return None
        return next((n for n in _QUERY_BLOCKS.get(self._capability_major, ()) if n >= heads), None)


def _find_flash_mla() -> tuple[Any, dict[str, bool], bool]:
    """FlashMLA's function or None, its extra options, and whether its lse has base 2."""
    name = "flash_mla_sparse_fwd"
    found = import_function(name, "flash_mla")
    # Only SGLang's build has this parameter. Without an argument for it, the lse is natural.
    if not isinstance(found, str) and "return_log2_lse" in inspect.signature(found).parameters:
        return found, {"use_legacy": True}, False
    # The Python wrapper can be installed without its binary. The binary has this name.
    binary = import_function("flashmla_ops", "sgl_kernel.flash_mla")
    found = import_function(name, "sgl_kernel.flash_mla")
    if isinstance(binary, str) or isinstance(found, str):
        logger.info("adapter dsa: FlashMLA is not available, using Triton: %s", binary)
        return None, {}, False
    return found, {}, True
