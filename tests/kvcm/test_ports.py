"""Ports beside the two services: metrics for Prometheus, faults for tests, encryption."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import grpc
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from hisparse.errors import HiSparseError
from hisparse.kvcm.client import ManagerClient
from tests.command import Command
from tests.kvcm.manager import METHODS, ROOT, Client, Manager, ManagerError

Start = Callable[..., Manager]


def test_prometheus_reads_the_metrics(shared: Manager, client: Client, name: str) -> None:
    client.put([1, 2, 3], name)
    client.match([1, 2, 9], name)
    text = requests.get(f"http://127.0.0.1:{shared.ports['admin_http']}/metrics", timeout=30).text
    found = {
        (x.name, *x.labels.values()): x.value
        for family in text_string_to_metric_families(text)
        for x in family.samples
    }
    assert found["kvcm_cache_manager_instance_key_count", "default", name] == 3
    assert found["kvcm_data_storage_is_available", "nfs_01"] == 1
    assert found["kvcm_service_query_counter_total", "StartWriteCache"] >= 1
    hits, asked = (found[f"kvcm_manager_{x}_key_counter_total",] for x in ("hit", "query"))
    assert 2 <= hits < asked
    shown = {x["metric_name"] for x in client.admin("getMetrics")["metrics"]}
    assert {f"kvcm_{x.replace('.', '_')}" for x in shown} == {
        family.name for family in text_string_to_metric_families(text)
    }


def test_panels_ask_for_metrics_that_are_there(shared: Manager, client: Client, name: str) -> None:
    client.write([1], name)
    dashboard = json.loads((ROOT / "dashboards" / "kvcm.json").read_text())
    asked = {
        metric
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for metric in re.findall(r"kvcm_\w+", target["expr"])
    }
    text = requests.get(f"http://127.0.0.1:{shared.ports['admin_http']}/metrics", timeout=30).text
    shown = {x.name for y in text_string_to_metric_families(text) for x in y.samples}
    assert len(asked) >= 9 and asked <= shown


def test_metrics_are_not_where_engines_are(shared: Manager) -> None:
    url = f"http://127.0.0.1:{shared.ports['http']}/metrics"
    assert requests.get(url, timeout=30).status_code == 404


def test_faults_are_injected(managers: Start) -> None:
    manager = managers(debug_http=0)
    for debug in (manager.http, manager.grpc):
        client = debug
        client.register()
        debug.respond("debug", "injectFault", {"api_name": "StartWriteCache"})
        with pytest.raises(ManagerError, match="INTERNAL_ERROR: StartWriteCache: got an injected"):
            client.write([1])
        assert client.match([1]) == []
        once = {"api_name": "StartWriteCache", "fault_trigger_strategy": "ONCE",
                "trigger_at_call": 3}  # fmt: skip
        debug.respond("debug", "injectFault", once)
        begun = {"instance_id": "i", "block_keys": [1], "write_timeout_seconds": 0}
        for trace_id, code in (("a_2", "OK"), ("a_3", "INTERNAL_ERROR"), ("3_x", "OK")):
            found = client.respond("meta", "startWriteCache", begun | {"trace_id": trace_id})
            assert found["header"]["status"]["code"] == code, trace_id
        debug.respond("debug", "removeFault", {"api_name": "StartWriteCache"})
        client.write([2], seconds=0)
        debug.respond("debug", "injectFault", {"api_name": "GetCacheLocation"})
        debug.respond("debug", "clearFaults", {})
        assert client.match([1]) == []
        wrong = debug.respond("debug", "injectFault", {"api_name": "AddStorage"})
        assert wrong["header"]["status"]["code"] == "INVALID_ARGUMENT"


def test_faults_are_off_by_default(shared: Manager) -> None:
    assert shared.ports["debug_http"] is None
    types = METHODS["debug", "clearFaults"]
    for port in ("rpc", "admin_rpc"):
        with grpc.insecure_channel(f"127.0.0.1:{shared.ports[port]}") as channel:
            call = channel.unary_unary(f"/{types.grpc_service}/{types.name}")
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                call(b"", timeout=30)


def test_all_ports_are_encrypted(
    managers: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    ports = managers(tls=[str(certificate), str(key)]).ports
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    for service, method, name in (
        ("meta", "getInstanceInfo", ""),
        ("admin", "checkHealth", "admin_"),
    ):
        url = f"://localhost:{ports[f'{name}http']}/api/{method}"
        found = requests.post("https" + url, json={}, verify=str(certificate), timeout=30)
        assert found.status_code == 200
        with pytest.raises(requests.RequestException):
            requests.post("http" + url, json={}, timeout=30)
        types = METHODS[service, method]
        address = f"localhost:{ports[f'{name}rpc']}"
        path = f"/{types.grpc_service}/{types.name}"
        with grpc.secure_channel(address, credentials) as channel:
            assert channel.unary_unary(path)(b"", timeout=30)
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(path)(b"", timeout=30)
    # gRPC reads the roots once in a process.
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(certificate))
    with (
        closing(ManagerClient(f"tls://localhost:{ports['rpc']}", 30)) as client,
        pytest.raises(HiSparseError, match="got INSTANCE_NOT_EXIST"),
    ):
        client.call("GetInstanceInfo", instance_id="absent")


def test_flags_that_do_not_fit(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "no.pem"
    path.write_text("no")
    free = [x for y in ("rpc", "http", "admin-rpc", "admin-http") for x in (f"--{y}-port", "0")]
    for flags, expected in (
        (["--tls-cert", str(path)], "got one of them, expected both or none"),
        (["--tls-cert", str(path), "--tls-key", str(path)], "expected PEM files of a certificate"),
        (["--login"], "--login: got no --store, expected one that has accounts"),
        (["--login", "--store", str(tmp_path / "db")], "--login: got a store without an account"),
        (["--debug-service", "--http-port", "63000"], "--http-port: got 63000, expected at most"),
    ):
        assert expected in command.refused("kvcm", "serve", *free, *flags)


def test_the_logger_has_levels(client: Client) -> None:
    client.admin("updateLogger", log_level="debug", module_name="hisparse.kvcm.store")
    client.admin("updateLogger", log_level="ERROR")
    for wrong in ({"log_level": "loud"}, {"log_level": "INFO", "module_name": "os"}, {}):
        with pytest.raises(ManagerError, match="INVALID_ARGUMENT: (log_level|module_name): got"):
            client.admin("updateLogger", **wrong)
