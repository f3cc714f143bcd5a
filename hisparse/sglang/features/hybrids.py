"""Hybrids: models that mix attention with linear attention, convolution or state space layers.

The layers that attend are hisparse's: its pool has these layers alone, numbered from 0. The states
of the other layers stay in SGLang's own pool on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, one_line
from hisparse.sglang.session import current_session, errors_logged

__all__ = [
    "STAND_IN",
    "around_attn_backend_wrapper",
    "attention_pool",
    "check_attending",
    "check_hybrid",
    "hybrid_layers",
    "refused_in_one_line",
]

logger = logging.getLogger("hisparse")

#: SGLang's checks of hybrids see this backend in place of hisparse. All of them accept it.
STAND_IN = "flashinfer"

_KINDS = "layers of linear attention, convolution or a state space model (Mamba)"

#: What a hybrid is not served with: field in SGLang's arguments, flag, values that are no setting.
_EXCLUDED: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("pp_size", "--pp-size", (1,)),
    ("attn_dp_size", "--attn-dp-size", (1,)),
    ("enable_dp_attention", "--enable-dp-attention", (False,)),
    ("speculative_algorithm", "--speculative-algorithm", (None, "NONE")),
    ("disaggregation_mode", "--disaggregation-mode", (None, "null")),
    (
        "enable_unified_cache_external_linker",
        "--enable-unified-cache-external-linker (storage)",
        (False,),
    ),
)


def hybrid_layers(model_config: Any) -> list[int] | None:
    """The numbers of a hybrid's layers that attend, ascending; None: the model is no hybrid.

    Args:
        model_config: SGLang's ``ModelConfig``.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    config = mambaish_config(model_config)
    return None if config is None else list(config.full_attention_layer_ids)


def check_hybrid(server_args: Any) -> bool:
    """Whether the model is a hybrid, which is judged before SGLang adjusts its arguments.

    Raises:
        ConfigError: a hybrid that hisparse does not serve, or not with a flag.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    layers = hybrid_layers(model)
    if layers is None:
        return False
    name = _name(model)
    if not layers:
        raise ConfigError(f"{name} has no layer that attends; expected attention in some layers")
    for field, flag, unset in _EXCLUDED:
        got = getattr(server_args, field)
        if got not in unset:
            raise ConfigError(
                f"{flag} is {got}, and {name} has {_KINDS}, which hisparse does not support "
                "together yet; expected the flag unset"
            )
    return True


@contextmanager
def refused_in_one_line(server_args: Any) -> Iterator[None]:
    """Turn an assertion of SGLang's about a hybrid into one line.

    Raises:
        ConfigError: SGLang asserts something else.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    try:
        yield
    except AssertionError as error:
        name = _name(model_config_of(server_args))
        raise ConfigError(
            f"SGLang does not serve {name} with these flags ({one_line(error)}); expected others, "
            "such as --disable-radix-cache"
        ) from error


def check_attending(config: HiSparseConfig, layers: Sequence[int]) -> None:
    """Require that ``dense_layers`` attend, and log which layers do.

    Args:
        config: names layers of the model.
        layers: the model's layers that attend.

    Raises:
        ConfigError: a dense layer does not attend.
    """
    bad = sorted(set(config.dense_layers or ()) - set(layers))
    if bad:
        raise ConfigError(
            f"dense_layers: got {bad}, expected some of the model's layers that attend: "
            f"{', '.join(map(str, layers))}"
        )
    logger.info(
        "hisparse: the layers that attend are %s; SGLang keeps the states of the others",
        ", ".join(map(str, layers)),
    )


def attention_pool(pool: Any) -> Any:
    """The pool of hisparse within ``pool``: SGLang puts that of a hybrid into a wrapper.

    The wrapper translates the model's layer numbers into those of the pool.
    """
    return getattr(pool, "full_kv_pool", pool)


def around_attn_backend_wrapper(
    original: Callable[..., Any], runner: Any, full_attn_backend: Any
) -> Any:
    """Let SGLang put the backend beside that of a hybrid's other layers.

    On Blackwell SGLang asserts that the backend is one of a list.

    Raises:
        ConfigError: SGLang takes another backend for the layers that attend.
    """
    if current_session() is None:
        return original(runner, full_attn_backend)
    with patch.multiple(
        runner, prefill_attention_backend_str=STAND_IN, decode_attention_backend_str=STAND_IN
    ):
        wrapped = original(runner, full_attn_backend)
    if getattr(wrapped, "full_attn_backend", wrapped) is not full_attn_backend:
        with errors_logged():
            raise ConfigError(
                f"SGLang serves {_name(runner.model_config)} with {type(wrapped).__name__}; "
                "expected a model whose attention a backend can be chosen for"
            )
    return wrapped


def _name(model_config: Any) -> str:
    return ", ".join(model_config.hf_config.architectures or ["this model"])
