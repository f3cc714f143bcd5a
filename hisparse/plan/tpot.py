"""How many requests run at once within a time per output token: memory and time together.

A step gives each running request one token, so its time is the time per output token (TPOT): the
estimated attention of ``hisparse.plan.estimate``, and the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from hisparse.plan.estimate import StepEstimate, estimate_step
from hisparse.plan.fit import Capacity, largest
from hisparse.plan.hardware import Hardware
from hisparse.units import parse_seconds

__all__ = ["Load", "Loads", "loads_within", "rest_of_step", "weights_ms"]

_REST_IS_WEIGHTS: Final = (
    "The rest of a step takes as long as reading all weights of a GPU once. That leaves out "
    "arithmetic, which counts from a few hundred requests on, and exchanges between GPUs; with "
    "experts, a small batch reads fewer weights. --rest replaces it by a time that you measured."
)
_REST_IS_GIVEN: Final = (
    "The rest of a step takes --rest, whatever the number of requests: true until arithmetic takes "
    "longer than reading the weights, at a few hundred requests."
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The most requests that run at once within a time per token.

    Attributes:
        requests: their number; 0 if no request fits, or one request alone takes longer.
        token_ms: time per token with so many requests; with one, if not even one is in time; None
            if no request fits.
        limit: what excludes one more request.
    """

    requests: int
    token_ms: float | None
    limit: Literal["time", "memory"]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of all requests."""
        return 1000 * self.requests / self.token_ms if self.token_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What one configuration runs within a time per token, and what dense attention runs.

    Attributes:
        hit_ratio: fraction of the selected pages that are on the device.
        dense: with the whole KV cache on the device.
        hisparse: with hisparse.
    """

    hit_ratio: float
    dense: Load
    hisparse: Load


def weights_ms(rank_bytes: int, hardware: Hardware) -> float:
    """Time in which a GPU reads its weights once."""
    return rank_bytes / hardware.gpu.hbm_gb_s.value / 1e6


def rest_of_step(
    given: str | None, hardware: Hardware, rank_bytes: Callable[[], int]
) -> tuple[float, str]:
    """Time of a step without attention in ms, and what it stands on.

    Args:
        given: the user's time, from ``--rest``; None: the time to read all weights once.
        hardware: the GPU.
        rank_bytes: counts the weights of a GPU, if no time is given.

    Raises:
        ConfigError: ``given`` is no time.
    """
    if given is not None:
        return 1000 * parse_seconds("--rest", given), _REST_IS_GIVEN
    return weights_ms(rank_bytes(), hardware), _REST_IS_WEIGHTS


def loads_within(
    capacity: Capacity, hardware: Hardware, *, limit_ms: float, rest_ms: float, hit_ratio: float
) -> Loads:
    """The most requests of ``capacity.context`` tokens that get a token each within a time.

    Args:
        capacity: how many requests fit; its settings must not be refused.
        hardware: the GPU and its host.
        limit_ms: the most time per token.
        rest_ms: time of a step without attention.
        hit_ratio: fraction of the selected pages that are on the device.
    """

    def step(batch: int) -> StepEstimate:
        return estimate_step(
            capacity.config,
            capacity.spec,
            hardware,
            context=capacity.context,
            batch=batch,
            hit_ratio=hit_ratio,
        )

    def load(attention_ms: Callable[[int], float], fitting: int) -> Load:
        if fitting == 0:
            return Load(requests=0, token_ms=None, limit="memory")

        def token_ms(batch: int) -> float:
            return rest_ms + attention_ms(batch)

        if token_ms(1) > limit_ms:
            return Load(requests=0, token_ms=token_ms(1), limit="time")
        most = largest(lambda batch: token_ms(batch) <= limit_ms, 1, fitting)
        limit: Literal["time", "memory"] = "memory" if most == fitting else "time"
        return Load(requests=most, token_ms=token_ms(most), limit=limit)

    return Loads(
        hit_ratio=step(1).hit_ratio,
        dense=load(lambda batch: step(batch).dense_ms, capacity.dense_max_requests),
        hisparse=load(lambda batch: step(batch).hisparse_ms, capacity.max_requests),
    )
