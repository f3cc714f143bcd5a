"""``hisparse algorithms``: list the algorithms, what they need and what their options are."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from typing import Any, get_type_hints

from rich.console import Console

from hisparse.cli.terminal import add_command, make_table, print_paragraph, print_result

#: Shapes of Llama-3.1-8B, and of DeepSeek-V3.2 for algorithms that need its indexer.
_SHAPE = ("num_layers", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim")
_LLAMA: dict[str, Any] = dict(zip(_SHAPE, (32, 32, 8, 128, 128), strict=True))
_DEEPSEEK: dict[str, Any] = dict(zip(_SHAPE, (61, 128, 1, 576, 512), strict=True))
_DEEPSEEK |= {"attention": "MLA", "index_head_dim": 128}

_NOTE = (
    "Bytes: device memory for representations, all layers, beside K and V. For Llama-3.1-8B in "
    "bfloat16, pages of 16 tokens and a budget of 2,048; for algorithms that need the model's "
    "indexer, for DeepSeek-V3.2 with pages of 1."
)


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "list the algorithms, built in and from plug-ins, with their memory and options"
    add_command(commands, "algorithms", text, _run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.algorithms import ALGORITHMS

    found = [_describe(name, ALGORITHMS.get(name)) for name in ALGORITHMS]
    result = {"command": "algorithms", "algorithms": found}
    print_result(arguments, result, lambda console: _print(console, found))
    return 0


def _print(console: Console, found: list[dict[str, Any]]) -> None:
    numbers = ("bytes/token", "% of K+V", "bytes/request")
    table = make_table("algorithm", "selection scopes", *numbers, right=numbers)
    for entry in found:
        table.add_row(
            entry["name"],
            ", ".join(entry["scopes"]),
            f"{entry['bytes_per_token']:,.0f}",
            f"{100 * entry['kv_ratio']:.1f}",
            f"{entry['bytes_per_request']:,}",
        )
    console.print(table)
    print_paragraph(console, _NOTE)
    for entry in found:
        console.print(f"\n[bold]{entry['name']}[/bold]")
        print_paragraph(console, entry["summary"], indent="  ")
        for limit in entry["limits"]:
            print_paragraph(console, limit, indent="  - ")
        for name, option in entry["options"].items():
            default = json.dumps(option["default"])
            line = f"option {name}: {option['type']} (default {default})"
            print_paragraph(console, line, indent="  ", hanging=2)


def _describe(name: str, cls: type[Any]) -> dict[str, Any]:
    memory = _memory(name, cls)
    summary = (inspect.getdoc(cls) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        "name": name,
        "summary": summary,
        "scopes": list(cls.scopes),
        "page_sizes": None if cls.page_sizes is None else list(cls.page_sizes),
        "variable_lengths": cls.variable_lengths,
        "limits": _limits(cls, memory["host_bytes_per_token"]),
        **memory,
        "options": _options(cls),
        "module": cls.__module__,
    }


def _options(cls: type[Any]) -> dict[str, dict[str, Any]]:
    from hisparse.options import type_words

    hints = get_type_hints(cls)
    return {
        f.name: {
            "type": type_words(hints[f.name]),
            "default": None if f.default is dataclasses.MISSING else f.default,
        }
        for f in dataclasses.fields(cls)
    }


def _limits(cls: type[Any], host_bytes: float) -> list[str]:
    """What a user has to know before choosing the algorithm, one line each."""
    found = []
    if cls.variable_lengths:
        found.append("keeps as many pages as a query needs, up to device_buffer_size")
    if cls.page_sizes is not None:
        found.append(f"works with page_size {' or '.join(map(str, cls.page_sizes))} only")
    if cls.reads_host_keys:
        found.append("scores keys in host memory, so it runs on the CPU only")
    if host_bytes:
        found.append(f"may take {host_bytes:,} bytes of host memory a token, by its options")
    if cls.indexer:
        found.append("works with models that have an indexer only")
    return found


def _memory(name: str, cls: type[Any]) -> dict[str, float]:
    """Bytes of representations that a token and a request add, for a typical model.

    ``kv_ratio`` is the bytes of a token over the bytes of its K and V.
    """
    import torch

    from hisparse.algorithms import entry_bytes
    from hisparse.cache.formats import format_of
    from hisparse.config import HiSparseConfig
    from hisparse.engine.build import choose_selection
    from hisparse.memory.costs import host_token_bytes
    from hisparse.types import KVSpec

    page_size = 16 if cls.page_sizes is None else min(cls.page_sizes)
    config = HiSparseConfig(algorithm=name, page_size=page_size)
    shape = _DEEPSEEK if cls.indexer else _LLAMA
    kv = KVSpec(**shape, dtype=torch.bfloat16, page_size=page_size)
    _, _, kinds = choose_selection(config, kv, 1.0)
    of_token = entry_bytes(kinds, "page") * kv.num_layers / page_size
    return {
        "bytes_per_token": of_token,
        "kv_ratio": of_token / format_of(kv).token_bytes,
        "bytes_per_request": entry_bytes(kinds, "request") * kv.num_layers,
        "host_bytes_per_token": host_token_bytes(kinds, kv),
    }
