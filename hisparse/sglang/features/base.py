"""The contract of a feature of the server: what it declares, and when it is called.

At the end stand the flags, keys and kinds of models that a feature serves or is not served with.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from hisparse.algorithms import ALGORITHMS, build_algorithm
from hisparse.config import EXTENSIONS, HiSparseConfig
from hisparse.model_config import LIGHTNING_INDEXER
from hisparse.sglang.models import ModelShape, Trained, check_trained, hybrid_layers, name_of
from hisparse.sglang.session import ServerSession

logger = logging.getLogger("hisparse")


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a server is started with.

    Attributes:
        args: SGLang's ``ServerArgs``, not yet resolved.
        config: the settings.
        device: the type of device that SGLang will use, such as "cuda".
    """

    args: Any
    config: HiSparseConfig
    device: str


@dataclass(frozen=True, kw_only=True)
class Option:
    """A flag or a key.

    Attributes:
        given: the option as the start has it, flags with their value; "": it is not given.
        expected: what to give in its place.
        feature: name of the feature that serves it; "": it needs none.
    """

    given: Callable[[Start], str]
    expected: str
    feature: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """A kind of model that only a feature serves.

    Attributes:
        found: whether SGLang's ``ModelConfig`` is of the kind.
        expected: another kind, in words.
        feature: name of the feature.
    """

    found: Callable[[Any], bool]
    expected: str
    feature: str


@dataclass(frozen=True, kw_only=True)
class IndexerKind(ModelKind):
    """Models that were trained to attend what an indexer of their own selects.

    Attributes:
        feature: also what an algorithm for these models names in ``indexer``.
        fields: those with which the model's configuration says how it selects.
        trained: takes the configuration of a decoder; None: it has no such indexer.
    """

    fields: frozenset[str]
    trained: Callable[[Any], Trained | None]


@dataclass(frozen=True)
class Flag:
    """A flag of SGLang of which hisparse supports some values; unset is always supported.

    Attributes:
        field: of SGLang's ``ServerArgs``.
        values: the supported ones.
        flag: as the command line has it.
    """

    field: str
    values: tuple[object, ...]
    flag: str


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Resources that a feature needs beyond those of requests.

    Attributes:
        request_slots: request slots beyond those of running requests.
        context_tokens: tokens of a request beyond the end of a context.
        device_token_bytes: device memory of a token in a pool of SGLang's own.
        sglang_token_bytes: what SGLang adds to its own bytes of a token, from which it sizes pools.
    """

    request_slots: int = 0
    context_tokens: int = 0
    device_token_bytes: int = 0
    sglang_token_bytes: int = 0


class Feature:
    """Base class; a feature is one instance, ``FEATURE`` of a module or package in this folder.

    A server has the features that are on: their hooks are installed, and their methods are called
    in the order below. A feature keeps its state of a server in an object that it adds to the
    session.
    """

    #: Of the module.
    name: ClassVar[str]
    #: The options that it serves: it is on if one of them is given.
    serves: ClassVar[Sequence[Option]] = ()
    #: The kinds of models that it serves.
    kinds: ClassVar[Sequence[ModelKind]] = ()
    #: The one of them whose indexer it asks.
    indexer: ClassVar[IndexerKind | None] = None
    #: Options that each of its options excludes. A pair of features is listed with one of them.
    excludes: ClassVar[Mapping[Option, Sequence[Option]]] = {}
    #: Flags that it reads or that would change what it reads, with the values that it supports.
    flags: ClassVar[Sequence[Flag]] = ()
    #: Wrappers of SGLang's functions by dotted name. They take the function, then its arguments.
    hooks: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    #: Its counters: name to description, for the metrics.
    counters: ClassVar[Mapping[str, str]] = {}
    #: Whether it captures decode steps in CUDA graphs.
    captures_steps: ClassVar[bool] = False

    # In the process of the command line, before a model loads.

    def is_on(self, start: Start) -> bool:
        """Whether a server has the feature."""
        return any(option.given(start) for option in self.serves)

    def is_for(self, model_config: Any) -> bool:
        """Whether a model needs the feature; ``model_config`` is SGLang's ``ModelConfig``."""
        return any(kind.found(model_config) for kind in self.kinds)

    def prepare(self, start: Start) -> Mapping[str, Any]:
        """Set flags of ``start.args``; returns settings that change, by name.

        Raises:
            ConfigError: flags contradict each other.
        """
        return {}

    @contextmanager
    def adjusting(self, server_args: Any) -> Iterator[None]:
        """A context around SGLang's adjustment of its arguments to a model of the feature."""
        yield

    def check(self, server_args: Any, config: HiSparseConfig) -> None:
        """Check SGLang's resolved arguments, and the model: by default its indexer's settings.

        Raises:
            ConfigError: hisparse does not serve them together.
        """
        if self.indexer is None:
            return
        from sglang.srt.arg_groups.overrides import model_config_of

        model = model_config_of(server_args)
        if trained := self.indexer.trained(model.hf_text_config):
            check_trained(name_of(model), config, trained, server_args.pp_size)

    # In a process with a part of the model.

    def register(self) -> None:
        """Register attention backends; runs in each process in which hooks are installed."""

    def own_layers(
        self, config: HiSparseConfig, shape: ModelShape, configurator: Any
    ) -> Sequence[int] | None:
        """The model's numbers of the layers that attend in this process; None: all layers do.

        Args:
            config: the settings, with the model's numbers of layers.
            shape: of the layers of this process.
            configurator: SGLang's ``KVCacheConfigurator``.
        """
        return None

    def demand(self, configurator: Any, shape: ModelShape) -> Demand:
        """What the feature needs in this process; the arguments are those of ``own_layers``."""
        return Demand()

    def sized(self, session: ServerSession, server_args: Any) -> None:
        """Lower the sizes of this process, or refuse them."""

    def begin(self, session: ServerSession, configurator: Any) -> None:
        """Add the feature's object to a session, before SGLang makes its pools."""

    def pool_class(self, kind: str, *, is_draft: bool) -> type | None:
        """The class of SGLang's kind of KV pool ("mha", "mla", "dsa"); None: the feature has none.

        Args:
            kind: SGLang's name.
            is_draft: whether the pool is that of a draft model, beside the target's.
        """
        return None

    def pool_mixin(self, kind: str) -> type | None:
        """What the feature adds to the methods of the target's pool."""
        return None

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Called after the engine and the attention backend are built."""

    def prepare_draft(self, model: Any) -> None:
        """Change SGLang's draft model before it runs."""

    def batch(self, session: ServerSession, forward_batch: Any) -> Any:
        """The engine's batch of a forward in a mode of the feature's; None: another mode."""
        return None

    def totals(self, session: ServerSession) -> Mapping[str, int]:
        """The counters since the start."""
        return {}


