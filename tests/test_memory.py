"""Free memory: the limit and the usage of a container count."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hisparse.memory import host as memory


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    return tmp_path


def write(group: Path, most: str, taken: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{taken}\n")


def test_a_container_gives_what_its_limit_leaves(group: Path) -> None:
    write(group, str(3 << 20), 1 << 20)
    assert memory.free_host_memory() == 2 << 20
    write(group, str(1 << 20), 2 << 20)
    assert memory.free_host_memory() == 0


@pytest.mark.parametrize("most", ["max", str(1 << 60), None], ids=["none", "larger", "no files"])
def test_without_a_limit_it_is_the_machine_s(group: Path, most: str | None) -> None:
    if most is not None:
        write(group, most, 1 << 20)
    free = psutil.virtual_memory().available
    assert memory.free_host_memory() == pytest.approx(free, rel=0.2)
