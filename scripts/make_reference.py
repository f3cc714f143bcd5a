"""Write docs/configuration.md: every key, option, flag and metric, read from the classes.

Run as ``python -m scripts.make_reference docs/configuration.md``. Types, defaults and meanings are
those of the dataclasses and their docstrings, so nothing is written twice. SGLang need not be
installed: names of metrics are read from source.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm
from hisparse.cache.counters import COUNTERS, REQUESTS
from hisparse.config import EXTENSIONS, HiSparseConfig
from hisparse.options import StorageOptions, meanings
from hisparse.registry import Registry
from hisparse.units import MemorySize

ROOT = Path(__file__).resolve().parent.parent

_INTRO = """\
# Configuration reference

After this page you can set every key of hisparse and read every metric. `make docs` generates the
page from the configuration classes; do not edit it.

```
python -m sglang.launch_server --model-path MODEL --attention-backend hisparse \\
    --hisparse-config '{"algorithm": "sketch", "budget": 2048, "tail_estimate": true}'
```

`--hisparse-config` takes a JSON object, or `@file.json`. `hisparse.transformers.enable` and
`hisparse eval --config` take the same keys. An unknown key is an error that names the closest."""

_FLAGS = (
    ("--attention-backend hisparse", "switches hisparse on, for prefill and decode"),
    ("--hisparse-config", "takes the keys of this page"),
    ("--page-size", "set to `page_size` if not given, or to 16 for a `page_size` of 1; must be a "
     "multiple of `page_size`"),
    ("--max-total-tokens", "caps the host pool, which `host_memory` sizes"),
    ("--max-running-requests", "lowered to the requests that fit the device memory"),
    ("--dp-size", "replicas divide `host_memory` ([operations.md](operations.md#replicas))"),
    ("--attn-dp-size, --pp-size", "ranks divide `host_memory`; some settings do not go with them "
     "([operations.md](operations.md#several-ranks))"),
    ("--kv-cache-dtype fp8_e4m3", "stores K and V in eight bits with scales ([fp8.md](fp8.md))"),
    ("--enable-metrics", "adds the metrics below to `/metrics`"),
)  # fmt: skip

#: Words for types that JSON names otherwise.
_WORDS = {int: "integer", float: "number", str: "string", bool: "`true`, `false`"}


def make_reference() -> str:
    """The whole page, as Markdown."""
    return "\n\n".join([*_configuration(), *_extensions(), *_algorithms(), *_sglang()]) + "\n"


def _configuration() -> Iterator[str]:
    yield _INTRO
    yield "## Keys"
    yield 'Memory sizes are bytes, a size such as `"64GiB"`, or a fraction between 0 and 1.'
    keys = [f for f in fields(HiSparseConfig) if f.name != "extensions"]
    yield _options_table("key", HiSparseConfig, keys)
    yield "### `storage`"
    yield (
        "Options of the key `storage`. [storage.md](storage.md) says what a store keeps and how to "
        "operate it."
    )
    yield _options_table("option", StorageOptions, fields(StorageOptions))


def _extensions() -> Iterator[str]:
    yield "## Extensions"
    yield (
        "An extension is a key of its own: `true` switches it on with its defaults, an object sets "
        "its\noptions, `false` (the default) leaves it off."
    )
    for name, cls in _built_in(EXTENSIONS):
        _, _, text = (inspect.getdoc(import_module(cls.__module__)) or "").partition(": ")
        yield f"### `{name}`"
        yield _first_paragraph(text)
        options = [f for f in fields(cls.options_type) if f.init]
        yield _options_table("option", cls.options_type, options) if options else "No options."


def _algorithms() -> Iterator[str]:
    yield "## Options of algorithms"
    yield (
        "Options go into `algorithm_config`. [algorithms.md](algorithms.md) says how each one "
        "selects.\nPlug-ins can add more: `hisparse algorithms` lists all that are installed. "
        "Each can do all selection scopes, `kv_head` by default, unless it says otherwise."
    )
    for name, cls in _built_in(ALGORITHMS):
        yield f"### `{name}`"
        yield _first_paragraph(inspect.getdoc(cls) or "")
        paper = re.search(r"https://\S+", import_module(cls.__module__).__doc__ or "")
        sizes, scopes = cls.page_sizes, ", ".join(f"`{scope}`" for scope in cls.scopes)
        notes = [
            *([f"Paper: <{paper[0]}>."] if paper else []),
            *([f"Selection scopes: {scopes}."] if cls.scopes != BaseSparseAlgorithm.scopes else []),
            *([f"Needs `page_size` {' or '.join(map(str, sizes))}."] if sizes else []),
        ]
        if notes:
            yield " ".join(notes)
        options = [f for f in fields(cls) if f.init]
        yield _options_table("option", cls, options) if options else "No options."


def _sglang() -> Iterator[str]:
    yield "## Flags of SGLang"
    yield (
        "These flags concern hisparse. Of the others, those that it cannot serve stop the start "
        "with\none line that names the flag; the rest work as they are."
    )
    yield _table(("flag", "with hisparse"), [(f"`{flag}`", text) for flag, text in _FLAGS])
    yield "## Metrics"
    yield (
        "With `--enable-metrics`, SGLang's `/metrics` exports the metrics below. Each has the "
        "labels `model_name` and\n`tp_rank`, and `dp_rank` with replicas. Names that end in "
        "`_total` are counters; all others are gauges.\nPages, selections and tokens are counted "
        "over layers and rows. A key in the second column adds the metric.\n`requests_total` "
        "has the label `choice` ([how it works](how-it-works.md#what-is-decided-for-a-request))."
    )
    yield _table(
        ("metric", "with", "meaning"),
        [(f"`hisparse:{name}`", key, text) for name, key, text in _metrics()],
    )


def _metrics() -> Iterator[tuple[str, str, str]]:
    """Name in Prometheus, the key that adds it, and meaning of each metric."""
    for name, text in COUNTERS.items():
        yield f"{name}_total", "", text
    yield "requests_total", "", REQUESTS
    for extension, cls in _built_in(EXTENSIONS):
        for name, text in cls.counters.items():
            yield f"{name}_total", f"`{extension}`", text
    for name, text in _dictionaries("features/storage/calls")["COUNTERS"].items():
        yield f"{name}_total", "`storage`", text
    for name, text in _dictionaries("metrics")["GAUGES"].items():
        yield name, "", text


def _dictionaries(module: str) -> dict[str, dict[str, str]]:
    """The dictionaries of a module of the plug-in, by name, read from its source."""
    tree = ast.parse((ROOT / "hisparse" / "sglang" / f"{module}.py").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Dict):
            found[targets[0].id] = ast.literal_eval(value)
    return found


def _built_in(registry: Registry[Any]) -> Iterator[tuple[str, type[Any]]]:
    """Names and classes of this package; what plug-ins add is left out."""
    for name in registry:
        cls = registry.get(name)
        if cls.__module__.startswith("hisparse."):
            yield name, cls


def _options_table(title: str, cls: type[Any], options: Sequence[Field[Any]]) -> str:
    hints, texts = get_type_hints(cls), meanings(cls)
    rows = [
        (f"`{f.name}`", _type(hints[f.name]), _default(f), _prose(texts[f.name])) for f in options
    ]
    return _table((title, "type", "default", "meaning"), rows)


def _type(hint: Any) -> str:
    """A type in words; a null is left out, for the default shows it."""
    args = [arg for arg in get_args(hint) if arg is not NoneType]
    if set(get_args(MemorySize)) <= set(args):
        return "memory size"
    if get_origin(hint) is Literal:
        return ", ".join(f"`{json.dumps(arg)}`" for arg in args)
    if get_origin(hint) is tuple:
        return f"list of {_type(args[0])}s"
    if len(args) == 1:
        return _type(args[0])
    if get_origin(hint) in (Union, UnionType):
        return ", ".join(map(_type, args))
    return _WORDS.get(hint, "object")


def _default(option: Field[Any]) -> str:
    if option.default_factory is not MISSING:
        return f"`{json.dumps(option.default_factory())}`"
    return "required" if option.default is MISSING else f"`{json.dumps(option.default)}`"


def _prose(text: str) -> str:
    """A docstring's text as Markdown: paragraphs on one line each, JSON's word for None."""
    paragraphs = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    text = "\n\n".join(paragraphs).replace("``", "`")
    text = re.sub(r"\bNone\b", "`null`", text)
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
    text = re.sub(r"(?<!<)(https://[^\s)]+)", r"<\1>", text)
    return text[:1].upper() + text[1:]


def _first_paragraph(text: str) -> str:
    """What a docstring says first; the pages about the class have the rest."""
    return _prose(text.strip().partition("\n\n")[0])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_reference(), encoding="utf-8")
