"""The namespace of pages: all that two front ends must share to exchange them."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.cache.page_format import FORMAT_VERSION, PageFormat
from hisparse.config import HiSparseConfig
from hisparse.storage import Namespace

__all__ = ["page_namespace"]


def page_namespace(
    fingerprints: Sequence[str],
    algorithm: BaseSparseAlgorithm,
    config: HiSparseConfig,
    page_format: PageFormat,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> Namespace:
    """The namespace of the pages that one rank computes.

    Neither budget nor algorithm nor layout is part of it, but for models that were trained sparse:
    there the algorithm decides what a prompt attends.

    Args:
        fingerprints: of the model, one for each rank; see :func:`fingerprint`.
        algorithm: selects pages.
        config: the settings.
        page_format: bytes of a record.
        rank: which share of the heads a record has.
        num_ranks: number of shares.
    """
    texts = [*fingerprints, *_prefill_rules(algorithm, config)]
    return Namespace(
        model=xxhash.xxh3_128_hexdigest("\n".join(texts).encode()),
        kv_dtype=page_format.describe(),
        page_size=page_format.page_tokens,
        rank=rank,
        num_ranks=num_ranks,
        part_bytes=page_format.part_bytes,
        version=FORMAT_VERSION,
    )


def _prefill_rules(algorithm: BaseSparseAlgorithm, config: HiSparseConfig) -> list[str]:
    """The settings that K and V of a prompt depend on."""
    if type(algorithm).select_prefill is BaseSparseAlgorithm.select_prefill:
        return []
    sizes = (config.budget, config.num_sink_pages, config.num_recent_pages)
    return [repr(algorithm), str(sizes), str(config.dense_layers)]
