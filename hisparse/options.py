"""Reads options from JSON, and checks them against the types of a frozen dataclass."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from hisparse.errors import ConfigError, quoted, unknown_name
from hisparse.units import MemorySize, parse_memory

T = TypeVar("T")

#: Numbers of settings fit into 64 bits, as in most languages that write JSON.
_LARGEST = 2**63 - 1
#: HOST:PORT, once or several times.
_ADDRESS = r"(tls://)?[^\s,/]+:\d{1,5}"
_ADDRESSES = re.compile(f"{_ADDRESS}(, *{_ADDRESS})*")


def read_text(file: str | Path, flag: str) -> str:
    """Read a text file that a user named.

    Args:
        file: the file; ``~`` is the user's home.
        flag: the flag that named it, for messages.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8 text.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no such user.
        reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"{flag}: cannot read {quoted(str(file))}: {reason}; expected a text file")


def read_object(file: str | Path, flag: str, example: str) -> dict[str, Any]:
    """Read a JSON object from a file that a user named; see :func:`parse_object`."""
    return parse_object(read_text(file, flag), f"{flag} {quoted(str(file))}", example)


def object_of(text: str, flag: str, example: str) -> dict[str, Any]:
    """The JSON object of a flag or, given ``@path``, of a file; see :func:`parse_object`."""
    if text.startswith("@"):
        return read_object(text[1:], flag, example)
    return parse_object(text, flag, example)


def parse_object(text: str, source: str, example: str) -> dict[str, Any]:
    """Parse a JSON object that a user wrote.

    Args:
        text: the text.
        source: the flag or file that it is from, for messages.
        example: such an object, for messages.

    Raises:
        ConfigError: the text is not JSON or no object, has a key twice or a number beyond 64 bits,
            or is nested too deep.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_parse_float,
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not JSON at line {error.lineno} column {error.colno}: {error.msg}; "
            f"expected an object such as {example}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{source}: nested too deep; expected an object such as {example}"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{source}: got {quoted(value)} ({type(value).__name__}), expected an object such as "
            f"{example}"
        )
    return value


def _parse_int(text: str) -> int:
    # int() refuses more than 4,300 digits in an error of its own.
    if len(text) > 20 or abs(int(text)) > _LARGEST:
        raise ConfigError(f"got the number {quoted(text)}, expected one that fits into 64 bits")
    return int(text)


def _parse_float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ConfigError(f"got the number {quoted(text)}, expected a finite one")
    return float(text)


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"key {quoted(twice)} is given more than once; expected it once")
    return result


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
        got = f"{quoted(value)} ({type(value).__name__})"
        raise ConfigError(f"{key}: got {got}, expected {type_words(hint)}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(f"{key}: got {quoted(value)}, expected a number that fits into 64 bits")


def check_fields(where: str, value: object, kind: type) -> None:
    """Check an object from JSON against a ``TypedDict``. Other keys may be there.

    Args:
        where: the place of the object, for messages ("summary[3]").
        value: the object.
        kind: a ``TypedDict``, whose fields may be lists of others.

    Raises:
        ConfigError: the value is no object, lacks a key, or a value has another type.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: got {quoted(value)}, expected an object")
    hints = get_type_hints(kind)
    if absent := sorted(hints.keys() - value.keys()):
        raise ConfigError(f"{where}: got no {', '.join(absent)}, expected an object that has them")
    for name, hint in hints.items():
        inner: Any = get_args(hint)[0] if get_origin(hint) is list else None
        if not is_typeddict(inner):
            check_type(f"{where}: {name}", value[name], hint)
            continue
        check_type(f"{where}: {name}", value[name], list[Any])
        for i, item in enumerate(value[name]):
            check_fields(f"{where}: {name}[{i}]", item, inner)


