"""Every rule on which settings, algorithms, adapters and models are compatible.

The rules read what algorithms, adapters and formats declare; how a step runs follows from the
:class:`SelectionPolicy` instead.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from hisparse.adapters import ADAPTERS, choose_adapter
from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm, build_algorithm
from hisparse.cache.formats import KVFormat, format_of
from hisparse.config import HiSparseConfig, Resolved, find_format
from hisparse.errors import ConfigError
from hisparse.kernels.build.cuda import why_no_cuda
from hisparse.types import KVSpec, SelectionScope

logger = logging.getLogger(__name__)


def not_captured(config: HiSparseConfig, device_type: str) -> str | None:
    """The reason why this machine's decode steps are not captured in CUDA graphs; None: they are.

    Without the CUDA kernels, transfers pass through the host. What Triton's kernels do, PyTorch's
    operators can do in a graph.

    Args:
        device_type: device of the model, such as "cuda" or "cpu".
    """
    reason = config.not_captured(device_type)
    if reason is None and not (config.adapter is None or ADAPTERS.get(config.adapter).capturable):
        reason = f"adapter {config.adapter} does not support it"
    if reason is None and (fault := why_no_cuda()):
        reason = f"there are no CUDA kernels ({fault})"
    return reason


def check_capabilities(config: HiSparseConfig, device_type: str) -> None:
    """Check the rules that do not depend on the model.

    Args:
        device_type: "cuda" or "cpu", the device of the model.

    Raises:
        ConfigError: the algorithm does not support a setting; the message names those that do.
    """
    cls, stored = ALGORITHMS.get(config.algorithm), find_format(config.kv_cache_dtype)

    def takes_page_size(cls: type[BaseSparseAlgorithm]) -> bool:
        return cls.page_sizes is None or config.page_size in cls.page_sizes

    if not takes_page_size(cls):
        others = ", ".join(name for name in ALGORITHMS if takes_page_size(ALGORITHMS.get(name)))
        sizes = ", ".join(map(str, cls.page_sizes or ()))
        raise ConfigError(
            f"algorithm {config.algorithm!r} cannot do page_size {config.page_size} (its page "
            f"sizes: {sizes}); algorithms that can: {others}"
        )
    if device_type != "cpu" and build_algorithm(config).reads_host_keys:
        raise ConfigError(
            f"algorithm {config.algorithm!r} with {dict(config.algorithm_config)}: got device "
            f"{device_type}, expected cpu: it reads keys in host memory"
        )
    choose_scope(config)
    scaled = stored.scaled_name(config.kv_cache_dtype)
    choose_adapter(device_type, None, config.selection_scope, config.adapter, scaled=scaled)


def choose_scope(
    config: HiSparseConfig, stored: KVFormat | type[KVFormat] = KVFormat
) -> SelectionScope:
    """The requested scope, or else the best one of algorithm, adapter and storage format.

    Args:
        config: names the algorithm, the adapter and the scope.
        stored: how K and V are stored; default: a format without limits.

    Raises:
        ConfigError: no such scope; the message names the algorithms that support it.
    """
    adapter, wanted = ADAPTERS.get(config.adapter or "torch"), config.selection_scope

    def scopes_of(name: str) -> list[SelectionScope]:
        possible = set(adapter.scopes) & set(stored.scopes)
        return [scope for scope in ALGORITHMS.get(name).scopes if scope in possible]

    choices = scopes_of(config.algorithm)
    if wanted is None and choices:
        return choices[0]
    if wanted is None or wanted not in choices:
        others = [n for n in ALGORITHMS if (wanted in scopes_of(n) if wanted else scopes_of(n))]
        raise ConfigError(
            f"selection_scope {wanted!r} does not go with algorithm {config.algorithm!r}, adapter "
            f"{config.adapter or 'torch'!r}"
            f"{stored.attention_name and f' and {stored.attention_name}'} "
            f"(choices: {', '.join(choices) or 'none'}; algorithms that can: "
            f"{', '.join(others) or 'none'})"
        )
    return wanted


def stored_spec(config: HiSparseConfig, spec: KVSpec) -> KVSpec:
    """The shapes of a model, with the storage format of ``config``.

    Raises:
        ConfigError: the model's attention has no such format.
    """
    spec = replace(spec, kv_cache_dtype=config.kv_cache_dtype)
    format_of(spec)
    return spec


def resolve_miss(config: HiSparseConfig, spec: KVSpec, device_type: str) -> HiSparseConfig:
    """The settings, with ``miss`` "transfer" for "auto" where the CPU has nothing to gain.

    A CPU's own link is a copy in memory. On a GPU the CPU has to attend what is stored.

    Raises:
        ConfigError: ``miss`` is "host", and on a GPU the CPU would have to decode pages first.
    """
    stored = format_of(spec)
    decodes = stored.page_decoder() is not None
    if config.miss == "auto" and (device_type == "cpu" or decodes):
        return replace(config, miss="transfer")
    if config.miss == "host" and device_type != "cpu" and decodes:
        raise ConfigError(
            f'miss: got "host" with {stored.attention_name} in {spec.kv_cache_dtype} on device '
            f'{device_type}, expected "transfer", or kv_cache_dtype "auto"'
        )
    return config


def row_tokens(config: HiSparseConfig, spec: KVSpec) -> int:
    """Tokens that each row's device pages hold at least: ``device_buffer_size``, or more for the
    windows of the model's layers.

    Raises:
        ConfigError: ``max_row_capacity`` is smaller than a window.
    """
    size = spec.page_size
    needed = -(-spec.widest_window // size) * size
    max_row = config.max_row_capacity
    if max_row is not None and max_row < needed:
        raise ConfigError(
            f"max_row_capacity: got {max_row}, expected at least {needed}: layers of the model "
            f"attend windows of {spec.widest_window} tokens"
        )
    return max(config.min_row_tokens, needed)


def resolve_settings(
    config: HiSparseConfig,
    spec: KVSpec,
    scope: SelectionScope,
    layers: Sequence[int] | None = None,
    *,
    captured: bool = False,
) -> Resolved:
    """The settings for a model.

    Args:
        config: what the user has set.
        spec: shapes of the model's layers, or of those of one rank.
        layers: the model's numbers of these layers, for ``dense_layers``; None: from 0.
        captured: whether decode steps are captured.

    Raises:
        ConfigError: ``dense_layers`` names a layer that does not exist, or ``max_row_capacity`` is
            smaller than a window.
    """
    tokens = row_tokens(config, spec)
    if tokens > config.min_row_tokens:
        logger.info(
            "device_buffer_size: %d is raised to %d, since layers of the model attend windows of "
            "%d tokens",
            config.min_row_tokens,
            tokens,
            spec.widest_window,
        )
    if layers is None:
        check_dense_layers(config, spec)
        layers = range(spec.num_layers)
    dense = config.dense_layers or ()
    return Resolved(
        config=config,
        device_buffer_size=tokens,
        dense_layers=frozenset(n for n, layer in enumerate(layers) if layer in dense),
        scope=scope,
        layout=config.host_layout or ("layer_first" if scope == "layer" else "page_head"),
        captured=captured,
    )


def check_dense_layers(config: HiSparseConfig, spec: KVSpec) -> None:
    """Raise ``ConfigError`` if ``dense_layers`` names a layer that does not exist."""
    bad = sorted(x for x in config.dense_layers or () if x >= spec.num_layers)
    if bad:
        raise ConfigError(
            f"dense_layers: got {bad}, expected layers 0 to {spec.num_layers - 1} of the model"
        )


def check_indexer(name: str, config: HiSparseConfig, indexer: str) -> None:
    """Check that the algorithm asks the model's indexer if, and only if, the model has one.

    Args:
        name: name of the model, for the message.
        config: names the algorithm.
        indexer: the kind of indexer that the model was trained with, such as "dsa"; "": none.

    Raises:
        ConfigError: algorithm and model are incompatible; the message names the alternatives.
    """
    asked = ALGORITHMS.get(config.algorithm).indexer
    if asked and not indexer:
        raise ConfigError(
            f"algorithm {config.algorithm!r} asks the model's indexer, which {name} does not "
            f"have; expected a model with an indexer of kind {asked!r}, or another algorithm"
        )
    if asked != indexer:
        others = ", ".join(n for n in ALGORITHMS if ALGORITHMS.get(n).indexer == indexer)
        raise ConfigError(
            f"{name} was trained to attend what its indexer selects; expected an algorithm that "
            f"asks it: {others}"
        )
