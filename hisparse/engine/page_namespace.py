"""The namespace of pages: all that two front ends must share to exchange them."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from hisparse.algorithms import BaseSparseAlgorithm, SelectionPolicy
from hisparse.cache.serializer import FORMAT_VERSION, PageSerializer
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.storage import Namespace

__all__ = ["is_built_in", "page_namespace"]


def is_built_in(plugin: object) -> bool:
    """Whether an algorithm or an extension is part of hisparse.

    Its options then say what it computes. The constants of others may come from anywhere.
    """
    return type(plugin).__module__.partition(".")[0] == "hisparse"


def page_namespace(
    fingerprints: Sequence[str],
    policy: SelectionPolicy,
    algorithm: BaseSparseAlgorithm,
    config: HiSparseConfig,
    serializer: PageSerializer,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> Namespace:
    """The namespace of the pages that one rank computes.

    Neither budget nor algorithm nor layout is part of it, but for models that were trained sparse:
    there the algorithm decides what a prompt attends.

    Args:
        fingerprints: of the model, one for each rank; see :func:`fingerprint`.
        policy: has the attention rule of each layer, as this front end applies it.
        algorithm: selects pages.
        config: the settings.
        serializer: bytes of a record.
        rank: which share of the heads a record has.
        num_ranks: number of shares.

    Raises:
        ConfigError: an algorithm that is not part of hisparse decides what a prompt attends.
    """
    # One front end may apply a window of the configuration that another does not read.
    rules = [(f"{x.scale:.6g}", f"{x.logit_cap:.6g}", x.window) for x in policy.rules]
    texts = [*fingerprints, str(rules), *_prefill_rules(algorithm, config)]
    return Namespace(
        model=xxhash.xxh3_128_hexdigest("\n".join(texts).encode()),
        kv_dtype=serializer.describe(),
        page_size=serializer.page_tokens,
        rank=rank,
        num_ranks=num_ranks,
        part_bytes=serializer.part_bytes,
        version=FORMAT_VERSION,
    )


def _prefill_rules(algorithm: BaseSparseAlgorithm, config: HiSparseConfig) -> list[str]:
    """The settings that K and V of a prompt depend on."""
    if type(algorithm).select_prefill is BaseSparseAlgorithm.select_prefill:
        return []
    if not is_built_in(algorithm):
        raise ConfigError(
            f"storage: got algorithm {config.algorithm}, a plug-in that decides what prompts "
            "attend, by constants that a store cannot tell apart; expected an algorithm of "
            "hisparse, or no storage"
        )
    sizes = (config.budget, config.num_sink_pages, config.num_recent_pages)
    return [repr(algorithm), str(sizes), str(config.dense_layers)]
