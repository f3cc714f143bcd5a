"""SGLang's traces of a request's life reach an OpenTelemetry collector while hisparse serves."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from harness import Server
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, DenseTokens

from tests.sizes import SWEEPS

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.prefix) / "otel"
pytestmark = [
    pytest.mark.sweeps,
    pytest.mark.skipif(not SWEEPS, reason="a server of its own: make test-all PART=sweeps"),
]


class _Collector(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _named_in_docs() -> set[str]:
    """Spans of the table in docs/monitoring.md."""
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    table = text.partition("| span | of |")[2].partition("\n\n")[0]
    names = "".join(row.split("|")[1] for row in table.splitlines() if row)
    return set(re.findall(r"`([\w ]+)`", names))


def _spans(bodies: list[bytes]) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    return [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_a_collector_gets_the_spans_that_the_docs_name(
    dense_tokens: DenseTokens, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    flags = ("--max-total-tokens", "8000", "--enable-trace", "--otlp-traces-endpoint", endpoint)
    options = {"config": {"budget": 1024}, "python_path": [TOOLS], "forked": False}
    env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    log = log_dir / "tracing.log"
    try:
        with Server(tiny_model("llama"), log, *flags, env=env, **options) as server:
            ids = [server.generate(prompt, NEW_TOKENS).ids for prompt in PROMPTS.prompts[:2]]
            # Spans are sent in batches, by the clock.
            end = time.monotonic() + 60
            while True:
                spans = _spans(_Collector.bodies)
                # Of a request beside its own spans: "Req" and the beginning of its id.
                names = Counter(re.sub(r"^ ?Req \w+$", "Req ID", span.name) for span in spans)
                if names["decode_forward"] == 2 and _named_in_docs() <= names.keys():
                    break
                assert time.monotonic() < end, f"spans that were sent: {names}"
                time.sleep(0.2)
    finally:
        collector.shutdown()
        collector.server_close()
    assert ids == dense_tokens("llama", PROMPTS)[:2]
    assert len(_named_in_docs()) > 5
    assert names["decode_loop"] == 2 * (NEW_TOKENS - 1)
    decoded = {span.trace_id for span in spans if span.name == "decode_forward"}
    assert len(decoded) == 2
