"""A master of Mooncake's store, from the package ``mooncake-transfer-engine-non-cuda``."""

from __future__ import annotations

import importlib.util
import shutil
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

__all__ = ["Master", "program", "running"]


def program() -> str | None:
    """Path of ``mooncake_master``; None: Mooncake is not installed."""
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        return None
    beside = Path(next(iter(found.submodule_search_locations))) / "mooncake_master"
    on_path = shutil.which("mooncake_master") or shutil.which(
        str(Path(sys.executable).with_name("mooncake_master"))
    )
    return str(beside) if beside.exists() else on_path


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
    line = [str(program()), f"--rpc_port={rpc}", f"--metrics_port={metrics}"]
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
