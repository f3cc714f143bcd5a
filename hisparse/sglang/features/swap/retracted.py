"""What a retraction is about to take from a request, in the words of a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from torch import Tensor

__all__ = ["RetractedPages"]


@dataclass(frozen=True)
class RetractedPages:
    """The whole pages of a running request that the radix cache does not hold.

    Attributes:
        request: SGLang's ``Req``.
        first: number of the first page.
        end: number of the page after the last one.
        page_tokens: tokens of a page.
    """

    request: Any
    first: int
    end: int
    page_tokens: int

    @classmethod
    def of(cls, request: Any, page_tokens: int) -> RetractedPages:
        """Those of a request; none if it would compute its prompt all the same.

        Args:
            request: SGLang's ``Req``, which still has its host slots.
            page_tokens: tokens of a page of SGLang.
        """
        kv = request.kv
        # The last token's K and V may be in the works, and its query is needed anyway.
        known = len(request.origin_input_ids) + len(request.output_ids) - 1
        first, end = kv.cache_protected_len // page_tokens, min(kv.kv_committed_len, known)
        starts_over = (
            # A forward of it failed, or its K and V do not follow from its tokens.
            request.skip_radix_cache_insert or request.input_embeds is not None
        )
        return cls(request, first, first if starts_over else end // page_tokens, page_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pages."""
        return max(0, self.end - self.first) * self.page_tokens

    def slots(self, req_to_token: Tensor) -> Tensor:
        """``[num_tokens]`` host slots.

        Args:
            req_to_token: ``[request slots, tokens]``, host slots of SGLang's requests.
        """
        first, end = self.first * self.page_tokens, self.end * self.page_tokens
        return req_to_token[self.request.kv.req_pool_idx, first:end]

    def hashes(self) -> list[str]:
        """SGLang's hash of each page: of its tokens, and of all before them."""
        request = self.request
        tokens = (request.origin_input_ids + request.output_ids)[: self.end * self.page_tokens]
        key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
        hashes = get_storage_hash_str(key, page_size=self.page_tokens)
        return list(hashes[self.first :])
