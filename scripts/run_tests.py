"""What ``make test`` does after the set-up: lint, then all of pytest on three workers.

Two of them run servers, and often wait.

``tests/conftest.py`` prints what the run took, in the line before pytest's summary. The processor
time is that of all processes that were started here, those of servers too that ended after the
process that started them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PR_SET_CHILD_SUBREAPER = 36

COMMANDS = (
    [os.environ.get("MAKE", "make"), "--no-print-directory", "lint"],
    [sys.executable, "-m", "tests.prepare"],
    [sys.executable, "-m", "pytest", "-n", "3", "--no-loadscope-reorder"],
)


def run(command: list[str], env: dict[str, str]) -> int:
    """The exit code of a command; orphans of its children are reaped as well."""
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            return os.waitstatus_to_exitcode(status)


def main() -> int:
    """Exit code of the first command that fails."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    env = os.environ | {"MEASURED_FROM": f"{os.getpid()} {time.time()}", "OMP_NUM_THREADS": "1"}
    env.pop("PART", None)
    for command in COMMANDS:
        code = run(command, env)
        if code != 0:
            return code if code > 0 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
