"""Where the bytes of blocks lie: URIs that engines get, files or keys that the manager deletes.

Engines write and read the bytes; none pass through the manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import posixpath
import re
import threading
from collections.abc import Collection, Iterable
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from hisparse.errors import one_line, quoted
from hisparse.kvcm.mooncake import MooncakeProcess
from hisparse.kvcm.wire import PROTO, ServiceError

#: Field of a StorageConfig to the type in URIs and start-up files, and to its number.
TYPES: Final = {
    "mooncake": ("mooncake", PROTO.StorageType["ST_MOONCAKE"]),
    "nfs": ("file", PROTO.StorageType["ST_NFS"]),
    "threefs": ("hf3fs", PROTO.StorageType["ST_3FS"]),
}
MAX_BLOCKS_PER_FILE: Final = 4096
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
#: What may stand in a URI without a meaning of its own.
_ODD = re.compile(r"[\s?#&=%\x00-\x1f\x7f]")
_MAX_PART: Final = 200
#: A Mooncake's master in messages, and in what engines are told.
MASTER_FIELD, MASTER = "master_service_entry", "master_server_entry"
_LOG: Final = logging.getLogger(__name__)
#: What a probe writes, and seconds that it may take.
_PROBE: Final = b"kvcm"
_PROBE_S: Final = 5.0
#: A full storage can be read; others may have rights that the manager has not.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_RIGHT: Final = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)


def _invalid(field: str, value: object, expected: str) -> ServiceError:
    message = f"{field}: got {quoted(value)}, expected {expected}"
    return ServiceError("INVALID_ARGUMENT", message)


def check_part(field: str, value: str) -> None:
    """Refuse a name that would lead out of a storage's folder, or that a URI cannot have.

    Args:
        field: name of the request's field, for the message.
        value: one part of a path, or several with "/" between them.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if (
        len(value.encode()) > _MAX_PART
        or _ODD.search(value)
        or any(part in ("", ".", "..") for part in value.split("/"))
    ):
        expected = f"up to {_MAX_PART} bytes without spaces, ?#&=% and parts like '..'"
        raise _invalid(field, value, expected)


