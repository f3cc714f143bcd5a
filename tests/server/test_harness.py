"""What the other server tests rest on: a server that does not start is said and leaves nothing."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest
from harness import Metrics, Server


class _Listener(Server):
    """A child that opens the port and never gets healthy; its own child ignores SIGTERM."""

    CODE = (
        "import os, signal, socket, sys, time\n"
        "held = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "print('listening', flush=True)\n"
        "if os.fork() == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(600)"
    )

    def __init__(self, log: Path) -> None:
        super().__init__(Path("no-model"), log, forked=False)
        self._line = [sys.executable, "-c", self.CODE, str(self._port)]


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server(tmp_path, tmp_path / "log", forked=False)
    server._line = [sys.executable, "-c", "import sys; sys.exit('no weights here')"]
    with pytest.raises(RuntimeError, match=r"ended with 1; its log ends:\nno weights here"):
        server.__enter__()


def test_stop_leaves_no_process_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness._START_TIMEOUT_S", 10)
    server = _Listener(tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"did not come up in 10 s; its log ends:\nlistening"):
        server.__enter__()
    time.sleep(0.2)
    with socket.socket() as probe:
        probe.settimeout(1)
        with pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", server._port))


def test_metrics_are_summed_over_labels() -> None:
    page = '# HELP x y\nhisparse:hits_total{rank="0"} 2.0\nhisparse:hits_total{rank="1"} 3.5\n'
    metrics = Metrics(page)
    assert metrics["hisparse:hits"] == metrics["hisparse:hits_total"] == 5.5
    with pytest.raises(KeyError, match="hisparse:misses is not among the metrics"):
        metrics["hisparse:misses"]
    assert metrics.by("rank", "hisparse:hits") == {"0": 2.0, "1": 3.5}
