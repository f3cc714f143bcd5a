"""A master of Mooncake's store, from the package ``mooncake-transfer-engine-non-cuda``."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse_bench.server import free_port

#: What `make mooncake-tools` makes.
TOOLS = Path(sys.prefix) / "mooncake"
#: Where Debian's libraries are that Mooncake loads, as LD_LIBRARY_PATH has it.
LIBRARY_PATH = ":".join(
    str(TOOLS / "debian" / folder / f"{platform.machine()}-linux-gnu")
    for folder in ("lib", "usr/lib")
)
_PROGRAM = TOOLS / "mooncake/mooncake_master"


def is_installed() -> bool:
    """Whether `make mooncake-tools` has ended."""
    return (TOOLS / "pins.txt").exists()


@dataclass
class Master:
    """A running master.

    Attributes:
        process: the process.
        options: for the key ``storage`` of a server that stores with it.
    """

    process: subprocess.Popen[bytes]
    options: dict[str, Any]


@contextmanager
def running(folder: Path) -> Iterator[Master]:
    """Start a master, and end it at the end of the block."""
    rpc, metrics, metadata = free_port(), free_port(), free_port()
    line = [str(_PROGRAM), f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
    line += ["--enable_http_metadata_server=true", f"--http_metadata_server_port={metadata}"]
    with (folder / "master.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        _wait_for(rpc, process, folder / "master.log")
        _wait_for(metadata, process, folder / "master.log")
        yield Master(
            process,
            {
                "master_server_address": f"127.0.0.1:{rpc}",
                "metadata_server": f"http://127.0.0.1:{metadata}/metadata",
                "local_hostname": "127.0.0.1",
                "protocol": "tcp",
                "global_segment_size": 256 << 20,
                "device_name": "",
            },
        )
    finally:
        process.kill()
        process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"mooncake_master did not start:\n{log.read_text(errors='replace')[-2000:]}")
