"""Free memory: the limits and the usage of control groups count."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hisparse.memory import host as memory

#: By the release of control groups: what /proc/self/cgroup says, the folder, names of files.
RELEASES = {
    "v2": ("0::{}", "", ("memory.max", "memory.current", "", "file_")),
    "v1": (
        "1:cpu:/\n4:cpuset,memory:{}\n0::/",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_"),
    ),
}
NO_LIMIT = {"v2": "max", "v1": str(2**63 - 4096)}


class Groups:
    """Control groups of one release, and a process in the group ``name``."""

    def __init__(self, folder: Path, release: str, name: str) -> None:
        line, mount, self._files = RELEASES[release]
        self._root = folder / mount
        (folder / "membership").write_text(line.format(name) + "\n")

    def write(
        self, group: str, most: str, taken: int, files: tuple[int, ...] = (0, 0, 0, 0)
    ) -> None:
        """``files``: bytes of files not read lately, read lately, changed, and being written."""
        folder = self._root / group
        folder.mkdir(parents=True, exist_ok=True)
        limit, usage, cached, changed = self._files
        (folder / limit).write_text(f"{most}\n")
        (folder / usage).write_text(f"{taken}\n")
        keys = (f"{cached}inactive_file", f"{cached}active_file")
        keys += (f"{changed}dirty", f"{changed}writeback")
        lines = [f"{key} {value}" for key, value in zip(keys, files, strict=True)]
        # Entries of a group without those inside it, of version 1, and ones that are alike.
        others = ["cache 7", "active_file_x 9", "inactive_anon 5", "unevictable 0", "odd"]
        own = [] if cached == "" else [f"inactive_file {1 << 30}", f"active_file {1 << 30}"]
        (folder / "memory.stat").write_text("\n".join([*own, *others, *lines]) + "\n")


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
    """Reading the weights of a model fills a container up to its limit; some count as active."""
    groups = Groups(folder, release, "/")
    groups.write("", str(8 << 20), 8 << 20, (2 << 20, 3 << 20, 0, 0))
    assert memory.free_host_memory() == 5 << 20
    groups.write("", str(8 << 20), 8 << 20, (2 << 20, 3 << 20, 1 << 20, 1 << 20))
    assert memory.free_host_memory() == 3 << 20, "files that are not on disk yet are in use"
    groups.write("", str(8 << 20), 1 << 20, (2 << 20, 3 << 20, 0, 0))
    assert memory.free_host_memory() == 8 << 20, "never more than the limit"


def test_files_count_in_the_group_that_limits(folder: Path, release: str) -> None:
    """A finished job's files are charged to the group around ours."""
    groups = Groups(folder, release, "/slice/service")
    groups.write("slice/service", str(9 << 20), 2 << 20, (0, 1 << 20, 0, 0))
    groups.write("slice", str(9 << 20), 8 << 20, (4 << 20, 1 << 20, 0, 0))
    assert memory.free_host_memory() == 6 << 20


def test_a_group_that_tells_nothing_of_files(folder: Path, release: str) -> None:
    groups = Groups(folder, release, "/")
    groups.write("", str(8 << 20), 3 << 20)
    for path in folder.rglob("memory.stat"):
        path.unlink()
    assert memory.free_host_memory() == 5 << 20


def test_the_limit_from_which_the_kernel_slows_a_group_down(folder: Path) -> None:
    groups = Groups(folder, "v2", "/")
    groups.write("", "max", 1 << 20)
    (folder / "memory.high").write_text(f"{4 << 20}\n")
    assert memory.free_host_memory() == 3 << 20


@pytest.mark.parametrize("most", [None, "none", str(1 << 60)], ids=["no files", "none", "larger"])
def test_without_a_limit_it_is_the_machine_s(folder: Path, release: str, most: str | None) -> None:
    if most is not None:
        most = NO_LIMIT[release] if most == "none" else most
        Groups(folder, release, "/").write("", most, 1 << 20)
    free = psutil.virtual_memory().available
    assert memory.free_host_memory() == pytest.approx(free, rel=0.2)