def _folder(field: str, spec: Any) -> str:
    """The folder of a storage, with "/" at both ends; "" of one that has keys.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    if field == "mooncake":
        for name in ("metadata_connstring", "master_service_entry"):
            if not getattr(spec, name):
                raise _invalid(name, "", "an address")
        return ""
    if field == "nfs":
        root = spec.root_path
    else:
        root = posixpath.join(spec.mountpoint, spec.root_dir.lstrip("/"))
    folder = posixpath.normpath(root).strip("/")
    if not root.startswith("/") or not folder or ".." in root.split("/") or _ODD.search(root):
        raise _invalid("root", root, "the absolute path of a folder")
    return f"/{folder}/"


class Storage:
    """A folder that all engines mount, or a Mooncake.

    Args:
        number: of its record.
        config: a ``StorageConfig``.
        enabled: whether an administrator lets queries and writes use it.
        worked: the attribute.

    Attributes:
        failing: whether it cannot be used now.
        worked: whether the manager could use its folder.
        is_kept: whether the store says so.
        root: absolute path, with "/" at both ends; "" of a Mooncake.
        scheme: the type in URIs.
        type: number of the type.
        blocks_per_file: at most.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """

    def __init__(self, number: int, config: Any, enabled: bool, worked: bool = False) -> None:
        self.number = number
        self.enabled = enabled
        self.failing = False
        self.is_probed = False  #: or it hangs
        self._process: MooncakeProcess | None = None
        self._process_lock = threading.Lock()
        self._place: tuple[str, ...] = ()
        self.configure(config)
        self.worked = self.is_kept = worked

    def configure(self, config: Any) -> None:
        """Take a configuration; raises as the constructor does, and changes nothing then."""
        name, field = config.global_unique_name, config.WhichOneof("storage_spec")
        if not _NAME.fullmatch(name):
            raise _invalid("global_unique_name", name, "up to 128 letters, digits, '.', '_', '-'")
        if field not in TYPES:
            raise _invalid("storage_spec", field or "none", " or ".join(TYPES))
        spec = getattr(config, field)
        root, blocks = _folder(field, spec), getattr(spec, "key_count_per_file", 1)
        if blocks > MAX_BLOCKS_PER_FILE:
            raise _invalid("key_count_per_file", blocks, f"at most {MAX_BLOCKS_PER_FILE}")
        self.config, self._spec, self.name, self.root = config, spec, name, root
        self.scheme, self.type = TYPES[field]
        self.blocks_per_file, self.is_kept = max(1, blocks), False
        place = self.scheme, root, getattr(spec, MASTER_FIELD, "")
        if self._place != place:
            self._place, self.worked = place, False
        self.close()

    @property
    def available(self) -> bool:
        """Whether queries and writes use it."""
        return self.enabled and not self.failing

    def moves_to(self, other: Storage) -> bool:
        """Whether blocks of this storage would lie elsewhere with another's configuration."""
        return self._place != other._place

    def record(self) -> bytes:
        """What the store keeps of it."""
        flags = bytes((self.enabled | self.worked << 1,))
        return b"S" + flags + bytes(self.config.SerializeToString())

    def describe(self) -> dict[str, Any]:
        """What engines are told of it when they register."""
        spec = MessageToDict(
            self._spec, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        if "root_path" in spec:
            spec["root_path"] = self.root
        if MASTER_FIELD in spec:
            spec[MASTER] = spec.pop(MASTER_FIELD)
        return {
            "type": self.scheme,
            "is_available": self.available,
            "global_unique_name": self.name,
            "storage_spec": spec,
        }

    def path(self, instance: str, spec: str, file: str) -> str:
        """Absolute path of a file of an instance's blocks, of one part of each; or their key."""
        return f"{self.root}{instance}/{spec}/{file}"

    def uri(self, instance: str, spec: str, file: str, place: int, size: int) -> str:
        """Where one part of a block lies: ``size`` bytes from ``place * size`` on, in a file."""
        path = self.path(instance, spec, file)
        if not self.root:
            return f"{self.scheme}://{self.name}/?key={path}&size={size}"
        place_of = f"blkid={place}&" if place or self.blocks_per_file > 1 else ""
        return f"{self.scheme}://{self.name}{path}?{place_of}size={size}"

    def delete(self, paths: Collection[str]) -> Collection[str]:
        """Delete files or keys; what is gone counts as deleted.

        Returns:
            Those that could not be deleted.
        """
        if self.failing:  # Files below another folder in its place would count as deleted.
            return paths
        if self.root:
            return delete_files(paths)
        try:
            return self._mooncake().remove(paths)
        except OSError:
            return paths

    def check(self) -> None:
        """Write and read a file in the folder, or ask the Mooncake; raise OSError if that fails."""
        if self.root:
            _touch(f"{self.root}.kvcm-{self.name}", not self.worked)
        else:
            self._mooncake().check()

    def _mooncake(self) -> MooncakeProcess:
        with self._process_lock:
            if self._process is None:
                self._process = MooncakeProcess(self.describe()["storage_spec"])
            return self._process

    def close(self) -> None:
        """Let go of a Mooncake until it is needed."""
        with self._process_lock:
            process, self._process = self._process, None
        if process is not None:
            threading.Thread(target=process.close, daemon=True).start()  # It may hang.


async def probe(storage: Storage) -> None:
    """See whether a storage fails.

    The manager may have no right to write there, or nobody made the folder yet: both count as a
    failure only if it worked before. Another folder in its place, such as that below a file system
    that is mounted no more, does not have the file.
    """
    if storage.is_probed:
        return
    storage.is_probed = True
    loop = asyncio.get_running_loop()
    done: asyncio.Future[OSError | None] = loop.create_future()

    def answer(error: OSError | None) -> None:
        if not done.cancelled():
            done.set_result(error)

    def run() -> None:
        error = None
        try:
            storage.check()
        except OSError as raised:
            error = raised
        storage.is_probed = False
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(answer, error)

    threading.Thread(target=run, daemon=True).start()
    try:
        error = await asyncio.wait_for(done, _PROBE_S)
    except TimeoutError as raised:
        error = raised
    number = error.errno if error is not None else None
    if number in _FULL or (number in _NO_RIGHT and not storage.worked):
        return
    if (error is not None) != storage.failing:
        storage.failing = error is not None
        _LOG.error("storage %s: %s", storage.name, one_line(error) if error else "works again")
    storage.worked = storage.worked or error is None


def _touch(path: str, create: bool) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        os.pwrite(descriptor, _PROBE, 0)
        os.fsync(descriptor)
        if os.pread(descriptor, len(_PROBE), 0) != _PROBE:
            raise OSError(errno.EIO, "other bytes were read than written", path)
    finally:
        os.close(descriptor)


def describe(storages: Iterable[Storage]) -> str:
    """The ``storage_configs`` of an answer."""
    return json.dumps([storage.describe() for storage in storages], separators=(",", ":"))


def delete_files(paths: Iterable[str]) -> set[str]:
    """Delete files, as :meth:`Storage.delete`."""
    left = set()
    for path in paths:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError:
            left.add(path)
    return left
