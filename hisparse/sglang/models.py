"""SGLang's models: the shape of their attention, and their checks of the backend's name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.sglang.install import BACKEND, BACKEND_FLAGS
from hisparse.types import Attention, IndexerInputs, KVSpec

logger = logging.getLogger("hisparse")


class ModelShape(NamedTuple):
    """A model's attention on this rank.

    Attributes:
        spec: shapes of the layers that attend.
        scale: softmax scale.
        layer_ids: SGLang's number of each of these layers, ascending.
    """

    spec: KVSpec
    scale: float
    layer_ids: tuple[int, ...]


class Trained(NamedTuple):
    """How a model was trained to select.

    Attributes:
        settings: keys of ``--hisparse-config`` with which the model selects as it was trained.
        head_dim: Di, elements.
        unindexed: the layers without an indexer.
    """

    settings: Mapping[str, Any]
    head_dim: int
    unindexed: tuple[int, ...] = ()

    @property
    def shares(self) -> bool:
        """Whether these attend what the layer before them selected; else they are dense."""
        return bool(self.unindexed) and "dense_layers" not in self.settings


def read_model_shape(
    model: Any,
    dtype: torch.dtype,
    page_size: int,
    context_length: int | None = None,
    hybrid_layers: Sequence[int] | None = None,
    *,
    trained: Trained | None = None,
) -> ModelShape:
    """Read the shapes of a model that SGLang has loaded.

    Args:
        dtype: the model's dtype of keys and values.
        page_size: S, tokens per page of a selection.
        context_length: tokens, the longest sequence; a window that holds it is none. None: unknown.
        hybrid_layers: the numbers of a hybrid's layers that attend; None: all layers do.
        trained: how an indexer that the model's configuration names selects; None: there is none.

    Raises:
        ConfigError: the layers differ from each other, or use a kind of attention that hisparse
            does not support.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"the KV cache is {dtype}; expected float32, bfloat16, float16 or fp8_e4m3: use "
            "--kv-cache-dtype auto or fp8_e4m3"
        )
    layers, attention = _attention_layers(model)
    shapes = {
        (m.tp_q_head_num, m.tp_k_head_num, m.qk_head_dim, m.v_head_dim, m.scaling, m.logit_cap)
        for m in layers
    }
    if len(shapes) != 1:
        raise ConfigError(
            f"the model's attention layers have {len(shapes)} different shapes; expected one shape "
            "for all layers"
        )
    _check_kind(layers)
    ids = sorted(m.layer_id for m in layers)
    _check_numbers(ids, hybrid_layers)
    q_heads, kv_heads, head_dim, v_head_dim, scale, logit_cap = shapes.pop()
    unindexed = {x for x in ids if trained and x in trained.unindexed}
    _check_indexers(len(find_indexers(model)), len(layers) - len(unindexed))
    windows = [_window(m, context_length) for m in sorted(layers, key=lambda m: m.layer_id)]
    spec = KVSpec(
        num_layers=len(layers),
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        page_size=page_size,
        attention=attention,
        index_head_dim=trained.head_dim if trained else 0,
        logit_cap=logit_cap or 0.0,
        windows=tuple(windows) if any(windows) else (),
        unindexed=tuple(place for place, x in enumerate(ids) if x in unindexed),
    )
    return ModelShape(spec, scale, tuple(ids))


def _check_indexers(found: int, expected: int) -> None:
    if found not in (0, expected):
        raise ConfigError(
            f"{found} of the model's layers have an indexer; expected {expected}, or none"
        )


def _check_kind(layers: Sequence[Any]) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    for m in layers:
        faults = {
            f"attn_type {m.attn_type}": m.attn_type != AttentionType.DECODER,
            "cross attention": m.is_cross_attention,
            f"logits capped by {m.logit_capping_method}": m.logit_cap
            and m.logit_capping_method != "tanh",
            f"xai_temperature_len {m.xai_temperature_len}": m.xai_temperature_len > 0,
            "attention in chunks": m.use_irope,
        }
        for got in (name for name, found in faults.items() if found):
            raise ConfigError(
                f"layer {m.layer_id} of the model: got {got}, expected causal attention, over all "
                "tokens or a window"
            )


def _check_numbers(ids: Sequence[int], hybrid_layers: Sequence[int] | None) -> None:
    """Require attention in every layer, or in those that a hybrid's configuration names."""
    if hybrid_layers is None:
        if ids != list(range(ids[0], ids[0] + len(ids))):
            raise ConfigError(
                f"the model's attention layers have numbers {ids}; expected attention in every "
                "layer"
            )
    elif ids != list(hybrid_layers):
        raise ConfigError(
            f"the model's attention layers have numbers {ids}; expected {list(hybrid_layers)}, as "
            "its configuration says"
        )


def _window(layer: Any, context_length: int | None) -> int:
    """Tokens that a query of a layer attends, including itself; 0: no window."""
    # SGLang counts the tokens before the query's own. Its backends take -1 for no window.
    window: int = layer.sliding_window_size + 1
    return 0 if context_length is not None and window >= context_length else window


