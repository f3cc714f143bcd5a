"""``hisparse kvcm serve``: its flags, its start-up file, how it ends."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from hisparse.cli import kvcm
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.kvcm.optimizer.policies import POLICIES
from hisparse.kvcm.startup import default_startup, load_startup
from hisparse.kvcm.store import open_store
from tests.command import Command
from tests.kvcm.manager import ROOT, Manager
from tests.sizes import SWEEPS

#: As the file that upstream ships, with other numbers.
_STARTUP: dict[str, Any] = {
    "storage_config": {
        "type": "file",
        "global_unique_name": "disk",
        "storage_spec": {"root_path": "/tmp/kvcm-none/", "key_count_per_file": 8},
    },
    "instance_group": {
        "name": "first",
        "storage_candidates": ["disk"],
        "global_quota_group_name": "q",
        "quota": {
            "capacity": 1000,
            "quota_config": [
                {"storage_type": "file", "capacity": 100},
                {"storage_type": "hf3fs", "capacity": 200},
                {"storage_type": "pace", "capacity": 300},
            ],
        },
        "cache_config": {
            "reclaim_strategy": {"reclaim_policy": 1, "delay_before_delete_ms": 5},
            "cache_prefer_strategy": 2,
            "meta_indexer_config": {"max_key_count": 9},
        },
        "version": 1,
    },
}


def test_a_manager_starts_by_one_command_and_ends_by_a_signal(tmp_path: Path) -> None:
    startup = tmp_path / "startup.json"
    startup.write_text(json.dumps(_STARTUP))
    ports = [
        x for name in ("rpc", "http", "admin-rpc", "admin-http") for x in (f"--{name}-port", "0")
    ]
    command = [sys.executable, "-m", "hisparse", "kvcm", "serve", "--store", str(tmp_path / "db")]
    with subprocess.Popen(
        [*command, *ports, "--startup-config", str(startup)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        pattern = r"kvcm: engines at 127\.0\.0\.1 gRPC \d+ HTTP \d+, admin.* gRPC \d+ HTTP (\d+)\n"
        found = re.fullmatch(pattern, line)
        assert found, line + process.stderr.read()
        url = f"http://127.0.0.1:{found[1]}/api/getInstanceGroup"
        group = requests.post(url, json={"name": "first"}, timeout=30).json()["instance_group"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    assert group["cache_config"]["data_storage_strategy"] == "CPS_PREFER_3FS"
    assert group["quota"]["quota_config"] == [
        {"storage_type": "ST_NFS", "capacity": "100"},
        {"storage_type": "ST_3FS", "capacity": "200"},
        {"storage_type": "ST_TAIRMEMPOOL", "capacity": "300"},
    ]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"storage_config": {}, "instance_group": {}}', "{}{}", "\xff"]
)
def test_a_start_up_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "startup.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="expected storage_config and instance_group as JSON"):
        load_startup(path)


def test_the_default_group_may_be_created_anew() -> None:
    """It has everything that AdminService asks for."""
    from hisparse.kvcm.registry import check_group

    storage, group = default_startup(Path("/data"), 100)
    check_group(group)
    assert storage.nfs.root_path == "/data"


def test_a_port_that_is_taken(
    managers: Callable[..., Manager], tmp_path: Path, command: Command
) -> None:
    manager = managers()
    ports = manager.ports
    for flag, port in (("--http-port", ports["http"]), ("--rpc-port", ports["rpc"])):
        free = [x for y in ("rpc", "http", "admin-rpc", "admin-http") for x in (f"--{y}-port", "0")]
        said = command.refused("kvcm", "serve", *free, flag, str(port), "--root", str(tmp_path))
        assert f"port: got 127.0.0.1 {port}, expected one that is free" in said
    assert manager.http.admin("checkHealth")["is_health"]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("redis://127.0.0.1:1/0", "of a running server"),
        ("redis://host:port", "of a running server"),
        ("mysql://x", "expected a file or redis://host:port"),
        ("/dev/null/kvcm.db", "expected a file of managers"),
    ],
)
def test_a_store_that_cannot_be_opened(place: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        open_store(place).acquire("me")


def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match="expected a file of managers"):
        open_store(str(path)).acquire("me")


def test_the_compose_file_starts_what_there_is() -> None:
    """Its commands parse, its names are its own, and what the image copies is there."""
    found = yaml.safe_load((ROOT / "examples/kvcm/compose.yml").read_text())
    services = found["services"]
    parser = argparse.ArgumentParser()
    kvcm.add_parser(parser.add_subparsers())
    program, *words = services["manager"]["command"]
    arguments = parser.parse_args(words)
    assert (program, arguments.root, arguments.host) == ("hisparse", "/data/nfs", "0.0.0.0")
    assert open_store(arguments.store)._key == "hisparse:kvcm:pages"
    assert f"redis://{services['manager']['depends_on'][0]}:6379" in arguments.store
    for name in ("first", "second"):
        flags = dict(x.removeprefix("--").split("=", 1) for x in services[name]["command"][3:]
                     if "=" in x)  # fmt: skip
        config = HiSparseConfig.from_dict(json.loads(flags["hisparse-config"]))
        assert config.storage is not None
        assert config.storage.manager == f"{services[name]['depends_on'][0]}:{arguments.rpc_port}"
    for service in services.values():
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in found["volumes"]
        if "build" in service:
            assert f"{arguments.root}" in service["volumes"][0]
            lines = re.findall("^COPY (.*) ", service["build"]["dockerfile_inline"], re.MULTILINE)
            assert all((ROOT / x).exists() for line in lines for x in line.split())


@pytest.mark.sweeps
@pytest.mark.skipif(not SWEEPS, reason="takes a minute: make test-all PART=sweeps")
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")
def test_the_speed_is_measured() -> None:
    """Each match finds all that was written; figures are not judged."""
    line = [sys.executable, "-m", "scripts.kvcm_speed", "3000"]
    found = json.loads(subprocess.run(line, check=True, capture_output=True).stdout)["kvcm"]
    for store in ("sqlite", "redis"):
        assert found[store]["prefix_match"]["keys"] == 2048
        assert found[store]["blocks_per_s"] > 0 < found[f"{store} alone"]["blocks_per_s"]
    assert all(found["optimizer"][f"{x}_lookups_per_s"] > 0 for x in POLICIES)
