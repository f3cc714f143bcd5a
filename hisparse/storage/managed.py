"""A store of pages whose places a manager of shared caches knows (docs/kvcm.md).

The manager says in which file or under which key of a Mooncake a page lies; its bytes do not pass
through it. A namespace is an instance of the manager, a page is a block, and its bytes are those of
``pages.py``. Only places of the instance are used, in folders that nobody else can write to.

A page is written in two phases: the manager names a place, the page is written there, and the
manager is told. Until then nobody is sent there. Its checksum is checked when it is read, so what
a crash or a disk has damaged is absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hisparse.errors import HiSparseError, one_line, quoted
from hisparse.kvcm.client import ManagerClient, ManagerError
from hisparse.kvcm.mooncake import Mooncake
from hisparse.private_files import PrivateFolder
from hisparse.storage.namespace import Namespace
from hisparse.storage.pages import (
    DIGEST_BYTES,
    DamagedError,
    check_page,
    page_digest,
    read_page,
    write_parts,
)  # fmt: skip

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Types of storages, and URIs: path or key, and place in a file.
_SCHEMES: Final = ("file", "hf3fs", "mooncake")
_URI: Final = re.compile(
    rf"({'|'.join(_SCHEMES)})://([^/?]+)(/[^?]*)\?(?:blkid=(\d{{1,9}})&)?(?:key=([^&]+)&)?"
    r"size=(\d{1,10})"
)
#: A file of an instance, or the end of a key.
_FILE: Final = re.compile(r"[0-9a-f]{1,16}(_[0-9a-f]{1,32})?")
#: Keys of a query.
_MAX_KEYS: Final = 1 << 14
#: Seconds for which an answer of the manager holds: servers repeat the lookups of requests that
#: wait.
_SEEN_S: Final = 1.0
#: Seconds that a write may take.
_WRITE_S: Final = 30


class _Place(NamedTuple):
    """Where a page lies: a file in a folder of a storage, and its first byte there; or a key."""

    storage: str
    root: Path | None  #: None: it is a key.
    folder: Path
    file: str
    at: int


def block_key(key: str) -> int:
    """The manager's number of a page, 64 bits with a sign; that of Tair's connector for SGLang."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big", signed=True)


