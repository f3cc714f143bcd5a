"""Mooncake's store, where blocks may lie instead of files: values by key in hosts' memory.

A manager runs this file as a program, so it imports nothing of hisparse, which takes a second.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence

#: Error codes of Mooncake: nobody has a value; there is no room for it, or its host has ended.
_ABSENT, _NOT_NOW = -704, (-200, -800)
#: For values on their way, at least.
_BUFFER_BYTES = 16 << 20
#: Keys that are removed at once, and seconds that the library may take for them.
_AT_ONCE, _LIMIT_S = 512, 10.0


class Mooncake:
    """A client of Mooncake's store. Any thread may call it.

    Args:
        spec: a ``MooncakeStorageSpec``: where the master and the metadata are.
        lent_bytes: of this host's memory, which hold values of all clients.
        value_bytes: of the largest value.

    Raises:
        OSError: the library is not installed, or the master does not answer.
    """

    def __init__(self, spec: Mapping[str, str], lent_bytes: int = 0, value_bytes: int = 0) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            text = "expected pip install mooncake-transfer-engine"
            raise OSError(f"mooncake: got {error}, {text}") from None
        master, buffer = spec["master_server_entry"], max(_BUFFER_BYTES, 16 * value_bytes)
        self._name, self._store = master, MooncakeDistributedStore()
        self._check("setup", self._store.setup(
            _own_address(master), spec["metadata_connstring"], lent_bytes, buffer,
            spec["protocol"] or "tcp", spec["rdma_device"], master,
        ))  # fmt: skip

    def put(self, key: str, *parts: memoryview | bytes) -> bool:
        """Store a value; False: there is no room for it now.

        Raises:
            OSError: it fails.
        """
        code = self._store.put_parts(key, *parts)
        return code not in _NOT_NOW and self._check("put", code) == 0

    def get(self, key: str, *buffers: memoryview | bytearray) -> bool:
        """Read a value into buffers, which it fills; False: its host does not answer.

        Raises:
            FileNotFoundError: nobody has the value.
            OSError: the master does not answer.
        """
        value = self._store.get_buffer(key)
        if value is None:
            if not self._check("is_exist", self._store.is_exist(key)):
                raise FileNotFoundError(key)
            return False
        found, at = memoryview(value).cast("B"), 0
        if len(found) != sum(map(len, buffers)):
            raise FileNotFoundError(key)
        for buffer in buffers:
            buffer[:] = found[at : at + len(buffer)]
            at += len(buffer)
        return True

    def remove(self, keys: Sequence[str]) -> list[str]:
        """Remove values, also those that somebody reads.

        Returns:
            Those that are left.
        """
        codes = self._store.batch_remove(list(keys), force=True)
        return [x for x, code in zip(keys, codes, strict=True) if code not in (0, _ABSENT)]

    def check(self) -> None:
        """Raise OSError if the master does not answer."""
        self._check("is_exist", self._store.is_exist(".kvcm"))

    def _check(self, what: str, code: int) -> int:
        if code < 0:
            raise OSError(f"mooncake {self._name}: {what}: got error {code}, expected an answer")
        return code

    def close(self) -> None:
        """Take back the memory that was lent, with the values in it."""
        self._store.close()


def _own_address(master: str) -> str:
    """This host's address, as the master sees it."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # Sends nothing.
            address: str = probe.getsockname()[0]
            return address
    except (OSError, ValueError) as error:
        text = "expected the HOST:PORT of a master"
        raise OSError(f"mooncake: got {master}, {text}: {error}") from None


class MooncakeProcess:
    """Removes values in a process of its own: the library takes signals, and may hang.

    Any thread may call it; one call runs at a time.

    Args:
        spec: of a :class:`Mooncake`.
    """

    def __init__(self, spec: Mapping[str, str]) -> None:
        self._spec, self._lock = spec, threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def remove(self, keys: Collection[str]) -> set[str]:
        """Remove values.

        Returns:
            Those that are left.

        Raises:
            OSError: the master does not answer.
        """
        every, left = list(keys), set[str]()
        for first in range(0, len(every), _AT_ONCE):
            left |= self._ask(every[first : first + _AT_ONCE])
        return left

    def check(self) -> None:
        """Raise OSError if the master does not answer. A call that runs has a limit of its own."""
        if not self._lock.locked():
            self._ask([])

    def _ask(self, keys: list[str]) -> set[str]:
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            limit = threading.Timer(_LIMIT_S, process.kill)
            limit.start()
            try:
                print(json.dumps(keys), file=process.stdin, flush=True)
                found = json.loads(process.stdout.readline())
            except (OSError, ValueError):
                self._process = None
                _end(process)
                raise OSError("mooncake: its client has ended, or did not answer") from None
            finally:
                limit.cancel()
        if isinstance(found, str):
            raise OSError(found)
        return set(found)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", __file__, json.dumps(self._spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

    def close(self) -> None:
        """End the process; another call starts it again."""
        with self._lock:
            if self._process is not None:
                _end(self._process)
            self._process = None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _main() -> None:
    """Answer each line of standard input, JSON of keys to remove, with those left or an error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Where the library writes its own lines.
    client = None
    for line in sys.stdin:
        found: list[str] | str
        try:
            client = client or Mooncake(json.loads(sys.argv[1]))
            client.check()
            found = client.remove(keys) if (keys := json.loads(line)) else []
        except OSError as error:
            found = str(error)
        print(json.dumps(found), file=answers, flush=True)
    os._exit(0)  # The library may hang at its end.


if __name__ == "__main__":
    _main()
