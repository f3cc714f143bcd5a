"""Methods to compare: an algorithm with a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.options import object_of

#: Name of dense attention, the reference of all figures.
DENSE = "dense"
#: Longer than any context.
_ALWAYS_DENSE = 2**31


@dataclass(frozen=True, kw_only=True)
class Method:
    """A configuration with a name.

    Attributes:
        name: name in tables, unique to these settings but for the budget.
        settings: keys and values of ``HiSparseConfig``.
    """

    name: str
    settings: Mapping[str, Any]

    @property
    def config(self) -> HiSparseConfig:
        """The settings as a checked configuration."""
        return HiSparseConfig.from_dict(self.settings)

    @classmethod
    def dense(cls) -> Method:
        """Dense attention through the same code: no context is long enough to be sparse."""
        settings = {"algorithm": "streaming", "budget": 128, "min_sparse_context": _ALWAYS_DENSE}
        return cls(name=DENSE, settings=settings)


def identity(method: str, algorithm: str, budget: int) -> dict[str, str | int | None]:
    """The keys ``method``, ``algorithm`` and ``budget`` of a result.

    The settings of dense attention name an algorithm and a budget that no context reaches. Its
    results have algorithm "dense" and budget None.

    Args:
        algorithm, budget: of its settings.
    """
    if method == DENSE:
        return {"method": method, "algorithm": DENSE, "budget": None}
    return {"method": method, "algorithm": algorithm, "budget": budget}


def parse_methods(
    algorithms: Sequence[str], budgets: Sequence[int], configs: Sequence[str]
) -> list[Method]:
    """Each algorithm with each budget, then each configuration.

    Args:
        algorithms: registered names.
        budgets: tokens; the first is the default of a configuration without a budget.
        configs: JSON objects or ``@path``, as in ``--hisparse-config``.

    Raises:
        ConfigError: a setting is invalid, or two methods are the same.
    """
    found: list[dict[str, object]] = [
        {"algorithm": name, "budget": budget} for name in algorithms for budget in budgets
    ]
    for text in configs:
        settings = object_of(text, "--config", '{"budget": 256}, or @file.json')
        given: dict[str, object] = (
            {} if {"budget", "top_k"} & settings.keys() else {"budget": budgets[0]}
        )
        found.append({"algorithm": HiSparseConfig.algorithm} | given | settings)
    for settings in found:
        build_algorithm(HiSparseConfig.from_dict(settings))
    methods = [Method(name=_name(settings), settings=settings) for settings in found]
    keys = [(method.name, method.config.budget) for method in methods]
    if len(set(keys)) < len(keys):
        name, budget = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(
            f"method {name!r} is given more than once with budget {budget}; expected it once"
        )
    return methods


def _name(settings: Mapping[str, Any]) -> str:
    """The algorithm, and all other settings but the budget."""
    rest = {k: v for k, v in settings.items() if k not in ("algorithm", "budget", "top_k")}
    rest |= rest.pop("algorithm_config", {})
    words = ",".join(f"{k}={v}" for k, v in sorted(rest.items()))
    return f"{settings['algorithm']}({words})" if words else str(settings["algorithm"])
