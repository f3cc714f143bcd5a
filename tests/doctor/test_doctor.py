"""``hisparse doctor``: one line for each thing that is wrong, and never a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse import doctor
from hisparse.cli import main
from hisparse.doctor import Finding, checks
from hisparse.kernels.build import cpu, isa
from hisparse.sglang import install


def only(look: Callable[[], Finding]) -> Finding:
    found = look()
    assert "\n" not in found.message + found.remedy
    return found


def test_on_this_machine() -> None:
    """As a user runs it: the real SGLang, the real compiler."""
    line = [sys.executable, "-m", "hisparse", "doctor", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for check in checks.values():
        assert list(check) == ["name", "status", "message", "remedy"]
        assert check["status"] in ("ok", "warning")
        assert check["status"] == "ok" or check["remedy"]
    assert checks["sglang"]["message"] == f"{install.RELEASE}, the supported release"
    assert checks["hooks"]["status"] == checks["plugin"]["status"] == "ok"
    assert {"packages", "torch", "host memory", "CPU kernels", "adapters"} <= set(checks)
    assert re.match(r"C\+\+ for \S+.*: /.*\.so$", checks["CPU kernels"]["message"])
    assert {"CUDA kernels", "Triton kernels"} <= set(checks)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets the release of SGLang that seems to be installed."""
    return lambda found: monkeypatch.setattr(install, "installed_release", lambda: found)


def test_without_sglang(
    release: Callable[[str | None], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    release(None)
    assert main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["sglang"]["message"] == f"got none, expected {install.RELEASE}"
    assert checks["sglang"]["remedy"] == f"pip install sglang=={install.RELEASE}"
    assert checks["hooks"]["status"] == "warning"
    assert "Traceback" not in err


@pytest.mark.parametrize("found", ["0.5.2", "0.5.22", "0.5.24", "0.6.0", "1.0"])
def test_a_release_that_is_not_supported(found: str, release: Callable[[str | None], None]) -> None:
    release(found)
    check = only(checks.sglang_version)
    assert (check.status, check.message) == ("error", f"got {found}, expected {install.RELEASE}")
    assert check.remedy == f"pip install sglang=={install.RELEASE}"
    assert only(checks.hooks).message == f"not checked: sglang {install.RELEASE} is not installed"


@pytest.mark.parametrize("build", ["", ".post1", "+cpu"])
def test_a_build_of_the_release(build: str, release: Callable[[str | None], None]) -> None:
    release(install.RELEASE + build)
    assert only(checks.sglang_version).status == "ok"


def test_a_whitelist_without_hisparse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    check = only(checks.plugin_visible)
    assert check.status == "error"
    assert "'other, another'" in check.message
    monkeypatch.setenv("SGLANG_PLUGINS", "other, hisparse")
    assert only(checks.plugin_visible).status == "ok"


def test_an_entry_point_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "entry_points", lambda group: [])
    assert only(checks.plugin_visible).status == "error"


def test_an_sglang_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('no libfoo.so')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = only(checks.hooks)
    assert check.status == "error"
    assert check.message.startswith("SGLang cannot be imported: ")
    assert "no libfoo.so" in check.message
    wanted = [f"{name} {checks.sglang_pin(name)}" for name in ("torch", "transformers")]
    asks = f"install what sglang {install.installed_release()} asks for: "
    assert check.remedy == asks + " and ".join(wanted)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = only(checks.cpu_kernels)
    assert check.status == "warning"
    assert check.message.startswith("slower PyTorch code is used instead: ")
    assert "no-such-compiler" in check.message
    assert "install g++" in check.remedy


def test_kernels_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "_processor_flags", lambda: isa.ISAS["avx2"].flags)
    monkeypatch.setenv(isa.VARIABLE, "avx2")
    monkeypatch.setattr(cpu, "build_cpu", lambda: Path("/cache/cpu.so"))
    monkeypatch.setattr(cpu, "cpu_instruction_set", lambda: "AVX2")
    check = only(checks.cpu_kernels)
    assert check.message == f"C++ for AVX2, as {isa.VARIABLE}=avx2 asks: /cache/cpu.so"


def test_numa_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_NODES", tmp_path)
    assert checks.numa().message == "one node"
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        text = f"Node {node} MemTotal: 9 kB\nNode {node} MemFree:   {(node + 1) * 2**20} kB\n"
        (tmp_path / f"node{node}" / "meminfo").write_text(text)
    check = checks.numa()
    assert check.status == "warning"
    assert check.message == "node 0: 1 GiB free, node 1: 2 GiB free"


def test_little_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "free_host_memory", lambda: 2**30)
    check = only(checks.host_memory)
    assert (check.status, check.message[:11]) == ("warning", "1 GiB free;")


def test_what_a_check_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise OSError("first\nsecond")

    monkeypatch.setattr(checks, "_CHECKS", {"packages": checks.packages, "broken": broken})
    fine, wrong = checks.run_checks().items()
    assert (fine[0], fine[1].status) == ("packages", "ok")
    assert (wrong[0], *wrong[1][:2]) == ("broken", "error", "OSError: first")


def test_a_table_names_the_remedy_and_errors_make_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"one": Finding("warning", "so", "do this")}
    monkeypatch.setattr(doctor, "run_checks", lambda: found)
    assert main(["doctor"]) == 0
    assert "-> do this" in capsys.readouterr().out
    found["two"] = Finding("error", "no")
    assert main(["doctor"]) == 1
