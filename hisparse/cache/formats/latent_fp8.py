"""Latents in eight bits (MLA), in the bytes of DeepSeek's ``fp8_ds_mla``."""

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.cache.formats.base import Attend, PageDecoder
from hisparse.cache.formats.latent import LatentFormat
from hisparse.config import LATENT_FORMATS
from hisparse.kernels import HostKeys, LatentRow, decode_latents, encode_latents
from hisparse.types import AttentionRule, PagedKV, StoredKV


@LATENT_FORMATS.register("fp8_e4m3")
class LatentFP8(LatentFormat):
    """A token is one row of codes, scales and rotary channels, which kernels decode before use."""

    name = "fp8_ds_mla"
    dtype = torch.uint8
    sglang_dtype = torch.float8_e4m3fn

    @cached_property
    def row(self) -> LatentRow:
        """The bytes of a token."""
        return LatentRow(self.kv.v_head_dim, self.kv.head_dim - self.kv.v_head_dim)

    @property
    def key_width(self) -> int:
        return self.row.num_bytes

    @property
    def dense_token_bytes(self) -> int:
        # SGLang stores those of DeepSeek-V3.2 in the same bytes, and only codes of others.
        width = self.row.num_bytes if self.kv.num_indexers else self.row.width
        return self.kv.num_layers * width

    def encode(self, k: Tensor, v: Tensor) -> StoredKV:
        return self.join([encode_latents(k, self.row)])

    def decode(self, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
        tokens = stored.k.flatten(0, -2)[:, None]
        table = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        return self._decode(tokens, table, stored.k.shape[:-1], out)

    def page_decoder(self) -> PageDecoder:
        return self._decode_pages

    def _decode_pages(self, stored: StoredKV, pages: Tensor) -> tuple[StoredKV, Tensor]:
        """Decode ``pages [n] int32`` -> ``[n, 1, S, D]`` and their new places ``[n] int32``."""
        shape = (*pages.shape, *stored.k.shape[1:-1])
        decoded = self._decode(stored.k[:, 0], pages, shape, None)
        own = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device)
        return StoredKV(*decoded), own

    def _decode(
        self, pages: Tensor, table: Tensor, shape: Sequence[int], out: PagedKV | None
    ) -> PagedKV:
        """``pages [N, S, bytes]`` at ``table [n]`` as ``[*shape, D]``."""
        if out is None:
            k = torch.empty(*shape, self.row.width, dtype=self.kv.dtype, device=pages.device)
            out = PagedKV(k, k[..., : self.row.rank])
        decode_latents(pages, table, self.row, out.k.view(len(table), -1, self.row.width))
        return out

    def host_keys(self, stored: StoredKV) -> HostKeys:
        return HostKeys(stored.k, row=self.row)

    def attend_with(self, adapter: BackendAdapter, max_pages: int) -> Attend:
        return partial(self._attend, adapter, max_pages)

    def _attend(
        self,
        adapter: BackendAdapter,
        max_pages: int,
        q: Tensor,
        stored: StoredKV,
        page_table: Tensor,
        seq_lens: Tensor,
        rule: AttentionRule,
    ) -> Attended:
        """Decode the pages of ``page_table [R, P]``, attend: ``q [R, Hq, D]`` -> ``[R, Hq, Dv]``.

        Every adapter of latents can attend over decoded pages.

        A dense context is decoded and merged in parts as wide as a selection and its tail page. The
        parts depend on ``max_pages`` alone, so a request's sums do not depend on others. The table
        of a layer with a window is decoded at once.
        """
        size, attended, count = self.kv.page_size, None, page_table.shape[1]
        width = count if rule.window else max_pages + 1
        for first in range(0, count, width):
            pages = page_table[:, first : first + width]
            kv, own = self._decode_pages(stored, pages.flatten())
            lens = (seq_lens - first * size).clamp(0, pages.shape[1] * size)
            part = adapter.attend(q, kv.kv, own.view(pages.shape), lens, rule)
            attended = part if attended is None else merge_attended(attended, part)
        assert attended is not None, "a table has the tail page at least"
        return attended

    def attend_bytes(self, max_pages: int) -> int:
        return (max_pages + 1) * self.kv.page_size * self.kv.head_dim * self.kv.dtype.itemsize
