"""Hybrids: models that mix attention with linear attention, convolution or state space layers.

hisparse serves the layers that attend: its pool has only these layers, numbered from 0. The states
of the other layers stay in SGLang's own pool on the device.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, one_line
from hisparse.sglang.features.base import (
    ATTENTION_REPLICAS,
    HYBRID,
    PIPELINE,
    PREFILL_OR_DECODE,
    SPECULATION,
    STORAGE,
    Feature,
    Start,
)
from hisparse.sglang.models import ModelShape, hybrid_layers, name_of, stand_in
from hisparse.sglang.session import current_session, errors_logged

logger = logging.getLogger("hisparse")

#: SGLang's checks of hybrids see this backend in place of hisparse. All of them accept it.
_STAND_IN = "flashinfer"

_KINDS = "layers of linear attention, convolution or a state space model (Mamba)"

#: What a hybrid is not served with.
_EXCLUDED = (PIPELINE, ATTENTION_REPLICAS, SPECULATION, PREFILL_OR_DECODE, STORAGE)


def check_options(name: str, start: Start) -> None:
    """Refuse what a hybrid is not served with; ``name`` is the model's.

    Raises:
        ConfigError: names the option.
    """
    for option in _EXCLUDED:
        if got := option.given(start):
            raise ConfigError(
                f"{got} is given, and {name} has {_KINDS}, which hisparse does not support "
                f"together yet; expected {option.expected}"
            )


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
        runner, prefill_attention_backend_str=_STAND_IN, decode_attention_backend_str=_STAND_IN
    ):
        wrapped = original(runner, full_attn_backend)
    if getattr(wrapped, "full_attn_backend", wrapped) is not full_attn_backend:
        with errors_logged():
            raise ConfigError(
                f"SGLang serves {name_of(runner.model_config)} with {type(wrapped).__name__}; "
                "expected a model whose attention a backend can be chosen for"
            )
    return wrapped


class Hybrids(Feature):
    """The layers that attend are numbered from 0, and the others are left to SGLang."""

    name = "hybrids"
    kinds = (HYBRID,)
    hooks = {
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper": (
            around_attn_backend_wrapper
        )
    }

    @contextmanager
    def adjusting(self, server_args: Any) -> Iterator[None]:
        """Refuse flags; turn an assertion of SGLang's about a hybrid into one line.

        Raises:
            ConfigError: hisparse or SGLang does not serve the hybrid, or not with a flag.
        """
        from sglang.srt.arg_groups.overrides import model_config_of

        model = model_config_of(server_args)
        name = name_of(model)
        if not hybrid_layers(model):
            raise ConfigError(
                f"{name} has no layer that attends; expected attention in some layers"
            )
        config = HiSparseConfig.parse(server_args.hisparse_config)
        check_options(name, Start(args=server_args, config=config, device=str(server_args.device)))
        try:
            with stand_in(_STAND_IN):
                yield
        except AssertionError as error:
            raise ConfigError(
                f"SGLang does not serve {name} with these flags ({one_line(error)}); expected "
                "others, such as --disable-radix-cache"
            ) from error

    def own_layers(
        self, config: HiSparseConfig, shape: ModelShape, configurator: Any
    ) -> Sequence[int]:
        """The layers that attend."""
        check_attending(config, shape.layer_ids)
        return shape.layer_ids


FEATURE = Hybrids()
