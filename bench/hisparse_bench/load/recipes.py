"""Reads recipes: TOML files that say what to run, and what its figures mean."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError, quoted, unknown_name
from hisparse.options import read_text
from hisparse_bench.load.options import EXCLUDED, LoadOptions

_FOLDER = Path(__file__).parent.parent / "recipes"
#: What a recipe says of itself.
_ABOUT = ("title", "published", "cpu_says", "cpu_does_not_say")


@dataclass(frozen=True)
class Recipe:
    """What to run.

    Attributes:
        about: title, the published figure, what a CPU can say of it and what not.
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
    if sys.version_info < (3, 11):
        raise ConfigError(
            f"--recipe: got Python {sys.version_info[0]}.{sys.version_info[1]}, expected 3.11 or "
            "later, which reads TOML"
        )
    tomllib = import_module("tomllib")

    text = read_text(path, "--recipe")
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--recipe {quoted(str(path))}: not TOML: {error}") from None
    return found
