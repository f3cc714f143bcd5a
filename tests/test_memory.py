"""Free memory: the limits and the usage of control groups count."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hisparse.memory import host as memory

#: By the release of control groups: what /proc/self/cgroup says, the folder, names of files.
RELEASES = {
    "v2": ("0::{}", "", ("memory.max", "memory.current", "inactive_file")),
    "v1": (
        "1:cpu:/\n4:cpuset,memory:{}\n0::/",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
}
NO_LIMIT = {"v2": "max", "v1": str(2**63 - 4096)}


class Groups:
    """Control groups of one release, and a process in the group ``name``."""

    def __init__(self, folder: Path, release: str, name: str) -> None:
        line, mount, self._files = RELEASES[release]
        self._root = folder / mount
        (folder / "membership").write_text(line.format(name) + "\n")

    def write(self, group: str, most: str, taken: int, reclaimable: int = 0) -> None:
        folder = self._root / group
        folder.mkdir(parents=True, exist_ok=True)
        limit, usage, key = self._files
        (folder / limit).write_text(f"{most}\n")
        (folder / usage).write_text(f"{taken}\n")
        (folder / "memory.stat").write_text(f"cache 7\n{key} {reclaimable}\nunevictable 0\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_container_gives_what_its_limit_leaves(folder: Path, release: str) -> None:
    groups = Groups(folder, release, "/")
    groups.write("", str(3 << 20), 1 << 20)
    assert memory.free_host_memory() == 2 << 20
    groups.write("", str(1 << 20), 2 << 20)
    assert memory.free_host_memory() == 0


def test_a_service_gives_what_the_least_of_its_groups_leaves(folder: Path, release: str) -> None:
    """As with MemoryMax= of systemd, or of a slice around it."""
    groups = Groups(folder, release, "/slice/service")
    groups.write("slice/service", str(9 << 20), 1 << 20)
    assert memory.free_host_memory() == 8 << 20
    groups.write("slice", str(5 << 20), 2 << 20)
    groups.write("", NO_LIMIT[release], 4 << 20)
    assert memory.free_host_memory() == 3 << 20


def test_a_container_that_sees_no_group_of_its_name(folder: Path, release: str) -> None:
    groups = Groups(folder, release, "/docker/0123")
    groups.write("", str(3 << 20), 1 << 20)
    assert memory.free_host_memory() == 2 << 20


def test_files_that_the_kernel_may_drop_are_free(folder: Path, release: str) -> None:
    """Reading the weights of a model fills a container up to its limit."""
    groups = Groups(folder, release, "/")
    groups.write("", str(8 << 20), 8 << 20, reclaimable=5 << 20)
    assert memory.free_host_memory() == 5 << 20


@pytest.mark.parametrize("most", [None, "none", str(1 << 60)], ids=["no files", "none", "larger"])
def test_without_a_limit_it_is_the_machine_s(folder: Path, release: str, most: str | None) -> None:
    if most is not None:
        most = NO_LIMIT[release] if most == "none" else most
        Groups(folder, release, "/").write("", most, 1 << 20)
    free = psutil.virtual_memory().available
    assert memory.free_host_memory() == pytest.approx(free, rel=0.2)
