"""A typed table from names to classes that rejects duplicates and lists its entries."""

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from hisparse.errors import ConfigError, one_line, unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to classes; filled by decorators and entry points.

    Args:
        kind: noun for messages ("algorithm", "adapter").
        package: dotted name of the package with the built-in classes. The first lookup imports all
            of its modules, so a new file needs no other edit. Modules with a leading underscore in
            their names are skipped.
        entry_point_group: group of entry points of other packages. They are loaded on the first
            lookup of an unknown name, or on listing.
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
        """Class decorator: register the class under ``name``; a taken name is an error."""

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
        """The class registered under ``name``; otherwise ``ConfigError`` with the choices."""
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
        package = import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
            if not module.name.rpartition(".")[2].startswith("_"):
                import_module(module.name)
        self._built_in_loaded = True

    def _load_plugins(self) -> None:
        if self._plugins_loaded or self._group is None:
            return
        for entry in entry_points(group=self._group):
            try:
                cls = entry.load()
            except Exception as error:
                raise ConfigError(
                    f"{self.kind} {entry.name!r}: cannot import {entry.value!r} of an installed "
                    f"package: {one_line(error)}; fix or uninstall the package"
                ) from error
            if entry.name not in self._entries:
                self.register(entry.name)(cls)
        self._plugins_loaded = True
