"""The engines that the state machine drives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch

__all__ = ["ENGINES", "LONGEST", "NUM_SLOTS", "SMALL"]

#: Request slots, that of the padding included.
NUM_SLOTS = 5
#: Settings that others change: few device pages and few host pages.
SMALL: dict[str, Any] = {
    "page_size": 4,
    "budget": 20,
    "device_buffer": 24,
    "max_row": 48,
    "device_pages": 2 * 4 * 8,
    "num_slots": NUM_SLOTS,
    "host_pages": 50,
    "staging_pages": 3,
}
#: By page size, the tokens of every request: more pages than a row may hold on the device.
LONGEST = {1: 40, 4: 80, 16: 160}

_MLA = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16, "device_pages": 4 * 8}
_TOKENS = {
    "page_size": 1,
    "budget": 8,
    "device_buffer": 10,
    "max_row": 24,
    "device_pages": 2 * 4 * 12,
    "host_pages": 200,
    "num_sink_pages": 0,
    "num_recent_pages": 0,
}
_PAGES_OF_16 = {
    "page_size": 16,
    "budget": 64,
    "device_buffer": 64,
    "max_row": 96,
    "device_pages": 2 * 4 * 5,
    "host_pages": 26,
}
_HOST = {"miss": "host"}
_WHOLE = {"budget": 88, "device_buffer": 88, "max_row": 88, "device_pages": 2 * 4 * 24}

#: By name, settings of the engine and a function that makes the algorithm. ``aside``: the seed of a
#: side stream that is late.
ENGINES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "quest": ({"dense_layers": (1,)}, Quest),
    "quest-page-16-fp8": (
        _PAGES_OF_16 | {"kv_cache_dtype": "fp8_e4m3", "layout": "page_first"},
        Quest,
    ),
    "quest-token-page": (_TOKENS, Quest),
    "sketch-layer-fp8": (
        {
            "scope": "layer",
            "kv_cache_dtype": "fp8_e4m3",
            "layout": "layer_first",
            "device_pages": 4 * 8,
        },
        Sketch,
    ),
    "sketch-economy-page-16": (_PAGES_OF_16, lambda: Sketch(economy=True)),
    "sketch-query-head": ({"scope": "query_head", "device_pages": 4 * 4 * 8}, Sketch),
    "quest-tail-estimate": ({"extensions": {"tail_estimate": True}}, Quest),
    "quest-mla": (_MLA | {"min_sparse_context": 40}, Quest),
    "sketch-mla-fp8": (_MLA | {"min_sparse_context": 40, "kv_cache_dtype": "fp8_e4m3"}, Sketch),
    "dsa-mla": (_TOKENS | _MLA | {"device_pages": 4 * 12, "unindexed": (1,)}, DSA),
    "sketch-whole-context": (_WHOLE, Sketch),
    "quest-reference": ({}, Quest),
    "quest-host": (_HOST | {"dense_layers": (1,), "aside": 5}, Quest),
    "quest-host-page-16-fp8": (
        _HOST
        | _PAGES_OF_16
        | {"kv_cache_dtype": "fp8_e4m3", "scope": "query_head"}
        | {"device_pages": 4 * 4 * 5},
        Quest,
    ),
    "sketch-host-mla-fp8": (
        _HOST | _MLA | {"min_sparse_context": 40, "kv_cache_dtype": "fp8_e4m3"},
        Sketch,
    ),
    "dsa-host-mla": (_HOST | _TOKENS | _MLA | {"device_pages": 4 * 12, "aside": 3}, DSA),
}
