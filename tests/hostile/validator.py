"""Says whether a text is a configuration, only from what docs/configuration.md promises.

Nothing here comes from the parser: JSON is read by Python, types and ranges are a JSON schema, and
the rules between keys are those of the page's table. The names of algorithms are the registered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from hisparse.algorithms import ALGORITHMS

_SCHEMA = json.loads(Path(__file__).with_name("configuration.schema.json").read_text("utf-8"))
_SCHEMA["properties"]["algorithm"] = {"enum": list(ALGORITHMS)}
_VALIDATOR = Draft202012Validator(_SCHEMA)


def is_documented(text: str) -> bool:
    """Whether the page allows a text as value of ``--hisparse-config``."""
    if not text.strip(" \t\r\n"):
        return True
    try:
        settings = json.loads(text, object_pairs_hook=_no_repeats, parse_float=_finite)
    except (ValueError, RecursionError):
        return False
    return _VALIDATOR.is_valid(settings) and _keys_agree(settings)


def _no_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError("beyond the largest number")
    return value


def _keys_agree(settings: dict[str, Any]) -> bool:
    """The rules of the page that concern several keys."""
    page = settings.get("page_size", 16)
    budget = settings.get("budget", settings.get("top_k", 2048))
    device = settings.get("device_buffer_size") or 2 * budget
    largest = settings.get("max_row_capacity") or device
    sizes = (budget, device, largest)
    kept = settings.get("num_sink_pages", 1) + settings.get("num_recent_pages", 2)
    options = settings.get("algorithm_config", {})
    return (
        not any(size % page for size in sizes)
        and device >= budget
        and largest >= device
        # Sinks, recent pages, the page being filled, and one that is chosen.
        and budget >= (kept + 2) * page
        and not (options.get("beta") is not None and options.get("alpha") is not None)
        and not (settings.get("cuda_graph") is True and settings.get("checked"))
        and _storage_agrees(settings.get("storage"))
    )


def _storage_agrees(storage: dict[str, Any] | None) -> bool:
    """The rules of the table of ``storage``: which options belong to the file store."""
    if storage is None:
        return True
    own = [name for name in ("manager", "path", "size", "ttl_s") if storage.get(name) is not None]
    if storage.get("backend", "file") != "file":
        return not own
    found = storage.get("path") if "manager" not in own else own == ["manager"]
    return bool(found) and not storage.get("options")