class ManagedStore:
    """Pages in files that a manager assigns, shared by servers. Any thread may call its methods.

    Args:
        manager: addresses of the manager, as :class:`ManagerClient` takes them.
        group: of the manager's instances; it has the quota.
        timeout_s: time limit of a call to the manager.
        lent_bytes: of this process's memory, which hold pages if a storage is a Mooncake.
    """

    def __init__(self, manager: str, group: str, timeout_s: float, lent_bytes: int = 0) -> None:
        self._client, self._group = ManagerClient(manager, timeout_s), group
        #: By the key of a namespace that the manager knows: the ``storage_spec`` of each storage.
        self._storages: dict[str, dict[str, dict[str, str]]] = {}
        #: By the keys of a namespace and a page: its URI; "": it is absent.
        self._seen: dict[tuple[str, str], str] = {}
        self._seen_until = 0.0
        self._folders: dict[Path, PrivateFolder] = {}
        self._mooncakes: dict[str, Mooncake] = {}
        self._lent_bytes, self._connecting = lent_bytes, threading.Lock()

    def find(self, namespace: Namespace, keys: Sequence[str]) -> int:
        """Length of the longest prefix of ``keys`` whose pages are all stored, a second ago.

        Raises:
            ManagerError: the manager does not answer.
        """
        if time.monotonic() > self._seen_until:
            self._seen, self._seen_until = {}, time.monotonic() + _SEEN_S
        seen, found = self._seen, 0
        while found < len(keys):
            uri = seen.get((namespace.key, keys[found]))
            if uri:
                found += 1
            elif uri is None:
                asked = keys[found : found + _MAX_KEYS]
                uris = self._uris(namespace, "QT_PREFIX_MATCH", asked)
                names = [(namespace.key, key) for key in asked]
                seen.update(zip(names, [*uris, ""], strict=False))
            else:
                break
        return found

    def get(
        self, namespace: Namespace, keys: Sequence[str], buffers: Sequence[Buffer]
    ) -> list[bool | None]:
        """Read pages. The manager forgets those that are damaged or lost.

        Args:
            buffers: one for each key: writable, contiguous, of ``namespace.page_bytes`` bytes.

        Returns:
            For each key True if its buffer holds the page, None if it is absent, False if it is
            damaged.

        Raises:
            HiSparseError: the manager does not answer, or the system refuses.
        """
        uris, found, lost = self._places(namespace, keys), list[bool | None](), dict[str, str]()
        for key, uri, buffer in zip(keys, uris, buffers, strict=True):
            found.append(None)
            if uri:
                try:
                    found[-1] = self._read(namespace, key, uri, memoryview(buffer).cast("B"))
                except (FileNotFoundError, DamagedError) as error:
                    found[-1] = False if isinstance(error, DamagedError) else None
                    lost[key] = uri
        if lost:  # Unless a page has moved meanwhile.
            for key in lost:
                self._seen.pop((namespace.key, key), None)
            now = self._places(namespace, [*lost])
            self.remove(namespace, [x for x, y in zip(lost, now, strict=True) if lost[x] == y])
        return found

    def put(self, namespace: Namespace, keys: Sequence[str], pages: Sequence[Buffer]) -> bool:
        """Store pages; True: all are stored, or others write them now. False: there is no room.

        Args:
            keys: of pages, each once.
            pages: contiguous, of ``namespace.page_bytes`` bytes.

        Raises:
            HiSparseError: the manager does not answer, or the system refuses.
        """
        numbers = list(map(block_key, keys))
        try:
            begun = self._call(
                namespace, "StartWriteCache", block_keys=numbers, write_timeout_seconds=_WRITE_S
            )
        except ManagerError as error:
            if error.code == "INTERNAL_ERROR":  # What it answers where a quota is full.
                return False
            raise
        mask, uris = begun.block_mask, _uris_of(begun, namespace)
        skipped = [*mask.bool_masks.values] or [i < mask.offset for i in range(len(keys))]
        if len(skipped) != len(keys) or skipped.count(False) != len(uris):
            raise _nonsense("StartWriteCache", f"{len(uris)} places, mask {mask}", len(keys))
        new = [pair for pair, skip in zip(zip(keys, pages, strict=True), skipped, strict=True)
               if not skip]  # fmt: skip
        written, failed = list[bool](), None
        for (key, page), uri in zip(new, uris, strict=True):
            is_written = False
            if failed is None:
                try:
                    is_written = self._write(namespace, key, uri, memoryview(page).cast("B"))
                except (HiSparseError, OSError) as error:
                    failed = error
            written.append(is_written)
        if new:
            self._call(
                namespace, "FinishWriteCache", write_session_id=begun.write_session_id,
                success_blocks={"bool_masks": {"values": written}},
            )  # fmt: skip
        if failed is not None:
            raise failed
        stored = [(x, uri) for (x, _), uri, ok in zip(new, uris, written, strict=True) if ok]
        self._seen.update(((namespace.key, x), uri) for x, uri in stored)
        return all(written)

    def remove(
        self, namespace: Namespace, keys: Sequence[str] = (), unused_s: float | None = None
    ) -> int:
        """Remove pages, soon. Those unused for ``unused_s`` seconds are left to the manager.

        Returns:
            The number of ``keys``.
        """
        if keys:
            self._call(namespace, "RemoveCache", block_keys=list(map(block_key, keys)))
        for key in keys:
            self._seen.pop((namespace.key, key), None)
        return len(keys)

    def close(self) -> None:
        """Let go of the manager and the folders."""
        self._client.close()
        for folder in self._folders.values():
            folder.close()
        for mooncake in self._mooncakes.values():
            mooncake.close()

    def _places(self, namespace: Namespace, keys: Sequence[str]) -> list[str]:
        """The URI of each page; "": it is absent."""
        found = {key: uri for key in keys if (uri := self._seen.get((namespace.key, key)))}
        if asked := [key for key in keys if key not in found]:
            uris = self._uris(namespace, "QT_BATCH_GET", asked)
            if len(uris) != len(asked):
                raise _nonsense("GetCacheLocation", f"{len(uris)} places", len(asked))
            found |= zip(asked, uris, strict=True)
        return [found[key] for key in keys]

    def _uris(self, namespace: Namespace, query: str, keys: Sequence[str]) -> list[str]:
        numbers = list(map(block_key, keys))
        answer = self._call(namespace, "GetCacheLocation", query_type=query, block_keys=numbers)
        return _uris_of(answer, namespace)

    def _call(self, namespace: Namespace, method: str, **fields: Any) -> Any:
        """Call the manager for an instance. One that has lost its memory learns of it again."""
        known = namespace.key in self._storages
        if not known:
            self._register(namespace)
        try:
            return self._client.call(method, instance_id=namespace.key, **fields)
        except ManagerError as error:
            if not known or error.code != "INSTANCE_NOT_EXIST":
                raise
        self._register(namespace)
        return self._client.call(method, instance_id=namespace.key, **fields)

    def _register(self, namespace: Namespace) -> None:
        size = namespace.page_bytes + DIGEST_BYTES
        answer = self._client.call(
            "RegisterInstance",
            instance_group=self._group,
            instance_id=namespace.key,
            block_size=namespace.page_size,
            location_spec_infos=[{"name": _spec(namespace), "size": size}],
            model_deployment={
                "model_name": namespace.model,
                "dtype": namespace.kv_dtype,
                "tp_size": namespace.num_ranks,
                "user_data": namespace.text,
            },
        )
        try:
            storages = json.loads(answer.storage_configs)
            self._storages[namespace.key] = {
                x["global_unique_name"]: x["storage_spec"] | _root(x["storage_spec"])
                for x in storages
                if x["type"] in _SCHEMES
            }
        except (ValueError, TypeError, KeyError) as error:
            raise _nonsense("RegisterInstance", one_line(error), "the group's storages") from None

    def _read(self, namespace: Namespace, key: str, uri: str, page: memoryview) -> bool | None:
        """Read a page; None: it cannot be reached, and may be there.

        Raises:
            DamagedError: it has other bytes.
            FileNotFoundError: it is lost.
        """
        place, digest = self._place(namespace, uri), bytearray(DIGEST_BYTES)
        if place.root is None:
            with self._mooncake(namespace, place.storage) as mooncake:
                if not mooncake.get(place.file, page, digest):
                    return None
            check_page(namespace.key, key, page, digest)
            return True
        if not place.folder.is_dir():
            return None
        with self._opened(place, place.root, os.O_RDONLY) as fd:
            read_page(fd, namespace.key, key, page)
        return True

    def _write(self, namespace: Namespace, key: str, uri: str, page: memoryview) -> bool:
        """Write a page; False: there is no room."""
        place, parts = self._place(namespace, uri), (page, page_digest(namespace.key, key, page))
        if place.root is None:
            with self._mooncake(namespace, place.storage) as mooncake:
                return mooncake.put(place.file, *parts)
        with self._opened(place, place.root, os.O_WRONLY | os.O_CREAT) as fd:
            write_parts(fd, parts)
        return True

    @contextlib.contextmanager
    def _mooncake(self, namespace: Namespace, storage: str) -> Iterator[Mooncake]:
        spec = self._storages[namespace.key][storage]
        master, size = spec["master_server_entry"], namespace.page_bytes + DIGEST_BYTES
        with _refusals(storage, "a Mooncake that all servers and the manager reach"):
            with self._connecting:
                if master not in self._mooncakes:
                    self._mooncakes[master] = Mooncake(spec, self._lent_bytes, size)
            yield self._mooncakes[master]

    @contextlib.contextmanager
    def _opened(self, place: _Place, root: Path, flags: int) -> Iterator[int]:
        """The file of a place, open there."""
        with _refusals(root, "a folder that servers and manager mount, all as one user"):
            fd = self._folder(place, root).open(place.file, flags)
            try:
                os.lseek(fd, place.at, os.SEEK_SET)
                yield fd
            finally:
                os.close(fd)

    def _folder(self, place: _Place, root: Path) -> PrivateFolder:
        """The folder of a place, which nobody else can write to; it is made if it is absent."""
        folder = self._folders.get(place.folder)
        if folder is None or not _is_there(folder):
            if not root.is_dir():
                raise HiSparseError(f"storage: got no {root}, expected it to be mounted here")
            folder = PrivateFolder(root, or_roots=True)
            for part in place.folder.relative_to(root).parts:
                folder = PrivateFolder(folder.path / part, parent=folder, or_roots=True)
            self._folders[place.folder] = folder
        return folder

    def _place(self, namespace: Namespace, uri: str) -> _Place:
        """Where a URI leads to, which has to be a place of the namespace in a storage.

        Raises:
            ManagerError: it is elsewhere, or has other bytes.
        """
        found, expected = _URI.fullmatch(uri), namespace.page_bytes + DIGEST_BYTES
        scheme, storage, path, number, name, size = found.groups() if found else [""] * 6
        if found and storage not in self._storages[namespace.key]:  # The group has another by now.
            self._register(namespace)
        spec = self._storages[namespace.key].get(storage, {})
        root = spec.get("root_path", "")
        folder, _, file = (path if root else name or "").rpartition("/")
        own = f"{root}{namespace.key}/{_spec(namespace)}"
        is_key = not root and path == "/" and scheme == "mooncake" and "master_server_entry" in spec
        if not (is_key or root) or folder != own or not _FILE.fullmatch(file):
            raise _nonsense("place", quoted(uri), f"{own}/<hexadecimal> in a storage of the group")
        if int(size) != expected:
            raise _nonsense("place", quoted(uri), f"size={expected}")
        if is_key:
            return _Place(storage, None, Path(), f"{folder}/{file}", 0)
        return _Place(storage, Path(root), Path(folder), file, int(number or 0) * expected)


