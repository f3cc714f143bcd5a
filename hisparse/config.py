"""The settings: the one home of their names, types, defaults and rules."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_type_hints

from hisparse.errors import ConfigError, unknown_name
from hisparse.options import check_type, matches, type_words
from hisparse.types import HostLayout, SelectionScope

if TYPE_CHECKING:
    from hisparse.algorithms import BaseSparseAlgorithm

__all__ = [
    "HiSparseConfig",
    "MemorySize",
    "algorithm_from_options",
    "build_algorithm",
    "format_bytes",
    "resolve_memory",
]

#: Bytes, a size such as "64GiB", or a fraction in (0, 1) of what is free.
MemorySize = int | float | str

_ALIASES: Final = {"top_k": "budget"}
_REPLACED: Final = {
    "host_to_device_ratio": "host_memory",
    "min_sparse_prompt_len": "min_sparse_context",
}
_NOT_BUILT: Final = {"numa_node": None}
_UNITS: Final = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


@dataclass(frozen=True, kw_only=True)
class HiSparseConfig:
    """What can be configured. Every value is checked when it is set; ``ConfigError`` otherwise.

    Attributes:
        algorithm: registered name of the algorithm that selects pages.
        algorithm_config: the algorithm's own options; see :func:`build_algorithm`.
        budget: tokens attended per decode step and row: sinks, recent pages and the tail page
            included. Multiple of ``page_size``. Alias ``top_k``.
        device_buffer_size: tokens, device pages that every row has at least; multiple of
            ``page_size``, at least ``budget``. None becomes twice the budget.
        max_row_capacity: tokens, device pages that a row may grow to; None: the model's context
            length, cut to what sizing allows.
        page_size: tokens per page.
        num_sink_pages: first pages of a sequence that are always selected.
        num_recent_pages: last full pages that are always selected.
        selection_scope: who shares a selection; None: what algorithm and adapter do best.
        min_sparse_context: tokens; contexts up to this length are attended densely.
        dense_layers: layers that are always attended densely; None: none.
        reuse_layers: layers that share a selection: that of the first of them.
        tail_estimate: attend over what was not selected as well, each page as one token, its mean.
        speculate: attend what another query selected, whose pages are brought in ahead: "step",
            that of the previous step; "layer", one predicted from what the layer before gets.
            None: every query selects for itself.
        speculation_threshold: a selection made ahead is kept while the cosine of the two queries,
            averaged over the query heads that share it, is above this; 1 keeps none, -1 every one.
        overlap: "transfers": they run beside compute on side streams, tokens stay the same bit for
            bit; "attention": also over pages that are there while others arrive, which rounds
            differently; None: nothing overlaps. Not yet run on a GPU.
        host_memory: for the KV cache, per node; see ``MemorySize``.
        device_memory: cap on device pages, representations, tables and staging; None: what the
            server has to give.
        host_layout: how host memory is ordered; None: chosen.
        numa_node: where host memory lies. Only None (anywhere) so far.
        staging_bytes: device memory that prefixes are streamed through; None: chosen.
        kv_cache_dtype: how K and V are stored: "auto", as the model computes them, or "fp8_e4m3",
            with a scale for each token and head. In a server the same as ``--kv-cache-dtype``.
        adapter: attention backend; None: chosen.
        checked: check selections at every step; slow, for tests and new algorithms.
        cuda_graph: capture SGLang's decode steps in CUDA graphs; not yet run on a GPU.
    """

    algorithm: str = "quest"
    algorithm_config: Mapping[str, Any] = field(default_factory=dict)
    budget: int = 2048
    device_buffer_size: int = cast(int, None)
    max_row_capacity: int | None = None
    page_size: int = 16
    num_sink_pages: int = 1
    num_recent_pages: int = 2
    selection_scope: SelectionScope | None = None
    min_sparse_context: int = 0
    dense_layers: tuple[int, ...] | None = None
    reuse_layers: int = 1
    tail_estimate: bool = False
    speculate: Literal["step", "layer"] | None = None
    speculation_threshold: float = 0.9
    overlap: Literal["transfers", "attention"] | None = None
    host_memory: MemorySize = 0.7
    device_memory: MemorySize | None = None
    host_layout: HostLayout | None = None
    numa_node: int | None = None
    staging_bytes: int | None = None
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    adapter: str | None = None
    checked: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        if self.device_buffer_size is None and matches(self.budget, int):
            self._set("device_buffer_size", 2 * self.budget)
        for name, hint in get_type_hints(type(self)).items():
            check_type(name, getattr(self, name), hint)
        self._set("algorithm_config", MappingProxyType(dict(self.algorithm_config)))
        if self.dense_layers is not None:
            self._set("dense_layers", tuple(self.dense_layers))
        for name, works in _NOT_BUILT.items():
            if getattr(self, name) != works:
                raise ConfigError(
                    f"{name}: got {getattr(self, name)!r}, but this is not there yet; "
                    f"the value that works is {json.dumps(works)}"
                )
        self._check_ranges()
        self._check_sizes()
        if self.cuda_graph:
            self._check_cuda_graph()

    @property
    def stores_fp8(self) -> bool:
        """Whether K and V are stored in eight bits."""
        return self.kv_cache_dtype == "fp8_e4m3"

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        least = {
            "budget": 1,
            "device_buffer_size": 1,
            "page_size": 1,
            "num_sink_pages": 0,
            "num_recent_pages": 0,
            "reuse_layers": 1,
            "min_sparse_context": 0,
            "staging_bytes": 1,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}: got {value}, expected at least {low}")
        if not -1 <= self.speculation_threshold <= 1:
            raise ConfigError(
                f"speculation_threshold: got {self.speculation_threshold}, expected a cosine from "
                "-1 (never correct) to 1 (always correct)"
            )
        layers = self.dense_layers or ()
        if len(set(layers)) < len(layers) or min(layers, default=0) < 0:
            raise ConfigError(
                f"dense_layers: got {list(layers)}, expected different layer numbers from 0"
            )
        _parse_memory("host_memory", self.host_memory)
        if self.device_memory is not None:
            _parse_memory("device_memory", self.device_memory)

    def _check_sizes(self) -> None:
        page = self.page_size
        for name in ("budget", "device_buffer_size", "max_row_capacity"):
            value = getattr(self, name)
            if value is not None and value % page:
                raise ConfigError(
                    f"{name}: got {value}, expected a multiple of page_size ({page}), "
                    f"such as {max(1, value // page) * page} or {(value // page + 1) * page}"
                )
        for name, least in (
            ("device_buffer_size", "budget"),
            ("max_row_capacity", "device_buffer_size"),
        ):
            value, low = getattr(self, name), getattr(self, least)
            if value is not None and value < low:
                raise ConfigError(f"{name}: got {value}, expected at least {least} ({low})")
        if self.tail_estimate and page == 1:
            raise ConfigError(
                "tail_estimate: got true with page_size 1, whose pages are their own means; "
                "expected page_size above 1, or tail_estimate false"
            )
        pages = self.num_sink_pages + self.num_recent_pages + 2
        if self.budget < pages * page:
            raise ConfigError(
                f"budget: got {self.budget}, expected at least {pages * page}: num_sink_pages "
                f"({self.num_sink_pages}) + num_recent_pages ({self.num_recent_pages}) + the page "
                f"being filled + 1 chosen page, of page_size ({page}) tokens each"
            )

    def _check_cuda_graph(self) -> None:
        """A captured step has no way to read a dense context from host memory."""
        for name, got, expected in (
            ("checked", self.checked, "false, for checks wait for the device"),
            ("dense_layers", list(self.dense_layers or ()), "none, whose contexts may be long"),
        ):
            if got:
                raise ConfigError(f"cuda_graph: got true and {name} {got}, expected {expected}")
        if self.min_sparse_context > self.device_buffer_size:
            raise ConfigError(
                f"cuda_graph: got true and min_sparse_context {self.min_sparse_context}, expected "
                f"at most device_buffer_size ({self.device_buffer_size}), which every row has"
            )

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> HiSparseConfig:
        """The settings in ``mapping``, defaults for the others."""
        names = [f.name for f in fields(cls)]
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            if key in _REPLACED:
                raise ConfigError(f"{key}: not a key of hisparse, {_REPLACED[key]} takes its place")
            if key not in names and key not in _ALIASES:
                raise ConfigError(unknown_name("config key", str(key), [*names, *_ALIASES]))
            name = _ALIASES.get(key, key)
            if name in values:
                aliases = [a for a, n in _ALIASES.items() if n == name]
                raise ConfigError(
                    f"got both {name} and {aliases[0]}, which is another name for it; "
                    "expected one of the two"
                )
            values[name] = value
        return cls(**values)

    @classmethod
    def parse(cls, text: str | None) -> HiSparseConfig:
        """The settings in a JSON object or, as ``@path``, in a file that holds one.

        Args:
            text: what ``--hisparse-config`` was given; None or "" for the defaults.
        """
        text = (text or "").strip()
        if not text:
            return cls()
        source = "--hisparse-config"
        if text.startswith("@"):
            source = text[1:]
            try:
                text = Path(source).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not UTF-8 text"
                raise ConfigError(f"--hisparse-config: cannot read {source!r}: {reason}") from None
        try:
            value = json.loads(text, object_pairs_hook=_unique_keys)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{source}: not JSON at line {error.lineno} column {error.colno}: {error.msg}; "
                'expected an object such as {"budget": 2048}, or @file.json'
            ) from None
        if not isinstance(value, dict):
            raise ConfigError(
                f"{source}: got {reprlib.repr(value)} ({type(value).__name__}), "
                'expected an object such as {"budget": 2048}'
            )
        return cls.from_dict(value)

    def effective(self) -> dict[str, Any]:
        """Every key and its value, ready for JSON and for the log at start."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["algorithm_config"] = dict(self.algorithm_config)
        values["dense_layers"] = None if self.dense_layers is None else list(self.dense_layers)
        return values


