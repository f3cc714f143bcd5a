"""``hisparse top``: what it computes from two pages of metrics, and what it says if it cannot."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from hisparse.units import parse_seconds
from tests.command import Command


def page(step: int, ranks: int = 1) -> str:
    """Metrics of a server after ``step`` readings; counters rise by the same in each."""
    lines = ["# TYPE hisparse:hit_ratio gauge"]
    for rank in range(ranks):
        labels = f'{{model_name="llama",tp_rank="{rank}"}}'
        for name, value in {
            "hisparse:hit_pages_total": 100 + 80 * step,
            "hisparse:miss_pages_total": 100 + 20 * step,
            "hisparse:decode_read_bytes_total": 2048 * step,
            "hisparse:host_tokens_used": 3000,
            "hisparse:host_tokens_total": 40000,
            "hisparse:host_kv_bytes": 2**20,
            "hisparse:invalid_scores_total": 0,
            "hisparse:malformed_selections_total": 7,
            "sglang:num_running_reqs": 2,
            "sglang:num_queue_reqs": 5,
            "sglang:time_to_first_token_seconds_sum": 1.0 + 3 * step,
            "sglang:time_to_first_token_seconds_count": 1 + 2 * step,
        }.items():
            lines.append(f"{name}{labels} {value}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def serve() -> Iterator[Any]:
    """A server that answers with the given pages, the last one again and again."""
    servers = []

    def start(*pages: str, status: int = 200) -> str:
        left = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = (left.pop(0) if len(left) > 1 else left[0]).encode()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


QUICK = ("--interval", "10ms")


def test_rates_are_of_the_time_between_two_readings(serve: Any, command: Command) -> None:
    found = command.json("top", serve(page(0), page(1)) + "/", *QUICK)
    assert found["requests"] == {"running": 2, "queued": 5, "retracted": None}
    assert found["hit_ratio"] == {"since_start": 180 / 300, "recent": 0.8}
    read = found["per_second"]["decode_read_bytes"] * found["seconds"]
    assert read == pytest.approx(2048, rel=0.05)
    assert found["latency_s"]["time_to_first_token"] == 1.5
    assert found["latency_s"]["e2e_request_latency"] is None
    assert found["per_second"]["output_tokens"] is None, "SGLang has counted no token"
    assert found["tokens"]["host"] == {"used": 3000, "total": 40000}


def test_ranks_add_bytes_and_not_requests(serve: Any, command: Command) -> None:
    found = command.json("top", serve(page(0, 2), page(1, 2)), *QUICK)
    assert (found["ranks"], found["requests"]["running"]) == (2, 2)
    assert found["tokens"]["host"]["total"] == 40000
    assert found["bytes"]["host_kv"] == 2 * 2**20
    assert found["hit_ratio"]["recent"] == 0.8


def test_replicas_add_requests_and_tokens(serve: Any, command: Command) -> None:
    """The ranks of each count the same requests."""

    def replicas(step: int) -> str:
        return "".join(
            page(step, 2).replace('model_name="llama"', f'model_name="llama",dp_rank="{replica}"')
            for replica in range(3)
        )

    found = command.json("top", serve(replicas(0), replicas(1)), *QUICK)
    assert (found["ranks"], found["requests"]["running"]) == (6, 6)
    assert found["tokens"]["host"] == {"used": 9000, "total": 120000}


def test_an_idle_server_and_one_that_started_again(serve: Any, command: Command) -> None:
    idle = command.json("top", serve(page(3), page(3)), *QUICK)
    assert idle["hit_ratio"]["recent"] is None
    assert idle["per_second"]["decode_read_bytes"] == 0
    again = command.json("top", serve(page(3), page(1)), *QUICK)
    assert again["hit_ratio"] == {"since_start": 180 / 300, "recent": None}
    assert again["per_second"]["decode_read_bytes"] is None


def test_once_prints_a_table(serve: Any, command: Command) -> None:
    shown = command("top", serve(page(0), page(1)), "--once", *QUICK)
    lines = [line.split() for line in shown.splitlines()]
    assert ["requests", "queued", "5"] in lines
    assert ["hit", "ratio", "recent", "80.0%"] in lines
    assert ["tokens", "host", "3,000", "of", "40,000", "(8%)"] in lines
    assert ["latency", "time", "to", "first", "token", "1,500.0", "ms"] in lines
    assert ["bytes", "host", "kv", "1", "MiB"] in lines
    assert ["faults", "malformed", "selections", "7"] in lines
    assert "invalid" not in shown, "there were none"
    assert "retracted" not in shown, "SGLang has no such metric"


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ("sglang:num_running_reqs 1\n", 200, "got no metrics of hisparse, expected a server that"),
        ("<html>nothing</html>", 200, "got '<html>nothing</html>', expected Prometheus metrics"),
        ("", 200, "got no metrics of hisparse"),
        ('a{b="', 200, "expected Prometheus metrics"),
        ("none", 404, "got HTTP 404, expected an SGLang server that was started with --enable-met"),
        ("none", 401, "got HTTP 401"),
    ],
)
def test_a_wrong_server_is_one_line(
    answer: str, status: int, words: str, serve: Any, command: Command
) -> None:
    assert words in command.refused("top", serve(answer, status=status))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["http://127.0.0.1:9"], "expected a running SGLang server"),
        (["127.0.0.1:30000"], "expected a URL such as http://127.0.0.1:30000"),
        (["http://[1"], "got ValueError: Invalid IPv6 URL"),
        (["http://127.0.0.1:port"], "expected a running SGLang server"),
        (["http://127.0.0.1:9", "--interval", "9999s"], "expected at most 3600s"),
        (["http://127.0.0.1:9", "--interval", "2"], "--interval: got '2', expected a time"),
        (["http://127.0.0.1:9", "--interval", "0ms"], "--interval: got '0ms', expected a time"),
        (["http://127.0.0.1:9", "--interval=-1s"], "--interval: got '-1s', expected a time"),
    ],
)
def test_a_wrong_address_is_one_line(line: list[str], words: str, command: Command) -> None:
    assert words in command.refused("top", *line)


def test_times_have_a_unit() -> None:
    assert [parse_seconds("x", text) for text in ("30ms", "1.5 s", "500us")] == [0.03, 1.5, 0.0005]


def test_on_a_terminal_it_draws_until_ctrl_c(serve: Any) -> None:
    url = serve(*(page(step) for step in range(100)))
    terminal, side = pty.openpty()
    line = [sys.executable, "-m", "hisparse", "top", url, *QUICK]
    process = subprocess.Popen(line, stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    drawn = b""
    while drawn.count(b"requests running") < 3:
        drawn += os.read(terminal, 65536)
    end, pressed = time.monotonic() + 300, 0.0
    while process.poll() is None and time.monotonic() < end:
        # Once in many runs an interrupt had no effect; one presses again then.
        if time.monotonic() > pressed + 5:
            process.send_signal(signal.SIGINT)
            pressed = time.monotonic()
        # A terminal that nobody reads would block it.
        with contextlib.suppress(OSError):
            drawn += os.read(terminal, 65536)
    process.kill()
    process.wait()
    os.close(terminal)
    assert process.returncode == 0
    assert b"Traceback" not in drawn
