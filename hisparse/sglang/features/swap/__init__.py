"""Retracted requests: their pages go to the store, and come back from there with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hisparse.sglang.features.base import Feature
from hisparse.sglang.session import ServerSession, current_state
from hisparse.sglang.start import STORAGE

__all__ = ["Swap", "around_release_req"]

logger = logging.getLogger("hisparse")


@dataclass(frozen=True, kw_only=True)
class _SwapOut:
    """Writes the pages of retracted requests.

    Attributes:
        session: of this rank.
        linker: the store's.
        swap: keeps pages until their request comes back.
        min_tokens: least tokens of a request that is kept.
    """

    session: ServerSession
    linker: Any
    swap: Any
    min_tokens: int

    def write(self, request: Any) -> None:
        """Write the pages of SGLang's ``Req``, if they have enough tokens."""
        from hisparse.sglang.features.swap.request_swap import RetractedPages

        linker = self.linker
        if linker.rests():
            return
        retracted = RetractedPages.of(request, linker.form.page_tokens)
        if retracted.num_tokens < max(1, self.min_tokens):
            return
        slots = retracted.slots(self.session.req_to_token_pool.req_to_token)
        pages, ready = linker.form.host_pages(slots), linker.record_offload_ready()
        kept = self.swap.swap_out(request, retracted.hashes(), pages, ready)
        # Until all ranks have read them, none goes on and writes to the pages of a common pool.
        if not linker.ranks.all_of(kept):
            self.swap.drop(request.rid)


def around_release_req(
    original: Callable[..., bool], *, req: Any, offload_kv: bool = True, **others: Any
) -> bool:
    """Offer the pages of a retracted request to the storage, before SGLang frees them.

    SGLang clears ``offload_kv`` for a request that does not come back, or that it pauses while
    weights change.
    """
    swap = current_state(_SwapOut)
    if swap is not None and offload_kv:
        swap.write(req)
    return original(req=req, offload_kv=offload_kv, **others)


class Swap(Feature):
    """The store keeps pages of single requests, which only these requests load."""

    name = "swap"
    serves = (STORAGE,)
    hooks = {"sglang.srt.managers.schedule_batch.release_req": around_release_req}

    def store_connected(self, session: ServerSession, linker: Any, options: Any) -> None:
        """Keep pages in a namespace of their own; the names in it are those of one server."""
        from hisparse.sglang.features.swap.request_swap import RequestSwap

        if options.swap_min_tokens is None:
            return
        if not linker.records.storage.can_remove:
            logger.info(
                "hisparse: storage: backend %s does not remove pages; retracted requests are "
                "computed",
                options.backend,
            )
            return
        own = replace(linker.namespace, model="retracted requests")
        swap = RequestSwap(linker.records.within(own), linker.exact, options.threads)
        linker.own_pages = swap
        session.add(
            _SwapOut(session=session, linker=linker, swap=swap, min_tokens=options.swap_min_tokens)
        )


FEATURE = Swap()
