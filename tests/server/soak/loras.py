"""LoRA adapters that come and go while a server has other requests."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapters import write_adapter
from disaggregated import Pair
from harness import Server

#: Fewer than the adapters, so that each name gets one after the other.
_NAMES = ("first", "second")


def make_adapters(folder: Path, count: int, model: str) -> dict[str, Path]:
    """Write adapters of a kind of model. Returns their folders by the names of the folders."""
    return {
        f"adapter-{seed}": write_adapter(folder / f"adapter-{seed}", seed, model)
        for seed in range(count)
    }


@dataclass(eq=False)
class _Name:
    """A name and a folder under which the server has one adapter after the other.

    Attributes:
        folder: of the adapter that is loaded.
        adapter: which one that is; None: none is loaded.
        users: requests that name it.
    """

    folder: Path
    adapter: str | None = None
    users: int = 0


class Adapters:
    """Adapters of a running server, each loaded when a request needs it.

    The one that was loaded first makes way: its requests end, it is unloaded, and the other one is
    written into its folder, as if it had been trained again, and loaded under its name.

    Args:
        server: the server.
        sources: folders of all adapters.
        folder: for the adapters that are loaded.

    Attributes:
        num_loads: adapters that were loaded.
    """

    def __init__(self, server: Server | Pair, sources: Mapping[str, Path], folder: Path) -> None:
        self._server, self._sources = server, sources
        self._names = [_Name(folder / name) for name in _NAMES]
        self._next, self._ended = threading.Lock(), threading.Condition()
        self.num_loads = 0

    @contextlib.contextmanager
    def loaded(self, adapter: str | None) -> Iterator[dict[str, str]]:
        """Keep an adapter loaded for a request. Yields the fields that name it."""
        if adapter is None:
            yield {}
            return
        with self._next:
            names = (name for name in self._names if name.adapter == adapter)
            name = next(names, None) or self._replace(adapter)
            with self._ended:
                name.users += 1
        try:
            yield {"lora_path": name.folder.name}
        finally:
            with self._ended:
                name.users -= 1
                self._ended.notify_all()

    def unload_all(self) -> None:
        """Leave the server without adapters."""
        for name in self._names:
            self._unload(name)

    def _replace(self, adapter: str) -> _Name:
        """Load an adapter in place of the one that was loaded first."""
        name = self._names.pop(0)
        self._names.append(name)
        self._unload(name)
        shutil.copytree(self._sources[adapter], name.folder, dirs_exist_ok=True)
        self._server.load_adapter(name.folder.name, name.folder)
        name.adapter = adapter
        self.num_loads += 1
        return name

    def _unload(self, name: _Name) -> None:
        with self._ended:
            self._ended.wait_for(lambda: not name.users)
        if name.adapter is not None:
            # SGLang waits for requests whose clients have hung up.
            self._server.unload_adapter(name.folder.name)
            name.adapter = None


@contextlib.contextmanager
def served_adapters(server: Server | Pair, sources: Mapping[str, Path]) -> Iterator[Adapters]:
    """The adapters of a server; at the end none is loaded."""
    with tempfile.TemporaryDirectory(prefix="hisparse-adapters-") as folder:
        adapters = Adapters(server, sources, Path(folder))
        yield adapters
        adapters.unload_all()
