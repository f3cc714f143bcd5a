"""What a load benchmark runs, from flags or from a table of a recipe."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from hisparse.errors import ConfigError, one_line, quoted, unknown_name
from hisparse.options import from_options, read_text
from hisparse.units import parse_seconds, resolve_memory

#: What each of these options decides in place of others.
EXCLUDED: Final = {
    "url": (
        "device",
        "algorithm",
        "budget",
        "device_buffer_size",
        "device_memory",
        "dense_requests",
        "threads",
    ),
    "trace": ("context", "output", "shared_prefix", "dense_requests", "turns"),
}

_POSITIVE = (
    "context",
    "output",
    "concurrency",
    "rate",
    "budget",
    "dense_requests",
    "device_buffer_size",
    "turns",
)
#: Tokens of an exact page, for budgets and contexts that are rounded up.
_PAGE = 16


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """One run of ``hisparse bench serve``; each field is a flag and a key of a recipe.

    Attributes:
        model: folder, hub id or name; "random-dsa" is a small random model with an indexer. If
            empty: smollm2-135m, or with ``url`` the server's.
        device: "cpu" or "cuda".
        context: tokens of the prompts.
        output: tokens that each request generates.
        concurrency: most requests in flight.
        rate: requests per second, with Poisson arrivals, in place of ``concurrency``.
        requests: requests of each load; 0: twice the concurrency, 8 with ``rate``, or all of
            ``trace``.
        algorithm: contenders: "dense", "sglang-hisparse" (CUDA, models with an indexer) or
            algorithms of hisparse.
        budget: tokens that hisparse attends per step.
        device_buffer_size: tokens of a row's device buffer, which then does not grow, a contender
            each; the default if empty.
        shared_prefix: share of a prompt that all requests of a load have in common.
        turns: how often each prompt is sent: turn t of T has t/T of its tokens, and waits for the
            answer to the turn before.
        trace: Mooncake's JSONL, in place of ``context`` and ``output``; its timestamps are the
            arrivals unless ``concurrency`` or ``rate`` is given.
        slo_ttft, slo_tpot: limits that a request of the goodput meets, such as "2s" and "100ms".
        device_memory: device memory for the KV cache, the same for all contenders.
        dense_requests: the same as the KV of so many dense requests of this context.
        url: running servers, whose radix caches are emptied; the first of two is the reference.
        text: file whose text is in the prompts, in place of the built-in texts.
        quality: compare with dense decoding: the check, and the distance of sparse decoding.
            Without it no ratios are shown.
        threads: CPU threads of a server; one for each core if 0.
    """

    model: str = ""
    device: str = "cpu"
    context: tuple[int, ...] = (7000,)
    output: int = 64
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    requests: int = 0
    algorithm: tuple[str, ...] = ("dense", "sketch")
    budget: int = 512
    device_buffer_size: tuple[int, ...] = ()
    shared_prefix: float = 0.0
    turns: int = 1
    trace: str | None = None
    slo_ttft: str | None = None
    slo_tpot: str | None = None
    device_memory: tuple[str, ...] = ()
    dense_requests: tuple[int, ...] = ()
    url: tuple[str, ...] = ()
    text: str | None = None
    quality: bool = True
    threads: int = 0

    def __post_init__(self) -> None:
        if not (self.model or self.url):
            object.__setattr__(self, "model", "smollm2-135m")
        for name in _POSITIVE:
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if not value > 0:
                    raise ConfigError(f"--{_flag(name)}: got {value}, expected more than 0")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device: got {quoted(self.device)}, expected cpu or cuda")
        if self.output < 2:
            raise ConfigError("--output: got 1, expected 2 or more: a time per token needs two")
        if not 0 <= self.shared_prefix < 1:
            raise ConfigError(f"--shared-prefix: got {self.shared_prefix}, expected [0, 1)")
        for name in ("requests", "threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name}: got {getattr(self, name)}, expected 0 or more")
        if len(self.url) > 2:
            raise ConfigError(f"--url: got {len(self.url)}, expected one or two")
        if self.url and any("://" not in url for url in self.url):
            raise ConfigError(f"--url: got {self.url}, expected such as http://127.0.0.1:30000")
        # Wrong values are found before a server starts.
        _ = self.slos_ms, self.device_bytes

    @classmethod
    def read(cls, source: str, values: Mapping[str, Any]) -> LoadOptions:
        """Check and take values by name.

        Raises:
            ConfigError: a name is unknown, or a value is of the wrong type or out of range.
        """
        pairs = [(one, other) for one, others in EXCLUDED.items() for other in others]
        for one, other in (("concurrency", "rate"), ("device_memory", "dense_requests"), *pairs):
            if values.get(one) and other in values:
                raise ConfigError(f"got --{_flag(one)} and --{_flag(other)}, expected one of them")
        lists = {f.name for f in fields(cls) if str(f.type).startswith("tuple")}
        whole = {
            name: [value] if name in lists and not isinstance(value, list | tuple) else value
            for name, value in values.items()
        }
        return from_options(cls, source, source, whole)

    @property
    def slos_ms(self) -> dict[str, float]:
        """The limits, milliseconds, as SGLang's client names them."""
        limits = {"ttft": self.slo_ttft, "tpot": self.slo_tpot}
        return {
            name: parse_seconds(f"--slo-{name}", text) * 1e3
            for name, text in limits.items()
            if text is not None
        }

    @property
    def device_bytes(self) -> list[int]:
        """``device_memory`` in bytes."""
        return [resolve_memory(_bytes(x), 2**62, "--device-memory") for x in self.device_memory]

    @property
    def loads(self) -> list[dict[str, float]]:
        """Each load: ``{"concurrency": N}`` or ``{"rate": X}``, or ``{}``: the trace's arrivals."""
        if self.rate:
            return [{"rate": x} for x in self.rate]
        if self.concurrency or not self.trace:
            return [{"concurrency": x} for x in self.concurrency or (1,)]
        return [{}]

    @property
    def most_running(self) -> int:
        """Requests that a server is to run at once: the largest load."""
        return max(int(load.get("concurrency", self.requests or 8)) for load in self.loads)

    @property
    def num_threads(self) -> int:
        """CPU threads of a server."""
        return self.threads or os.cpu_count() or 1

    def num_requests(self, load: Mapping[str, float]) -> int:
        """Requests of a load."""
        return self.requests or 2 * int(load.get("concurrency", 4))


