"""Checks of a class, its attributes and its options. They run no forward pass and take no time.

Each of them reports everything that it finds, so that one run shows all that has to be fixed.
"""

import inspect
import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from hisparse.algorithms import BaseSparseAlgorithm, Representation
from hisparse.errors import ConfigError, explain, one_line
from hisparse.options import from_options, matches
from hisparse.testing.case import Case
from hisparse.testing.operations import Violation


def declarations(case: Case) -> None:
    """The class is a frozen dataclass, and its attributes have valid values."""
    cls = type(case.make())
    faults = find_class_faults(cls)
    faults += _collect(cls, _query_window_faults(case))
    if not _collect(cls, _attributes_faults(cls)):
        faults += _collect(cls, _representations_faults(case))
    if faults:
        raise Violation(*faults)


def options(case: Case) -> None:
    """Options are checked: wrong types, NaN and absurd numbers are refused by name."""
    cls = type(case.make())
    faults = _collect(cls, _options_faults(case))
    if faults:
        raise Violation(*faults)


def find_class_faults(cls: type[BaseSparseAlgorithm]) -> list[str]:
    """Faults of a class that can be seen without an instance, one line each."""
    looks = (_dataclass_faults, _methods_faults, _attributes_faults)
    return [fault for look in looks for fault in _collect(cls, look(cls))]


def _collect(cls: type, found: Iterator[str]) -> list[str]:
    """All faults that a look at ``cls`` yields; an exception that it raises is one more."""
    faults: list[str] = []
    try:
        faults.extend(found)
    except Exception as error:
        faults.append(explain(error, cls))
    return faults


def _dataclass_faults(cls: type[Any]) -> Iterator[str]:
    name, expected = cls.__name__, "expected @dataclass(frozen=True, kw_only=True) above the class"
    if not is_dataclass(cls):
        yield f"{name}: got no dataclass, {expected}"
        return
    if not getattr(cls, "__dataclass_params__").frozen:  # noqa: B009
        yield f"{name}: got a mutable dataclass, {expected}: state belongs in representations"
    known = {field.name for field in fields(cls)}
    for option, hint in inspect.get_annotations(cls).items():
        if option not in known and "ClassVar" not in str(hint):
            yield f"option {option}: got no @dataclass on {name} itself, {expected}"


def _methods_faults(cls: type[Any]) -> Iterator[str]:
    for name in sorted(getattr(cls, "__abstractmethods__", ())):
        yield f"{cls.__name__}: got no method {name}, expected one"


def _attributes_faults(cls: type[Any]) -> Iterator[str]:
    for name, declared in get_type_hints(BaseSparseAlgorithm).items():
        (hint,), value = get_args(declared), getattr(cls, name)  # ClassVar[hint]
        if not matches(value, hint):
            yield f"{name}: got {value!r}, expected {inspect.formatannotation(hint)}"
        elif name == "scopes" and not value:
            yield "scopes: got none, expected one or more"
        elif name == "page_sizes" and value is not None and min(value, default=0) < 1:
            yield f"page_sizes: got {value!r}, expected None (any) or numbers of tokens"


def _query_window_faults(case: Case) -> Iterator[str]:
    window = case.make().query_window
    if not matches(window, int) or window < 0:
        yield f"query_window: got {window!r}, expected a number of queries, 0 or more"


def _representations_faults(case: Case) -> Iterator[str]:
    policy = replace(case, scope=case.make().scopes[0]).start().sim.policy
    found = case.make().representations(policy)
    hints = get_type_hints(Representation)
    for name, kind in found.items():
        valid = all(matches(getattr(kind, x), hint) for x, hint in hints.items())
        if not valid or min(kind.shape, default=1) < 1:
            yield (
                f"representations: got {name!r}: {kind!r}, expected Representation(shape, dtype, "
                "per) with sizes of at least 1 and per one of page, request, layer"
            )
    if found != case.make().representations(policy):
        yield "representations: got two answers for one policy, expected the same twice"


def _options_faults(case: Case) -> Iterator[str]:
    cls: type[Any] = type(case.make())
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        yield (
            f"options: got types that cannot be read ({one_line(error)}), expected their modules "
            "imported at run time, not under TYPE_CHECKING"
        )
        return
    given = {f.name: getattr(case.make(), f.name) for f in fields(cls) if f.init}
    yield from _accepted(cls, given | {"no_such_option": 1}, "no_such_option", "an unknown option")
    for option in (f for f in fields(cls) if f.init):
        for value, what in _bad_values(option, hints[option.name]):
            yield from _accepted(cls, given | {option.name: value}, option.name, what)


def _bad_values(option: Field[Any], hint: Any) -> Iterator[tuple[object, str]]:
    """Values that no option of this type may accept, and a description of each."""
    if option.default is option.default_factory is MISSING:
        return
    yield object(), "a wrong type"
    types = {hint, *get_args(hint)}
    if float in types:
        yield math.nan, "NaN"
    elif int in types:
        yield -(2**31), "-2147483648"


def _accepted(cls: type[Any], values: dict[str, Any], name: str, what: str) -> Iterator[str]:
    """A fault if the class accepts ``values``, or refuses them without naming the option."""
    try:
        from_options(cls, cls.__name__, "algorithm_config", values)
    except ConfigError as error:
        if name not in str(error):
            yield (
                f"option {name}: got the error {str(error)!r} for {what}, expected one that names "
                f'the option, such as "{name}: got {values[name]}, expected ..."'
            )
        return
    yield (
        f"option {name}: got no error for {what}, expected a ValueError from __post_init__ that "
        "names the option, the value and what is allowed"
    )
