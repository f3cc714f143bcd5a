"""The settings: their names, types, defaults and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, Literal, get_type_hints

from hisparse.errors import ConfigError, quoted, unknown_name
from hisparse.options import StorageOptions, check_type, from_options, object_of, read_storage
from hisparse.registry import Registry
from hisparse.types import Attention, HostLayout, SelectionScope
from hisparse.units import MemorySize, parse_memory

#: Extensions by name: subclasses of ``hisparse.engine.extensions.base.Extension``. Each name is
#: also a configuration key. ``options_type`` is the type of its value; ``check`` rejects
#: incompatible settings.
EXTENSIONS: Registry[Any] = Registry(
    "extension", package="hisparse.engine.extensions", entry_point_group="hisparse.extensions"
)

#: Storage formats by ``kv_cache_dtype``, of K and V and of latents (MLA): subclasses of
#: ``hisparse.cache.formats.KVFormat``.
KV_FORMATS: Registry[Any] = Registry(
    "kv_cache_dtype", package="hisparse.cache.formats", entry_point_group="hisparse.kv_formats"
)
LATENT_FORMATS: Registry[Any] = Registry(
    "kv_cache_dtype of latents (MLA)",
    package="hisparse.cache.formats",
    entry_point_group="hisparse.latent_formats",
)
#: Both by ``KVSpec.attention``.
FORMATS: Final[Mapping[Attention, Registry[Any]]] = {"GQA": KV_FORMATS, "MLA": LATENT_FORMATS}

_ALIASES: Final = {"top_k": "budget"}
_NO_PREFETCH: Final = (
    "a larger device_buffer_size takes its place; guesses of the next pages missed too often"
)
#: Keys of upstream's HiSparse and of earlier versions, and their replacements.
_REPLACED: Final = {
    "host_to_device_ratio": "host_memory takes its place",
    "min_sparse_prompt_len": "min_sparse_context takes its place",
    "prefetch": _NO_PREFETCH,
    "speculate": _NO_PREFETCH,
    "speculation_threshold": _NO_PREFETCH,
    "overlap": "transfers run in order, for beside compute they brought nothing",
    "numa_node": "a GPU's node holds the pool if it fits; numactl chooses another node",
    "layer_metrics": "a trace has the hits of each layer",
}
#: Page size of a server, tokens, for algorithms that select single tokens.
_TOKEN_WISE_PAGE_SIZE: Final = 16


@dataclass(frozen=True, kw_only=True)
class HiSparseConfig:
    """The settings of hisparse. Types, ranges and sizes are checked when an object is made.

    The names and options of algorithms and adapters, and what depends on the model, are checked
    when a server or a cache is built.

    Raises:
        ConfigError: a value has the wrong type, is out of range or contradicts another one.

    Attributes:
        algorithm: name of the algorithm that selects pages; ``hisparse algorithms`` lists them.
        algorithm_config: options of the algorithm.
        budget: tokens that a decode step attends in each row: sinks, recent pages and the page
            being filled included. Multiple of ``page_size``. ``top_k`` is an alias.
        device_buffer_size: tokens that each row's device pages hold at least. Multiple of
            ``page_size``, at least ``budget``. None: twice the budget.
        max_row_capacity: tokens that each row's device pages may grow to. Multiple of
            ``page_size``. None: the model's context length, cut to what fits.
        page_size: tokens per page, the unit of selection and transfer.
        num_sink_pages: first pages of a sequence, which are always selected.
        num_recent_pages: last full pages of a sequence, which are always selected.
        selection_scope: heads that share a selection: all of a layer, the query heads of a KV
            head, or none. None: the algorithm's best scope that the adapter can serve.
        min_sparse_context: tokens. Contexts up to this length are attended densely.
        dense_layers: layers, counted from 0, that are always attended densely. None: no layer.
        reuse_layers: consecutive layers in a group. The first one selects for all of them.
        miss: what happens to selected pages that are not on the device: "transfer" loads them,
            "host" lets the CPU attend them in host memory meanwhile, "auto" does that on a GPU in
            steps of enough requests to gain by it, as measured at start. No GPU has run either.
        host_memory: host memory for the KV cache, per node. A fraction is of the free memory.
        device_memory: cap on device pages, representations, tables and staging. A fraction is of
            what the server profiles. None: all of that.
        host_layout: order of K and V in host memory. None: "layer_first" for the selection scope
            "layer", else "page_head".
        staging_bytes: device memory of one staging tile, through which prefixes are streamed.
            None: chosen.
        kv_cache_dtype: how K and V are stored: "auto" in the model's dtype, "fp8_e4m3" or "int8" in
            eight bits with a scale for each token and head. Latents (MLA) take "fp8_e4m3", with a
            scale for each 128 channels. In a server the same as ``--kv-cache-dtype``.
        adapter: name of the adapter, the attention library. None: chosen and logged.
        checked: verify scores, selections and resident bytes in every step. Slow, for tests and new
            algorithms.
        cuda_graph: capture SGLang's decode steps in CUDA graphs. "auto" captures them on a GPU with
            CUDA kernels, unless ``checked`` is true.
        storage: keep prefixes in a store below host memory, where a restarted or another server
            finds them. Only in a server. The options are below. None: no store.
        extensions: options by the name of the extension (``tail_estimate``, ``trace``). In JSON
            each name is a key of its own: ``true`` for the defaults, an object of options or, where
            the options name a ``text_option``, only the text.
    """

    algorithm: str = "sketch"
    algorithm_config: Mapping[str, Any] = field(default_factory=dict)
    budget: int = 2048
    device_buffer_size: int | None = None
    max_row_capacity: int | None = None
    page_size: int = 16
    num_sink_pages: int = 1
    num_recent_pages: int = 2
    selection_scope: SelectionScope | None = None
    min_sparse_context: int = 0
    dense_layers: tuple[int, ...] | None = None
    reuse_layers: int = 1
    miss: Literal["transfer", "host", "auto"] = "transfer"
    host_memory: MemorySize = 0.7
    device_memory: MemorySize | None = None
    host_layout: HostLayout | None = None
    staging_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    adapter: str | None = None
    checked: bool = False
    cuda_graph: Literal["auto", True, False] = "auto"
    storage: StorageOptions | None = None
    extensions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._set("storage", read_storage(self.storage))
        for name, hint in get_type_hints(type(self)).items():
            check_type(name, getattr(self, name), hint)
        self._set("algorithm_config", MappingProxyType(dict(self.algorithm_config)))
        if self.dense_layers is not None:
            self._set("dense_layers", tuple(self.dense_layers))
        self._check_ranges()
        self._check_sizes()
        if self.kv_cache_dtype != "auto":
            find_format(self.kv_cache_dtype)
        if self.cuda_graph is True and self.checked:
            raise ConfigError(
                'cuda_graph: got true and checked true, expected "auto" or false, because checks '
                "wait for the device"
            )
        self._set("extensions", MappingProxyType(_read_extensions(self.extensions)))
        for name, options in self.extensions.items():
            EXTENSIONS.get(name).check(options, self)

    @property
    def min_row_tokens(self) -> int:
        """``device_buffer_size``, in tokens, or its default."""
        size = self.device_buffer_size
        return 2 * self.budget if size is None else size

    def not_captured(self, device_type: str) -> str | None:
        """The reason why the settings do not let decode steps be captured; None: they do.

        Args:
            device_type: device of the model, such as "cuda" or "cpu".
        """
        if self.cuda_graph is False:
            return "cuda_graph is false"
        if device_type != "cuda":
            return f"the device is {device_type}"
        return "checked is true" if self.checked else None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        minimums = {
            "budget": 1,
            "device_buffer_size": 1,
            "page_size": 1,
            "num_sink_pages": 0,
            "num_recent_pages": 0,
            "reuse_layers": 1,
            "min_sparse_context": 0,
            "staging_bytes": 1,
        }
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}: got {value}, expected at least {minimum}")
        layers = self.dense_layers or ()
        if len(set(layers)) < len(layers) or min(layers, default=0) < 0:
            raise ConfigError(
                f"dense_layers: got {list(layers)}, expected different layer numbers from 0"
            )
        parse_memory("host_memory", self.host_memory)
        if self.device_memory is not None:
            parse_memory("device_memory", self.device_memory)

    def _check_sizes(self) -> None:
        page = self.page_size
        pages = self.num_sink_pages + self.num_recent_pages + 2
        parts = (
            f"{pages * page}: num_sink_pages ({self.num_sink_pages}) + num_recent_pages "
            f"({self.num_recent_pages}) + the page being filled + 1 chosen page, of page_size "
            f"({page}) tokens each"
        )
        device = self.min_row_tokens
        for name, minimum, words in (
            ("budget", pages * page, parts),
            ("device_buffer_size", self.budget, f"budget ({self.budget})"),
            ("max_row_capacity", device, f"device_buffer_size ({device})"),
        ):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}: got {value}, expected at least {words}")
            if value is not None and value % page:
                raise ConfigError(
                    f"{name}: got {value}, expected a multiple of page_size ({page}), "
                    f"such as {value // page * page} or {(value // page + 1) * page}"
                )

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> HiSparseConfig:
        """Build settings from ``mapping``; missing keys get their defaults.

        Raises:
            ConfigError: a key is unknown, replaced or given twice, or a value is invalid.
        """
        names = cls.keys()
        values: dict[str, Any] = {}
        extensions: dict[str, Any] = {}
        for key, value in mapping.items():
            if key in _REPLACED:
                raise ConfigError(f"{key}: not a key of hisparse, {_REPLACED[key]}")
            if key not in names and key not in _ALIASES:
                raise ConfigError(unknown_name("config key", str(key), [*names, *_ALIASES]))
            name = _ALIASES.get(key, key)
            if name in values:
                aliases = [a for a, n in _ALIASES.items() if n == name]
                raise ConfigError(
                    f"got both {name} and its alias {aliases[0]}, expected one of the two"
                )
            target = extensions if name in EXTENSIONS else values
            target[name] = value
        return cls(**values, extensions=extensions)

    @classmethod
    def core_keys(cls) -> list[str]:
        """Every key but those of the extensions, without aliases."""
        return [f.name for f in fields(cls) if f.name != "extensions"]

    @classmethod
    def keys(cls) -> list[str]:
        """Every key of a JSON object of settings, without aliases."""
        return cls.core_keys() + list(EXTENSIONS)

    @classmethod
    def parse(cls, text: str | None, **flags: Any) -> HiSparseConfig:
        """Parse a JSON object or, given ``@path``, a file with a JSON object.

        Args:
            text: value of ``--hisparse-config``; None or "": the defaults.
            flags: settings that other flags give; they win.

        Raises:
            ConfigError: the file cannot be read, or the text is not a valid object of settings.
        """
        text = (text or "").strip(" \t\r\n")  # What JSON calls white space.
        if not text:
            return cls.from_dict(flags)
        flag, example = "--hisparse-config", '{"budget": 2048}, or @file.json'
        return cls.from_dict(object_of(text, flag, example) | flags)

    @property
    def server_page_size(self) -> int:
        """Default of SGLang's ``--page-size``, and of the pages in a store, in tokens."""
        return self.page_size if self.page_size > 1 else _TOKEN_WISE_PAGE_SIZE

    def effective(self) -> dict[str, Any]:
        """Every key and its value, ready for JSON and for the log at start.

        The value of an enabled extension is its options, that of any other ``False``.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["device_buffer_size"] = self.min_row_tokens
        values["algorithm_config"] = dict(self.algorithm_config)
        values["dense_layers"] = None if self.dense_layers is None else list(self.dense_layers)
        values["storage"] = None if self.storage is None else asdict(self.storage)
        enabled = values.pop("extensions")
        off = dict.fromkeys(EXTENSIONS, False)
        return values | off | {name: asdict(options) for name, options in enabled.items()}


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The settings of one rank once the model, the device and the adapter have decided the rest.

    Attributes:
        config: what the user has set. Its ``device_buffer_size``, ``dense_layers``,
            ``selection_scope`` and ``host_layout`` do not hold: the values below do.
        device_buffer_size: tokens that each row's device pages hold at least: also a window.
        dense_layers: among this rank's layers, counted from its first one.
        scope: selection scope.
        layout: order of K and V in host memory.
        captured: whether decode steps are captured in CUDA graphs.
    """

    config: HiSparseConfig
    device_buffer_size: int
    dense_layers: frozenset[int]
    scope: SelectionScope
    layout: HostLayout
    captured: bool


def find_format(name: str) -> type[Any]:
    """The storage format of K and V with this name, or that of latents if only these have one.

    Raises:
        ConfigError: neither has; the message names those that exist.
    """
    for formats in FORMATS.values():
        if name in formats:
            return formats.get(name)
    raise ConfigError(unknown_name("kv_cache_dtype", name, {*KV_FORMATS, *LATENT_FORMATS}))


def _read_extensions(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the enabled extensions, by name."""
    enabled = {}
    for name, value in given.items():
        options_type = EXTENSIONS.get(name).options_type
        if isinstance(value, options_type):
            enabled[name] = value
        elif isinstance(value, Mapping):
            enabled[name] = from_options(options_type, name, name, value)
        elif value is True:
            enabled[name] = options_type()
        elif isinstance(value, str) and (option := getattr(options_type, "text_option", None)):
            enabled[name] = from_options(options_type, name, name, {option: value})
        elif value is not False and value is not None:
            choices = ", ".join(f.name for f in fields(options_type)) or "none"
            raise ConfigError(
                f"{name}: got {quoted(value)} ({type(value).__name__}), expected true, false "
                f"or an object of options (options: {choices})"
            )
    return enabled
