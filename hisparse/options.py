"""Checks options from JSON against the types of a frozen dataclass."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hisparse.errors import ConfigError, unknown_name

__all__ = ["check_type", "from_options", "matches", "type_words"]

T = TypeVar("T")


def from_options(cls: type[T], owner: str, key: str, options: Mapping[str, Any]) -> T:
    """Build a dataclass from options.

    Args:
        cls: the dataclass.
        owner: owner of the options, for messages ("quest").
        key: configuration key of the options, for messages ("algorithm_config").
        options: values from JSON by name; missing options keep their defaults.

    Raises:
        ConfigError: an option is unknown, missing, of the wrong type or out of range.
    """
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    values = {}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(unknown_name(f"{owner} option", name, known))
        check_type(f"{key}.{name}", value, hints[name])
        values[name] = tuple(value) if isinstance(value, list) else value
    for name, option in known.items():
        if name not in values and option.default is option.default_factory is MISSING:
            raise ConfigError(
                f"{key}.{name}: got nothing, but {owner} expects {type_words(hints[name])}"
            )
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_type(key: str, value: object, hint: Any) -> None:
    """Check that a value from JSON fits the type of an option.

    Raises:
        ConfigError: it does not; the message names the key, the value and the expected type.
    """
    if not matches(value, hint):
        got = f"{reprlib.repr(value)} ({type(value).__name__})"
        raise ConfigError(f"{key}: got {got}, expected {type_words(hint)}")


def matches(value: object, hint: Any) -> bool:
    """Whether a value from JSON fits a type; a bool is not a number."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(matches(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(matches(v, args[0]) for v in value)
    if hint in (int, float):
        number = int if hint is int else int | float
        return isinstance(value, number) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def type_words(hint: Any) -> str:
    """Describe a type in words, for messages."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(type_words(arg) for arg in args)
    if origin is Literal:
        return " or ".join(json.dumps(arg) for arg in args)
    if origin is tuple:
        return f"a list of {type_words(args[0])}"
    if hint is NoneType:
        return "null"
    if hint is bool:
        return "true or false"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "an object"
    return str(getattr(hint, "__name__", hint))