def round_up(tokens: int) -> int:
    """The next multiple of a page."""
    return -(-tokens // _PAGE) * _PAGE


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _bytes(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


_FOLDER = Path(__file__).parent.parent / "recipes"
#: Keys of a recipe with text about it.
_ABOUT = ("title", "published", "cpu_says", "cpu_does_not_say")


@dataclass(frozen=True)
class Recipe:
    """What to run.

    Attributes:
        about: title, the published figure, and what a CPU can and cannot show about it.
        runs: one after the other.
    """

    about: dict[str, str]
    runs: Sequence[LoadOptions]


def recipe_names() -> list[str]:
    """Recipes that come with hisparse."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def read_recipe(name: str, replaced: Mapping[str, Any]) -> Recipe:
    """Read a recipe.

    Args:
        name: one of :func:`recipe_names`, or a file.
        replaced: options that replace those of all its runs.

    Raises:
        ConfigError: there is no such recipe, or it is not one.
    """
    path = _FOLDER / f"{name}.toml"
    if not path.is_file():
        path = Path(name).expanduser()
        if path.suffix != ".toml":
            raise ConfigError(unknown_name("recipe", name, recipe_names()) + ", or a file .toml")
    table = _parse(path)
    if wrong := sorted({key for key in table if key not in (*_ABOUT, "run")}):
        known = ", ".join((*_ABOUT, "[[run]]"))
        raise ConfigError(f"--recipe {quoted(name)}: got key {wrong[0]!r}, expected {known}")
    about = {key: table.get(key) for key in _ABOUT}
    for key, text in about.items():
        if not isinstance(text, str):
            raise ConfigError(f"--recipe {quoted(name)}: {key}: got {quoted(text)}, expected text")
    runs = table.get("run")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise ConfigError(f"--recipe {quoted(name)}: got no [[run]], expected one or more")
    return Recipe(
        about={key: str(text) for key, text in about.items()},
        runs=[LoadOptions.read(f"recipe {name}", _merge(run, replaced)) for run in runs],
    )


def _merge(run: Mapping[str, Any], replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a run; one that excludes another takes its place."""
    dropped: set[str] = set()
    for group in (("concurrency", "rate"), ("device_memory", "dense_requests")):
        if any(name in replaced for name in group):
            dropped.update(group)
    for one, others in EXCLUDED.items():
        if one in replaced:
            dropped.update(others)
        elif any(name in replaced for name in others):
            dropped.add(one)
    if "url" in replaced:
        dropped.add("model")
    merged = {name: value for name, value in run.items() if name not in dropped}
    return merged | dict(replaced)


def _parse(path: Path) -> dict[str, Any]:
    text = read_text(path, "--recipe")
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--recipe {quoted(str(path))}: got {one_line(error)}, expected TOML"
        ) from None
    return found
