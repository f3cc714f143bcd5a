"""The namespace of a server's pages: all that two servers must share to exchange them."""

from __future__ import annotations

from typing import Any

import xxhash

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.engine.build import EngineSetup
from hisparse.engine.fingerprint import fingerprint
from hisparse.sglang.storage.page_format import FORMAT_VERSION, PageFormat
from hisparse.sglang.storage.ranks import LinkerRanks
from hisparse.storage import Namespace

__all__ = ["make_namespace", "swap_namespace"]


def make_namespace(
    session: Any, page_format: PageFormat, page_tokens: int, ranks: LinkerRanks
) -> Namespace:
    """The namespace of this rank's pages.

    Neither budget nor algorithm nor layout is part of it, but for models that were trained sparse:
    there the algorithm decides what a prompt attends.

    Args:
        session: this rank's session; its model has its weights.
        page_format: bytes of a record.
        page_tokens: tokens of a page of SGLang.
        ranks: the ranks of the server.
    """
    # Buffers follow from the configuration, and SGLang extends some while it serves.
    own = fingerprint(session.model_settings, sorted(session.model.named_parameters()))
    texts = [*ranks.gather(own), *_prefill_rules(session)]
    model = xxhash.xxh3_128_hexdigest("\n".join(texts).encode())
    return _namespace(model, page_format, page_tokens, ranks)


def swap_namespace(page_format: PageFormat, page_tokens: int, ranks: LinkerRanks) -> Namespace:
    """The namespace of retracted requests' pages; the names in it are those of one server.

    Args:
        page_format, page_tokens, ranks: as for :func:`make_namespace`.
    """
    return _namespace("retracted requests", page_format, page_tokens, ranks)


def _namespace(
    model: str, page_format: PageFormat, page_tokens: int, ranks: LinkerRanks
) -> Namespace:
    rank, num_ranks = ranks.key
    return Namespace(
        model=model,
        kv_dtype=page_format.describe(),
        page_size=page_tokens,
        rank=rank,
        num_ranks=num_ranks,
        part_bytes=page_format.part_bytes,
        version=FORMAT_VERSION,
    )


def _prefill_rules(setup: EngineSetup) -> list[str]:
    """The settings that K and V of a prompt depend on."""
    algorithm, config = setup.algorithm, setup.config
    if type(algorithm).select_prefill is BaseSparseAlgorithm.select_prefill:
        return []
    sizes = (config.budget, config.num_sink_pages, config.num_recent_pages)
    return [repr(algorithm), str(sizes), str(config.dense_layers)]