def above_one(flag: str, size: Callable[[Any], int | None], feature: str = "") -> Option:
    """A number of ranks; ``size`` takes SGLang's arguments."""

    def given(start: Start) -> str:
        number = size(start.args) or 1
        return f"{flag} {number}" if number > 1 else ""

    return Option(given=given, expected=f"{flag} 1", feature=feature)


def flag_set(flag: str, field: str) -> Option:
    """A flag without a value; ``field`` of SGLang's arguments."""
    return Option(
        given=lambda start: flag if getattr(start.args, field) else "", expected="it unset"
    )


def _attention_replicas(args: Any) -> int:
    # SGLang turns `--dp-size N --enable-dp-attention` into `--attn-dp-size N`.
    size = int(args.attn_dp_size)
    return max(size, int(args.dp_size)) if args.enable_dp_attention else size


def _speculation(start: Start) -> str:
    name = start.args.speculative_algorithm
    return "" if name in (None, "NONE") else f"--speculative-algorithm {name}"


def _disaggregation(*modes: str) -> Callable[[Start], str]:
    def given(start: Start) -> str:
        mode = start.args.disaggregation_mode
        return f"--disaggregation-mode {mode}" if mode in modes else ""

    return given


def _storage(start: Start) -> str:
    linker = start.args.enable_unified_cache_external_linker
    return "storage" if linker or start.config.storage is not None else ""


def _other_layout(start: Start) -> str:
    layout = start.config.host_layout
    return "" if layout in (None, "layer_first") else f"host_layout: {layout}"


def _extension_of_all_layers(start: Start) -> str:
    names = start.config.extensions
    return next((name for name in names if EXTENSIONS.get(name).needs_all_layers), "")


def _prompt_queries(start: Start) -> str:
    window = build_algorithm(start.config).query_window
    algorithm = f"algorithm {start.config.algorithm}"
    return f"{algorithm}, which needs queries of a prompt's last {window} tokens" if window else ""


def asks_indexer(feature: str) -> Option:
    """An algorithm that asks the models' indexers which a feature serves."""

    def given(start: Start) -> str:
        name = start.config.algorithm
        return f"algorithm {name}" if ALGORITHMS.get(name).indexer == feature else ""

    expected = "an algorithm without an indexer, such as sketch"
    return Option(given=given, expected=expected, feature=feature)


