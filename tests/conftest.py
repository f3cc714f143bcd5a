"""Settings of all tests."""

from __future__ import annotations

import os
import resource
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.command import Command
from tests.sizes import sized

# Tensors here are small and the cores are shared: a second thread costs more than it gives.
torch.set_num_threads(1)
# A shared machine has no reliable deadline.
settings.register_profile("hisparse", deadline=None, max_examples=sized(50, 600))
settings.load_profile("hisparse")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers, a file stays together, and servers are two groups: each forks its
    servers from one process that has imported SGLang."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith("tests/server/"):
                return f"tests/server {zlib.crc32(file.encode()) % 2}"
            return file

    return Scheduling(config, log)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``hisparse`` in this process."""
    return Command(capsys)


#: What takes longest without a break comes first, so that no worker is left with it at the end.
_FIRST = ("tests/server/", "tests/eval/", "tests/kernels/test_triton.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((i for i, x in enumerate(_FIRST) if item.nodeid.startswith(x)), len(_FIRST))

    items.sort(key=rank)


def pytest_runtest_setup() -> None:
    """Seeds PyTorch before a test's fixtures, so that it draws the same in every run."""
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """What ``scripts/run_tests.py`` took so far, if it started this run: the last line but one."""
    yield
    pid, _, start = os.environ.get("MEASURED_FROM", "").partition(" ")
    if not start:
        return
    seconds = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    # Fields 16 and 17: what ended children of the starting process took, the lint among them.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds += sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
    minutes = (time.time() - float(start)) / 60
    terminalreporter.write_line(f"{seconds / 60:.1f} core-minutes, {minutes:.1f} minutes")
