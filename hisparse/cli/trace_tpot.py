"""Flags of ``hisparse trace recommend`` for a time per token, estimated as ``plan`` does."""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from hisparse.cli.lists import number
from hisparse.cli.output import print_paragraph
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.plan.estimate import estimate_step
from hisparse.plan.hardware import GPUS, HOSTS, Hardware
from hisparse.plan.tpot import rest_of_step
from hisparse.trace import HitCurve
from hisparse.units import parse_seconds

__all__ = ["TokenTime", "add_flags", "read_target"]

_DEFAULTS: dict[str, Any] = {"gpu": "h100", "host": "pcie5", "batch": 1}
_OTHERS = ("model", "gpu", "host", "batch", "context", "rest")
#: Settings of the trace that decide how long a step takes.
_SETTINGS = (
    *("algorithm", "algorithm_config", "budget", "num_sink_pages", "num_recent_pages", "overlap"),
    *("selection_scope", "min_sparse_context", "dense_layers", "reuse_layers", "kv_cache_dtype"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ask for a time per token."""
    group = parser.add_argument_group("for a time per token, which is estimated and not measured")
    add = group.add_argument
    text = "time per output token, such as 30ms, in place of --hit-ratio; needs --model"
    add("--tpot", metavar="TIME", help=text)
    text = "the model to serve; only its configuration is read"
    add("--model", metavar="PATH|HUB_ID|NAME", help=text)
    add("--gpu", metavar="NAME", help=f"{', '.join(GPUS)} ({_DEFAULTS['gpu']})")
    add("--host", metavar="NAME", help=f"link to the host: {', '.join(HOSTS)} (pcie5)")
    add("--batch", type=number, metavar="N", help="requests of a step (1)")
    text = "tokens of each request (the longest in the trace)"
    add("--context", type=number, metavar="N", help=text)
    text = "time of a step without attention, such as 9ms (the time to read all weights once)"
    add("--rest", metavar="TIME", help=text)


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """A time per token, and what its estimate stands on.

    Attributes:
        limit_ms: the most time per token.
        model: the model's configuration.
        hardware: the GPU and its host.
        batch: requests of a step.
        context: tokens of each request; None: the longest in the trace.
        rest_ms: time of a step without attention.
        about: the flags and the assumption on the rest, for JSON.
    """

    limit_ms: float
    model: Any
    hardware: Hardware
    batch: int
    context: int | None
    rest_ms: float
    about: Mapping[str, Any]

    def recommend(self, curve: HitCurve, trace: Mapping[str, Any]) -> dict[str, Any]:
        """The smallest buffer whose hits keep to the time, in tokens, and the estimate with it.

        Args:
            curve: hits of the trace.
            trace: what the trace holds, as ``hisparse trace show`` says.

        Raises:
            ConfigError: all pages on the device are not enough, or the settings do not fit the
                model.
        """
        from hisparse.transformers.model_config import shape_per_rank

        size, (_, longest) = curve.page_size, trace["context"]
        context = self.context or longest
        given = {k: v for k, v in trace["settings"].items() if k in _SETTINGS and v is not None}
        config = HiSparseConfig.from_dict(given | {"page_size": size})
        spec = shape_per_rank(self.model, size, 1)

        def token_ms(pages: int) -> float:
            buffer = replace(config, device_buffer_size=pages * size)
            hits = curve.hit_ratio(pages * size)
            step = estimate_step(
                buffer, spec, self.hardware, context=context, batch=self.batch, hit_ratio=hits
            )
            return self.rest_ms + step.hisparse_ms

        least = max(curve.widest, config.budget // size)
        most = max(least, curve.hits.shape[-1] - 1)
        if token_ms(most) > self.limit_ms:
            raise ConfigError(
                f"--tpot: got {self.limit_ms:g}ms, expected at least {token_ms(most):.4g}ms, which "
                f"a step is estimated to take with batch {self.batch}, contexts of {context} "
                f"tokens and all pages of {trace['file']!r} on the device"
            )
        found = bisect_left(
            range(least, most), True, key=lambda pages: token_ms(pages) <= self.limit_ms
        )
        estimate = {"ms_per_token": token_ms(least + found), "measured": False}
        estimate |= {"context": context, "beyond_trace": context > longest}
        return {
            "device_buffer_size": (least + found) * size,
            "estimate": dict(self.about) | estimate,
        }

    def print(self, console: Console, estimate: Mapping[str, Any]) -> None:
        """What the recommendation stands on."""
        longer = ", more than any in the trace" if estimate["beyond_trace"] else ""
        print_paragraph(
            console,
            f"Estimated, not measured: {estimate['ms_per_token']:.3g} ms per token on "
            f"{estimate['gpu']} with {estimate['host']}, batch {estimate['batch']}, contexts of "
            f"{estimate['context']:,} tokens{longer}. {estimate['assumption']} Whether so many "
            "requests fit the memory: hisparse plan.",
        )


def read_target(arguments: argparse.Namespace) -> TokenTime | None:
    """What the flags ask for; None without ``--tpot``.

    Raises:
        ConfigError: a flag is wrong, or lacks another one.
    """
    if arguments.tpot is None:
        for name in _OTHERS:
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name}: expected --tpot with it; add that, or leave it out")
        return None
    if arguments.hit_ratio is not None:
        raise ConfigError(f"--tpot: got {arguments.tpot} and --hit-ratio, expected one of them")
    limit_ms = 1000 * parse_seconds("--tpot", arguments.tpot)
    if arguments.model is None:
        raise ConfigError(f"--tpot: got {arguments.tpot} without --model, expected both")
    flags = {x: getattr(arguments, x) or default for x, default in _DEFAULTS.items()}
    hardware = Hardware.named(flags["gpu"], flags["host"])
    model = _read_model(arguments.model)
    rest_ms, assumption = rest_of_step(arguments.rest, hardware, lambda: _weight_bytes(model))
    return TokenTime(
        limit_ms=limit_ms,
        model=model,
        hardware=hardware,
        batch=flags["batch"],
        context=arguments.context,
        rest_ms=rest_ms,
        about=flags | {"model": arguments.model, "tpot_ms": limit_ms, "assumption": assumption},
    )


def _read_model(name: str) -> Any:
    import transformers

    from hisparse.eval.models import resolve
    from hisparse.transformers.model_config import read_model_config

    transformers.logging.set_verbosity_error()
    return read_model_config(resolve(name, progress=lambda line: print(line, file=sys.stderr)))


def _weight_bytes(model: Any) -> int:
    from hisparse.transformers.model_config import count_weight_bytes, shape_per_rank

    if getattr(model, "quantization_config", None):
        raise ConfigError(
            "--rest: got nothing for a quantized model, expected the time of a step without "
            "attention, such as 9ms"
        )
    return count_weight_bytes(model, shape_per_rank(model, 1, 1).dtype)