def build_algorithm(config: HiSparseConfig) -> BaseSparseAlgorithm:
    """The algorithm that ``config`` names, with the options of ``algorithm_config``."""
    from hisparse.algorithms import ALGORITHMS

    name = config.algorithm
    return algorithm_from_options(ALGORITHMS.get(name), name, config.algorithm_config)


def algorithm_from_options(
    cls: type[Any], name: str, options: Mapping[str, Any]
) -> BaseSparseAlgorithm:
    """An instance of an algorithm's class with options from JSON.

    Args:
        cls: the dataclass.
        name: of the algorithm, for messages.
        options: those that are not given keep their defaults.

    Raises:
        ConfigError: an option is unknown, missing, of the wrong type or out of range.
    """
    known = {f.name: f for f in fields(cls) if f.init}
    hints = get_type_hints(cls)
    values = {}
    for key, value in options.items():
        if key not in known:
            raise ConfigError(unknown_name(f"{name} option", key, known))
        check_type(f"algorithm_config.{key}", value, hints[key])
        values[key] = tuple(value) if isinstance(value, list) else value
    for key, option in known.items():
        if key not in values and option.default is option.default_factory is MISSING:
            raise ConfigError(
                f"algorithm_config.{key}: got nothing, but {name} expects {type_words(hints[key])}"
            )
    try:
        return cast("BaseSparseAlgorithm", cls(**values))
    except ValueError as error:
        raise ConfigError(f"algorithm_config: {error}") from error