def _attention_layers(model: Any) -> tuple[list[Any], Attention]:
    """One attention module per layer, and the kind of attention."""
    from sglang.srt.layers.radix_attention import RadixAttention

    named = {n: m for n, m in model.named_modules() if isinstance(m, RadixAttention)}
    # MLA models have two modules per layer: `attn_mqa` over latents, `attn_mha` over heads.
    absorbed = [m for name, m in named.items() if name.endswith("attn_mqa")]
    if absorbed:
        return absorbed, "MLA"
    return list(named.values()) or _fallback_layers(model), "GQA"


def _fallback_layers(model: Any) -> list[Any]:
    """The attention modules of a model that SGLang runs with transformers' code.

    They lie in a dictionary, and get the softmax scales of transformers' modules in each forward.
    """
    layers: dict[int, Any] = getattr(model, "attention_instances", {})
    for module in model.modules():
        layer, scale = getattr(module, "layer_idx", None), getattr(module, "scaling", None)
        if layer in layers and isinstance(scale, float):
            layers[layer].scaling = scale
    return list(layers.values())


def find_indexers(model: Any) -> list[Any]:
    """The indexers of SGLang's ``model``, one per layer in order; empty for most models."""
    return [layer.indexer for layer in indexed_layers(model)]


def indexed_layers(model: Any) -> list[Any]:
    """The modules of SGLang's ``model`` that have an indexer, in order."""
    return [m for m in model.modules() if getattr(m, "indexer", None) is not None]


class RowwiseInputs(IndexerInputs):
    """Indexer inputs of which SGLang can take the rows that are not padding, as of a tensor."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return rows_of_slice(self, index)

    def take(self, tokens: slice | Tensor) -> RowwiseInputs:
        return RowwiseInputs(*super().take(tokens))


def rows_of_slice(inputs: Any, index: Any) -> Any:
    """``__getitem__`` of indexer inputs: a field by its number, or the rows of a slice."""
    return inputs.take(index) if isinstance(index, slice) else tuple.__getitem__(inputs, index)


def hybrid_layers(model_config: Any) -> list[int] | None:
    """The numbers of a hybrid's layers that attend, ascending; None: the model is no hybrid.

    Args:
        model_config: SGLang's ``ModelConfig``.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = mambaish_config(model_config)
    return None if config is None else list(config.full_attention_layer_ids)


def name_of(model_config: Any) -> str:
    """The architecture of a model, for messages."""
    return ", ".join(model_config.hf_config.architectures or ["this model"])


def check_trained(name: str, config: HiSparseConfig, trained: Trained, pp_size: int) -> None:
    """Require pages, layers and options of a model's indexer; warn of other sizes.

    Args:
        trained: how the model selects.
        pp_size: ranks of a pipeline.

    Raises:
        ConfigError: ``page_size``, ``dense_layers`` or an option of the algorithm are others, or
            layers share a selection, which layers that are dense or of another rank would not get.
    """
    settings = trained.settings
    dense = list(config.dense_layers or ())
    if trained.shares:
        _check_sharing(name, trained, dense, pp_size)
    if dense != list(settings.get("dense_layers", dense)):
        raise ConfigError(
            f"dense_layers: got {dense}, expected {settings['dense_layers']}, the layers of {name} "
            "without an indexer"
        )
    if config.page_size != settings["page_size"]:
        raise ConfigError(
            f"page_size: got {config.page_size}, expected {settings['page_size']}, the tokens that "
            f"{name}'s indexer scores together"
        )
    algorithm = build_algorithm(config)
    for option, expected in settings.get("algorithm_config", {}).items():
        if (value := getattr(algorithm, option, expected)) != expected:
            raise ConfigError(f"{option}: got {value}, expected {expected}, as {name} was trained")
    sizes = ("budget", "num_sink_pages", "num_recent_pages")
    got, expected = (tuple(values[x] for x in sizes) for values in (vars(config), settings))
    if got != expected:
        logger.warning(
            "hisparse: budget, num_sink_pages and num_recent_pages are %s; %s was trained with %s",
            got,
            name,
            expected,
        )


def _check_sharing(name: str, trained: Trained, dense: Sequence[int], pp_size: int) -> None:
    if 0 in trained.unindexed:
        raise ConfigError(
            f"layer 0 of {name} attends what the layer before it selected; expected an indexer"
        )
    pipeline = f"--pp-size {pp_size}" if pp_size > 1 else ""
    if got := f"dense_layers: {dense}" if dense else pipeline:
        raise ConfigError(
            f"{got} is given, and layers of {name} attend what others selected, which hisparse "
            "does not support together yet; expected neither dense_layers nor --pp-size"
        )


@contextmanager
def stand_in(backend: str) -> Iterator[None]:
    """Let SGLang's adjustments see another backend, which all their checks accept."""
    from sglang.srt.arg_groups import model_hook

    resolved_view = model_hook.resolved_view
    with patch.object(model_hook, "resolved_view", lambda x: _View(resolved_view(x), backend)):
        yield


class _View:
    """SGLang's view of its arguments, with another name in place of hisparse."""

    def __init__(self, view: Any, name: str) -> None:
        self._view, self._name = view, name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return self._name if name in BACKEND_FLAGS and value == BACKEND else value


def use_absorbed_mla(backend: str) -> None:
    """Make SGLang's MLA models pass absorbed queries and latents to a backend, in prefill too.

    By default SGLang attends a prompt without a prefix with keys and values per head. The pool
    stores only latents.

    Args:
        backend: name of the attention backend.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def absorbed(attention: Any, forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register(backend, absorbed)
