"""Optional features of a server: a file or a folder for each feature.

Each can be deleted: what it serves, which ``base.py`` lists, is then refused. The names of those
that are on are passed to child processes in the environment.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hisparse.errors import ConfigError

if TYPE_CHECKING:
    from hisparse.sglang.features.base import Feature, IndexerKind, ModelKind, Option, Start
    from hisparse.sglang.models import Trained

#: Set in the environment by a server that uses hisparse: "server", then names of features.
IN_USE = "HISPARSE_IN_USE"


@cache
def all_features() -> tuple[Feature, ...]:
    """All features of this installation."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [import_module(f"{__name__}.{name}") for name in names if name != "base"]
    return tuple(module.FEATURE for module in modules)


def enable(features: Iterable[Feature]) -> None:
    """Let this process and its children have some features and no others."""
    os.environ[IN_USE] = " ".join(["server", *(feature.name for feature in features)])


def enabled() -> tuple[Feature, ...]:
    """The features of this process's server."""
    _, *names = os.environ.get(IN_USE, "").split() or [""]
    return tuple(feature for feature in all_features() if feature.name in names)


def check_start(start: Start) -> None:
    """Check that hisparse serves together what a server is started with.

    Raises:
        ConfigError: names an option whose feature is not installed, or the first option and what it
            does not go with.
    """
    from hisparse.sglang.features.base import SERVED_BY_FEATURES

    for option in SERVED_BY_FEATURES:
        _check_installed(option, option.given(start))
    for feature in all_features():
        for option, others in feature.excludes.items():
            flag, _, value = option.given(start).partition(" ")
            for other in others if flag else ():
                if got := other.given(start):
                    raise ConfigError(
                        f"{flag} is {value}, which does not go with {got} yet; expected "
                        f"{other.expected}"
                    )


def for_model(model_config: Any, name: str) -> tuple[Feature, ...]:
    """The features that a model needs.

    Args:
        model_config: SGLang's ``ModelConfig``.

    Raises:
        ConfigError: one is not installed.
    """
    from hisparse.sglang.features.base import MODEL_KINDS

    for kind in MODEL_KINDS:
        _check_installed(kind, name if kind.found(model_config) else "")
    return tuple(feature for feature in all_features() if feature.is_for(model_config))


def indexer_of(model_config: Any) -> IndexerKind | None:
    """The kind of a model's own indexer, if a feature asks such indexers.

    Args:
        model_config: SGLang's ``ModelConfig``.
    """
    kinds = (feature.indexer for feature in all_features())
    return next((x for x in kinds if x is not None and x.found(model_config)), None)


def trained_indexer(text: Any) -> tuple[IndexerKind, Trained] | tuple[None, None]:
    """The kind of a model's own indexer, and how the model was trained to select.

    Args:
        text: the decoder's configuration, of transformers.
    """
    for feature in all_features():
        kind = feature.indexer
        if kind is not None and (trained := kind.trained(text)):
            return kind, trained
    return None, None


def _check_installed(served: Option | ModelKind, got: str) -> None:
    """Require the feature that serves what a server is started with; "": it is not."""
    if got and served.feature not in {feature.name for feature in all_features()}:
        raise ConfigError(
            f"{got} needs the feature {served.feature!r} of hisparse.sglang, which is not "
            f"installed; expected {served.expected}"
        )
