"""The child process that serves, against a stand-in for SGLang that answers at once."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse.errors import HiSparseError
from hisparse_bench.server import ServerProcess
from tests.processes import is_running, wait_until

FAKE = textwrap.dedent(
    """
    import http.server, json, os, signal, sys, time

    class Handler(http.server.BaseHTTPRequestHandler):
        flushes = 0

        def reply(self, text, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self):
            page = '# HELP a b\\nsglang:x{rank="0"} 1.5\\nsglang:x{rank="1"} 2.0\\nplain 3e2\\n'
            self.reply(page if self.path == "/metrics" else "")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/flush_cache":
                Handler.flushes += 1
                self.reply("busy", 400 if Handler.flushes == 1 else 200)
            elif body.get("input_ids") == [0]:
                self.reply("too long", 400)
            else:
                ids = body.get("input_ids") or [len(body["text"])]
                for i in range(body["sampling_params"]["max_new_tokens"]):
                    ids = [*ids, i]
                    meta = {"prompt_tokens": 1, "cached_tokens": 0}
                    self.wfile.write(b"" if i else b"HTTP/1.0 200 OK\\r\\n\\r\\n")
                    event = {"text": str(ids), "output_ids": ids, "meta_info": meta}
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
                    self.wfile.flush()
                    time.sleep(0.05)
                self.wfile.write(b"data: [DONE]\\n\\n")

    if "--die" in sys.argv:
        sys.exit("no such model")
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if (child := os.fork()) == 0:
            time.sleep(600)
        print("child", child, flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which ``python -m sglang.launch_server`` starts the stand-in."""
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(FAKE)
    return {"PYTHONPATH": str(package.parent)}


@pytest.fixture
def server(tmp_path: Path, environment: dict[str, str]) -> Iterator[ServerProcess]:
    with ServerProcess("a-model", tmp_path / "log", []) as process:
        process.start(environment)
        yield process


def test_stream(server: ServerProcess) -> None:
    answer = server.stream([7, 8], 4)
    assert answer.ids == [7, 8, 0, 1, 2, 3]
    assert (answer.prompt_tokens, answer.cached_tokens) == (1, 0)
    assert len(answer.times_s) == 4
    assert answer.ttft_s == answer.times_s[0] > 0
    assert 0.03 < answer.time_per_token_s < 1
    short = server.stream("abc", 1)
    assert short.ids == [3, 0]
    assert short.time_per_token_s == 0


def test_refused(server: ServerProcess) -> None:
    with pytest.raises(HiSparseError, match="got 400 from the server, expected 200: too long"):
        server.stream([0], 1)


def test_flush_cache_waits_until_the_server_is_idle(server: ServerProcess) -> None:
    started = time.monotonic()
    server.flush_cache()
    assert time.monotonic() - started >= 0.2


def test_metrics_are_summed_over_labels(server: ServerProcess) -> None:
    assert server.metrics() == {"sglang:x": 3.5, "plain": 300.0}


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    server = ServerProcess("a-model", tmp_path / "log", ["--die"])
    with pytest.raises(HiSparseError, match=r"came up; the end of .*log:\nno such model"):
        server.start(environment)


def test_stop_ends_the_whole_group(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hisparse_bench.server._STOP_TIMEOUT_S", 0.5)
    log = tmp_path / "log"
    with ServerProcess("a-model", log, ["--stubborn"]) as server:
        server.start(environment)
        child = int(
            next(x for x in log.read_text().splitlines() if x.startswith("child")).split()[1]
        )
        assert is_running(child)
    wait_until(lambda: not is_running(child), f"process {child} is still there", 5)