def resolve_memory(value: MemorySize, free_bytes: int, what: str) -> int:
    """Bytes that a setting stands for.

    Args:
        value: see ``MemorySize``.
        free_bytes: what the machine has to give.
        what: the setting's name, for the message.

    Raises:
        ConfigError: it is more than ``free_bytes``.
    """
    size = _parse_memory(what, value)
    num_bytes = int(size * free_bytes) if isinstance(size, float) else size
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{what}: got {value!r} = {format_bytes(num_bytes)}, but {format_bytes(free_bytes)} "
            "is free; expected a smaller size, or a fraction in (0, 1) of what is free"
        )
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """A size for people, such as "1.5 GiB"."""
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _parse_memory(what: str, value: MemorySize) -> int | float:
    """Bytes as int, or a fraction as float."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ConfigError(
                f"{what}: got {value!r}, expected a size such as '64GiB' "
                f"(units: {', '.join(_UNITS)})"
            )
        value = int(float(match[1]) * units[match[2].lower()])
    if isinstance(value, float) and not 0 < value < 1:
        raise ConfigError(f"{what}: got {value}, expected a fraction in (0, 1) or whole bytes")
    if value <= 0:
        raise ConfigError(f"{what}: got {value} bytes, expected more than 0")
    return value


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"config key {twice!r} is given more than once; expected it once")
    return result
