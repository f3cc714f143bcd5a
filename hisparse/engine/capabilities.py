"""Which algorithms go with models that bring their own indexer."""

from __future__ import annotations

from hisparse.algorithms import ALGORITHMS
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError

__all__ = ["check_indexer"]


def check_indexer(name: str, config: HiSparseConfig, *, has_indexer: bool) -> None:
    """A model with an indexer is served by an algorithm that asks it, and no other model is.

    Args:
        name: of the model, for the message.
        config: names the algorithm.
        has_indexer: whether the model was trained with one, as DeepSeek-V3.2 was.

    Raises:
        ConfigError: the two do not go together; names what does.
    """
    asks = ALGORITHMS.get(config.algorithm).indexer
    if asks and not has_indexer:
        raise ConfigError(
            f"algorithm {config.algorithm!r} asks the model's indexer, which {name} does not "
            "have; expected a model such as DeepSeek-V3.2, or another algorithm"
        )
    if has_indexer and not asks:
        others = ", ".join(n for n in ALGORITHMS if ALGORITHMS.get(n).indexer)
        raise ConfigError(
            f"{name} was trained to attend what its indexer selects, and algorithm "
            f"{config.algorithm!r} does not ask it; expected one that does: {others}"
        )
