"""A typed name-to-class table that refuses duplicates and lists what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from hisparse.errors import ConfigError, unknown_name

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and the classes they stand for, filled by decorator or by entry point.

    Args:
        kind: the word used in messages ("algorithm", "adapter").
        entry_point_group: installed packages that offer entries in this group are
            imported on the first lookup of a name that is not known yet, or on listing.
    """

    def __init__(self, kind: str, entry_point_group: str | None = None) -> None:
        self.kind = kind
        self._group = entry_point_group
        self._entries: dict[str, type[T]] = {}
        self._plugins_loaded = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: file the class under ``name``; a taken name is an error."""

        def decorate(cls: type[T]) -> type[T]:
            if name in self._entries:
                taken = self._entries[name]
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice: by "
                    f"{taken.__module__}.{taken.__qualname__} and by "
                    f"{cls.__module__}.{cls.__qualname__}; choose another name"
                )
            self._entries[name] = cls
            return cls

        return decorate

    def get(self, name: str) -> type[T]:
        """The class filed under ``name``; ``ConfigError`` with the choices if there is none."""
        if name not in self._entries:
            self._load_plugins()
        if name not in self._entries:
            raise ConfigError(unknown_name(self.kind, name, self._entries))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(sorted(self._entries))

    def _load_plugins(self) -> None:
        if self._plugins_loaded or self._group is None:
            return
        self._plugins_loaded = True
        for entry in entry_points(group=self._group):
            cls = entry.load()
            if entry.name not in self._entries:
                self.register(entry.name)(cls)
