"""What is not served together: one table of modes, and of the flags and keys that each excludes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hisparse.algorithms import build_algorithm
from hisparse.config import EXTENSIONS, HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.sglang.features.speculation import DRAFT_MODELS

__all__ = ["Start", "check_combinations"]


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
class _Option:
    """A flag or a key.

    Attributes:
        given: the option as the start has it, flags with their value; "": it is not given.
        expected: what to give in its place.
    """

    given: Callable[[Start], str]
    expected: str


def _above_one(flag: str, size: Callable[[Any], int | None]) -> _Option:
    """A number of ranks; ``size`` takes SGLang's arguments."""

    def given(start: Start) -> str:
        number = size(start.args) or 1
        return f"{flag} {number}" if number > 1 else ""

    return _Option(given=given, expected=f"{flag} 1")


def _attention_replicas(args: Any) -> int:
    # SGLang turns `--dp-size N --enable-dp-attention` into `--attn-dp-size N`.
    size = int(args.attn_dp_size)
    return max(size, int(args.dp_size)) if args.enable_dp_attention else size


def _speculation(start: Start) -> str:
    name = start.args.speculative_algorithm
    return "" if name in (None, "NONE") else f"--speculative-algorithm {name}"


def _draft_model(start: Start) -> str:
    return _speculation(start) if start.args.speculative_algorithm in DRAFT_MODELS else ""


def _draft_dtype(start: Start) -> str:
    dtype = start.args.speculative_draft_kv_cache_dtype
    return "" if dtype in (None, "auto") else f"--speculative-draft-kv-cache-dtype {dtype}"


def _set(flag: str, field: str) -> _Option:
    """A flag without a value; ``field`` of SGLang's arguments."""
    return _Option(
        given=lambda start: flag if getattr(start.args, field) else "",
        expected="it unset",
    )


def _disaggregation(*modes: str) -> Callable[[Start], str]:
    def given(start: Start) -> str:
        mode = start.args.disaggregation_mode
        return f"--disaggregation-mode {mode}" if mode in modes else ""

    return given


def _storage(start: Start) -> str:
    linker = start.args.enable_unified_cache_external_linker
    return "storage" if linker or start.config.storage is not None else ""


def _offloaded(start: Start) -> str:
    mode = getattr(start.args, "offload_mode", "cpu")
    offloads = mode != "cpu" and start.args.offload_group_size > 0
    return f"--offload-mode {mode}" if offloads else ""


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


RANKS: Final = _above_one("--tp-size", lambda args: args.tp_size)
PIPELINE: Final = _above_one("--pp-size", lambda args: args.pp_size)
ATTENTION_REPLICAS: Final = _above_one("--attn-dp-size", _attention_replicas)
REPLICAS: Final = _above_one(
    "--dp-size", lambda args: 1 if args.enable_dp_attention else args.dp_size
)
SPECULATION: Final = _Option(given=_speculation, expected="no --speculative-algorithm")
#: Weights of which this process has shapes alone, so that its fingerprint does not tell them apart.
OFFLOADED: Final = _Option(given=_offloaded, expected="--offload-mode cpu")
#: SGLang moves experts between ranks while it serves, and reads missing ones from files.
EPLB: Final = _Option(
    given=lambda start: "--enable-eplb true" if getattr(start.args, "enable_eplb", False) else "",
    expected="it unset",
)
DRAFT_MODEL: Final = _Option(given=_draft_model, expected="no --speculative-algorithm")
PREFILL_OR_DECODE: Final = _Option(
    given=_disaggregation("prefill", "decode"), expected="no --disaggregation-mode"
)
DECODE: Final = _Option(given=_disaggregation("decode"), expected="no --disaggregation-mode")

STORAGE: Final = _Option(given=_storage, expected="no storage")
GPU: Final = _Option(
    given=lambda start: "" if start.device == "cpu" else f"device {start.device}", expected="cpu"
)
EXTENSION: Final = _Option(
    given=lambda start: next(iter(start.config.extensions), ""), expected="no extension"
)
#: Extensions that need all layers in one process.
EXTENSION_OF_ALL_LAYERS: Final = _Option(
    given=_extension_of_all_layers, expected="no extension that needs all layers"
)
OVERLAP: Final = _Option(
    given=lambda start: "overlap: true" if start.config.overlap else "", expected="overlap: false"
)
REUSED_LAYERS: Final = _Option(
    given=lambda start: (
        f"reuse_layers: {start.config.reuse_layers}" if start.config.reuse_layers > 1 else ""
    ),
    expected="reuse_layers: 1",
)
#: See ``parallel_flags.py``.
CUDA_GRAPHS: Final = _Option(
    given=lambda start: "cuda_graph: true" if start.config.cuda_graph is True else "",
    expected='cuda_graph: "auto"',
)
#: SGLang's own pools are layer_first, and moved bytes are in their order.
OTHER_LAYOUT: Final = _Option(given=_other_layout, expected="host_layout: layer_first")
PROMPT_QUERIES: Final = _Option(
    given=_prompt_queries, expected="an algorithm that needs K alone: sketch, quest"
)

#: Options of draft models that have not been tried.
UNTRIED_DRAFTS: Final = (
    _set("--enable-mixed-chunk", "enable_mixed_chunk"),
    _Option(given=_draft_dtype, expected="it unset"),
    _set("--enable-multi-layer-eagle", "enable_multi_layer_eagle"),
    _set("--speculative-adaptive", "speculative_adaptive"),
    _set("--speculative-use-rejection-sampling", "speculative_use_rejection_sampling"),
    _set("--speculative-token-map", "speculative_token_map"),
    _set("--enable-lora", "enable_lora"),
)

#: A mode, and what it is not served with. Each pair stands here once.
EXCLUDED: Final[Mapping[_Option, tuple[_Option, ...]]] = {
    SPECULATION: (
        GPU,
        ATTENTION_REPLICAS,
        REPLICAS,
        RANKS,
        PIPELINE,
        EXTENSION,
        OVERLAP,
        STORAGE,
    ),
    DRAFT_MODEL: UNTRIED_DRAFTS,
    PREFILL_OR_DECODE: (
        ATTENTION_REPLICAS,
        REPLICAS,
        RANKS,
        PIPELINE,
        SPECULATION,
        OTHER_LAYOUT,
        STORAGE,
    ),
    DECODE: (PROMPT_QUERIES,),
    PIPELINE: (STORAGE, EXTENSION_OF_ALL_LAYERS, REUSED_LAYERS),
    ATTENTION_REPLICAS: (STORAGE, CUDA_GRAPHS),
    EPLB: (STORAGE,),
    OFFLOADED: (STORAGE,),
}


def check_combinations(start: Start) -> None:
    """Check that hisparse serves together what a server is started with.

    Raises:
        ConfigError: names the first mode and what it does not go with.
    """
    for mode, others in EXCLUDED.items():
        flag, _, value = mode.given(start).partition(" ")
        if not flag:
            continue
        for other in others:
            if got := other.given(start):
                raise ConfigError(
                    f"{flag} is {value}, which does not go with {got} yet; expected "
                    f"{other.expected}"
                )