def _spec(namespace: Namespace) -> str:
    """Name of the part of a block that a rank has; each rank has an instance of its own."""
    return f"tp_{namespace.rank}"


def _root(spec: dict[str, str]) -> dict[str, str]:
    """The folder of a storage, with "/" at both ends, as ``root_path``; none of a Mooncake."""
    if "master_server_entry" in spec:
        return {}
    root = spec.get("root_path") or posixpath.join(spec["mountpoint"], spec["root_dir"].lstrip("/"))
    return {"root_path": posixpath.normpath(root) + "/"}


@contextlib.contextmanager
def _refusals(where: object, expected: str) -> Iterator[None]:
    """Errors of the system but absence become ours."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        text = f"got {one_line(error)}; expected {expected}"
        raise HiSparseError(f"storage: {where}: {text}") from None


def _is_there(folder: PrivateFolder) -> bool:
    """Whether nobody has deleted an open folder, also on another host."""
    try:
        return os.fstat(folder.fd).st_nlink > 0
    except OSError:
        return False


def _uris_of(answer: Any, namespace: Namespace) -> list[str]:
    """The URI of the namespace's part of each location of an answer; "": it is not stored."""
    name = _spec(namespace)
    return [next((part.uri for part in x.location_specs if part.name == name), "")
            for x in answer.locations]  # fmt: skip


def _nonsense(method: str, got: object, expected: object) -> ManagerError:
    return ManagerError("", f"manager: {method}: got {got}, expected {expected}")