def matches(value: object, hint: Any) -> bool:
    """Whether a value from JSON fits a type; a bool is not a number."""
    if type(value) is hint:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(matches(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(matches(v, args[0]) for v in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(matches(v, args[1]) for v in value.values())
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
    if origin in (tuple, list):
        return "a list" if args[0] is Any else f"a list of {type_words(args[0])}"
    if hint is NoneType:
        return "null"
    if hint is bool:
        return "true or false"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "an object"
    return str(getattr(hint, "__name__", hint))


def meanings(cls: type) -> dict[str, str]:
    """The text of each attribute in the docstring of a class and of its bases, on one line."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        text = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        for keys, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
            texts |= dict.fromkeys(keys.split(", "), " ".join(meaning.split()))
    return texts


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Where a server keeps prefixes below host memory.

    Raises:
        ConfigError: a value is out of range or contradicts another one.

    Attributes:
        backend: "file", hisparse's own store in a folder, or one of SGLang's storage backends by
            its name there, such as "mooncake" or "dynamic".
        path: folder of the backend "file".
        manager: instead of a path: "HOST:PORT" of the gRPC of a manager, which knows the pages of
            many servers, or "tls://HOST:PORT"; several with commas if one of them leads.
        manager_group: instance group there, which has the quota.
        size: most bytes of the backend "file"; the least recently used pages leave first. A
            fraction is of the file system's size. None: no limit. With ``manager``: bytes of host
            memory that are lent to its Mooncake.
        ttl_s: seconds that an unused page stays. None: until its space is needed.
        timeout_s: time limit of a call to the store, in seconds, with a second more for every 256
            MiB. Late pages are computed.
        threads: threads that load pages.
        swap_min_tokens: if a retraction takes at least so many tokens from a request, they are
            written to the store and read back; fewer are computed. None: all are computed.
        options: for a backend of SGLang: what ``--hicache-storage-backend-extra-config`` would
            hold.
    """

    backend: str = "file"
    path: str | None = None
    manager: str | None = None
    manager_group: str = "default"
    size: MemorySize | None = None
    ttl_s: float | None = None
    timeout_s: float = 5.0
    threads: int = 2
    swap_min_tokens: int | None = 256
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend == "file" and not (self.path or self.manager):
            raise ConfigError("path is not set; expected the folder of the store, or manager")
        own = ("manager", "path", "size", "ttl_s")
        given = [name for name in own if getattr(self, name) is not None]
        if self.backend != "file" and given:
            raise ConfigError(
                f"{given[0]} is set for backend {quoted(self.backend)}; expected it only "
                'for "file", and options for others'
            )
        if self.manager is not None and (others := set(given) - {"manager", "size"}):
            raise ConfigError(f"{min(others)} and manager are set; expected one of the two")
        if self.manager is not None and isinstance(self.size, float):
            raise ConfigError(f"size: got {self.size}, expected bytes beside manager")
        if self.manager is not None and not _ADDRESSES.fullmatch(self.manager):
            raise ConfigError(f"manager: got {quoted(self.manager)}, expected HOST:PORT")
        if self.backend == "file" and self.options:
            raise ConfigError('options are set for backend "file"; expected path, size and ttl_s')
        if "\0" in (self.path or ""):
            raise ConfigError(f"path: got {quoted(self.path)}, expected the name of a folder")
        if self.size is not None:
            parse_memory("size", self.size)
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise ConfigError(f"ttl_s: got {self.ttl_s}, expected seconds above 0")
        if not 0 < self.timeout_s < 3600:
            raise ConfigError(
                f"timeout_s: got {self.timeout_s}, expected seconds above 0, below 3600"
            )
        if not 1 <= self.threads <= 64:
            raise ConfigError(f"threads: got {self.threads}, expected 1 to 64")
        if self.swap_min_tokens is not None and self.swap_min_tokens < 0:
            raise ConfigError(
                f"swap_min_tokens: got {self.swap_min_tokens}, expected null or at least 0"
            )

    @property
    def lent_bytes(self) -> int:
        """Bytes of host memory for a Mooncake of the manager."""
        return 0 if self.size is None else int(parse_memory("size", self.size))


def read_storage(given: object) -> StorageOptions | None:
    """Options of the storage, if there is one."""
    if isinstance(given, StorageOptions) or given is None:
        return given
    if isinstance(given, Mapping):
        return from_options(StorageOptions, "storage", "storage", given)
    raise ConfigError(
        f"storage: got {quoted(given)}, expected null or an object such as "
        '{"backend": "file", "path": "/var/cache/hisparse", "size": "500GiB"}'
    )
