"""Values from JSON held against the types of options."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hisparse.errors import ConfigError

__all__ = ["check_type", "matches", "type_words"]


def check_type(key: str, value: object, hint: Any) -> None:
    """Refuse a value from JSON that does not fit the type of an option.

    Raises:
        ConfigError: names the key, the value and what is expected.
    """
    if not matches(value, hint):
        got = f"{reprlib.repr(value)} ({type(value).__name__})"
        raise ConfigError(f"{key}: got {got}, expected {type_words(hint)}")


def matches(value: object, hint: Any) -> bool:
    """Whether a value from JSON fits a type; a bool is no number."""
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
    """A type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(type_words(arg) for arg in args)
    if origin is Literal:
        return " or ".join(json.dumps(arg) for arg in args)
    if origin is tuple:
        return f"a list of {type_words(args[0])}"
    if hint is NoneType:
        return "null"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "an object"
    return str(getattr(hint, "__name__", hint))
