"""A typed name-to-class table that refuses duplicates and lists what it holds."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from hisparse.errors import ConfigError, unknown_name

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and the classes they stand for, filled by decorator or by entry point.

    Args:
        kind: the word used in messages ("algorithm", "adapter").
        package: dotted name of the package with the built-in classes. Each of its modules is
            imported on the first lookup, so a new file there needs no other edit. Modules whose
            names begin with an underscore are left out.
        entry_point_group: packages installed beside this one that offer entries in this group are
            imported on the first lookup of an unknown name, or on listing.
    """

    def __init__(
        self, kind: str, *, package: str | None = None, entry_point_group: str | None = None
    ) -> None:
        self.kind = kind
        self._package = package
        self._group = entry_point_group
        self._entries: dict[str, type[T]] = {}
        self._built_in_loaded = False
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
            self._load_built_in()
        if name not in self._entries:
            self._load_plugins()
        if name not in self._entries:
            raise ConfigError(unknown_name(self.kind, name, self._entries))
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        self._load_built_in()
        self._load_plugins()
        return iter(sorted(self._entries))

    def _load_built_in(self) -> None:
        if self._built_in_loaded or self._package is None:
            return
        self._built_in_loaded = True
        package = import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
            if not module.name.rpartition(".")[2].startswith("_"):
                import_module(module.name)

    def _load_plugins(self) -> None:
        if self._plugins_loaded or self._group is None:
            return
        self._plugins_loaded = True
        for entry in entry_points(group=self._group):
            cls = entry.load()
            if entry.name not in self._entries:
                self.register(entry.name)(cls)
