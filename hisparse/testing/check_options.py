"""Checks of a class and its options, without a forward pass."""

from __future__ import annotations

import math
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from hisparse.algorithms import Representation
from hisparse.errors import ConfigError, one_line
from hisparse.options import from_options
from hisparse.testing.case import Case
from hisparse.testing.recorder import Violation
from hisparse.types import SelectionScope

__all__ = ["declarations", "options"]

_OWNERS = ("page", "request", "layer")


def declarations(case: Case) -> None:
    """What the class says of itself can be used."""
    algorithm = case.make()
    _require_frozen(algorithm)
    scopes, known = tuple(algorithm.scopes), get_args(SelectionScope)
    if not scopes or not set(scopes) <= set(known):
        raise Violation(f"scopes: got {scopes!r}, expected one or more of {', '.join(known)}")
    sizes = algorithm.page_sizes
    if sizes is not None and (not sizes or any(type(s) is not int or s < 1 for s in sizes)):
        raise Violation(f"page_sizes: got {sizes!r}, expected None (any) or numbers of tokens")
    window = algorithm.query_window
    if type(window) is not int or window < 0:
        raise Violation(f"query_window: got {window!r}, expected a number of queries, 0 or more")
    if not (type(algorithm).__doc__ or "").strip() or _has_no_docstring(type(algorithm)):
        raise Violation(
            f"{type(algorithm).__name__}: got no docstring, expected one whose first line says "
            "what is kept: `hisparse algorithms` shows it"
        )
    _require_representations(case)


def _has_no_docstring(cls: type) -> bool:
    """A dataclass without one gets its signature."""
    return (cls.__doc__ or "").startswith(f"{cls.__name__}(")


def _require_frozen(algorithm: Any) -> None:
    expected = "expected @dataclass(frozen=True, kw_only=True): what is remembered lies in "
    if not is_dataclass(algorithm):
        raise Violation(f"{type(algorithm).__name__}: got no dataclass, {expected}representations")
    try:
        # The name of no field: frozen dataclasses refuse every one.
        setattr(algorithm, "_not_an_option", 0)  # noqa: B010
    except FrozenInstanceError:
        return
    raise Violation(f"{type(algorithm).__name__}: got a mutable class, {expected}representations")


def _require_representations(case: Case) -> None:
    policy = replace(case, scope=case.make().scopes[0]).start().sim.policy
    found = case.make().representations(policy)
    for name, kind in found.items():
        good = type(kind) is Representation and kind.per in _OWNERS
        if not good or any(type(n) is not int or n < 1 for n in kind.shape):
            raise Violation(
                f"representations: got {name!r}: {kind!r}, expected Representation(shape, dtype, "
                f"per) with sizes of at least 1 and per one of {', '.join(_OWNERS)}"
            )
    if found != case.make().representations(policy):
        raise Violation("representations: got two answers for one policy, expected the same twice")


def options(case: Case) -> None:
    """Options come from JSON and are checked: wrong types, NaN and absurd numbers are refused."""
    cls: type[Any] = type(case.make())
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise Violation(
            f"options: got types that cannot be read ({one_line(error)}), expected them imported "
            "at run time, not under TYPE_CHECKING"
        ) from None
    given = {f.name: getattr(case.make(), f.name) for f in fields(cls) if f.init}
    _require_refused(cls, given | {"no_such_option": 1}, "no_such_option", "an unknown option")
    for option in (f for f in fields(cls) if f.init):
        if option.default is option.default_factory is MISSING:
            continue
        hint = hints[option.name]
        _require_refused(cls, given | {option.name: object()}, option.name, "a wrong type")
        kinds = {hint, *get_args(hint)}
        if float in kinds:
            _require_refused(cls, given | {option.name: math.nan}, option.name, "NaN")
        elif int in kinds:
            _require_refused(cls, given | {option.name: -(2**31)}, option.name, "-2147483648")


def _require_refused(cls: type[Any], values: dict[str, Any], name: str, what: str) -> None:
    try:
        from_options(cls, cls.__name__, "algorithm_config", values)
    except ConfigError as error:
        if name not in str(error):
            raise Violation(
                f"option {name}: got an error that does not name it for {what} ({error}), expected "
                f'such as "{name}: got {values[name]}, expected ..."'
            ) from None
        return
    raise Violation(
        f"option {name}: got {what} accepted, expected a ValueError from __post_init__ that says "
        "what was got and what is expected"
    )