def _has_indexer(model_config: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_dsa

    found = is_deepseek_dsa(model_config.hf_config)
    return bool(found) and _trained(model_config.hf_text_config) is not None


def _trained(text: Any) -> Trained | None:
    budget = getattr(text, "index_topk", None)
    # SGLang passes sinks beside latents in a way of their own, so such models are not served.
    sinks = hasattr(text, "learnable_sink_init")
    if sinks or not (budget and getattr(text, "kv_lora_rank", None)):
        return None
    settings = {"algorithm": "dsa", "page_size": 1, "num_sink_pages": 0, "num_recent_pages": 0}
    return Trained(settings | {"budget": budget}, text.index_head_dim, _unindexed(text))


def _unindexed(text: Any) -> tuple[int, ...]:
    """The layers that attend what the layer before them selected. https://arxiv.org/abs/2603.12201"""
    kinds = getattr(text, "indexer_types", None) or getattr(text, "index_topk_pattern", None)
    layers = range(text.num_hidden_layers)
    if kinds:
        return tuple(x for x, kind in zip(layers, kinds, strict=False) if kind in ("S", "shared"))
    every = getattr(text, "index_topk_freq", None) or 1
    first = getattr(text, "index_skip_topk_offset", None) or 2
    return tuple(x for x in layers if max(x + 1 - first, 0) % every)


#: Models that mix attention with linear attention, convolution or state space layers.
HYBRID: Final = ModelKind(
    found=lambda model_config: hybrid_layers(model_config) is not None,
    expected="a model with attention in every layer",
    feature="hybrids",
)
WITH_INDEXER: Final = IndexerKind(
    found=_has_indexer,
    expected="a model without an indexer",
    feature="dsa",
    fields=LIGHTNING_INDEXER,
    trained=_trained,
)
MODEL_KINDS: Final = (HYBRID, WITH_INDEXER)

RANKS: Final = above_one("--tp-size", lambda args: args.tp_size)
PIPELINE: Final = above_one("--pp-size", lambda args: args.pp_size, "replicas")
ATTENTION_REPLICAS: Final = above_one("--attn-dp-size", _attention_replicas, "replicas")
REPLICAS: Final = above_one(
    "--dp-size", lambda args: 1 if args.enable_dp_attention else args.dp_size, "replicas"
)
SPECULATION: Final = Option(
    given=_speculation, expected="no --speculative-algorithm", feature="speculation"
)
PREFILL_OR_DECODE: Final = Option(
    given=_disaggregation("prefill", "decode"),
    expected="no --disaggregation-mode",
    feature="disaggregation",
)
DECODE: Final = Option(given=_disaggregation("decode"), expected="no --disaggregation-mode")
STORAGE: Final = Option(given=_storage, expected="no storage", feature="storage")
INDEXER: Final = asks_indexer("dsa")
GPU: Final = Option(
    given=lambda start: "" if start.device == "cpu" else f"device {start.device}", expected="cpu"
)
EXTENSION: Final = Option(
    given=lambda start: next(iter(start.config.extensions), ""), expected="no extension"
)
#: Extensions that need all layers in one process.
EXTENSION_OF_ALL_LAYERS: Final = Option(
    given=_extension_of_all_layers, expected="no extension that needs all layers"
)
REUSED_LAYERS: Final = Option(
    given=lambda start: (
        f"reuse_layers: {start.config.reuse_layers}" if start.config.reuse_layers > 1 else ""
    ),
    expected="reuse_layers: 1",
)
CUDA_GRAPHS: Final = Option(
    given=lambda start: "cuda_graph: true" if start.config.cuda_graph is True else "",
    expected='cuda_graph: "auto"',
    feature="cuda_graphs",
)
#: SGLang's own pools are layer_first, and moved bytes are in their order.
OTHER_LAYOUT: Final = Option(given=_other_layout, expected="host_layout: layer_first")
PROMPT_QUERIES: Final = Option(
    given=_prompt_queries,
    expected="an algorithm that needs only K: sketch, quest",
    feature="prompt_queries",
)

#: What only a feature serves, refused without it.
SERVED_BY_FEATURES: Final = (
    PIPELINE, ATTENTION_REPLICAS, REPLICAS, SPECULATION, PREFILL_OR_DECODE, STORAGE, INDEXER,
    CUDA_GRAPHS, PROMPT_QUERIES,
)  # fmt: skip
