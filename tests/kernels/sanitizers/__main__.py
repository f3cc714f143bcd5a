"""``make test-all PART=sanitizers``: what the tests of kernels call, called again in builds of the
kernels that report undefined behaviour, access out of bounds, leaks and races.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.isa.builds import PARALLEL, what_stopped
from tests.kernels.isa.run import rerun_tests
from tests.kernels.sanitizers.builds import BUILDS, POOL


def main() -> int:
    """Print a table of calls, and a line for each report; 0 if there is none."""
    return rerun_tests("sanitizers", BUILDS, install=lambda: None) or try_pool()


def try_pool() -> int:
    """Run ``pool.cpp`` under ThreadSanitizer; 0 if it finds nothing."""
    program = POOL.compiled([Path(__file__).with_name("pool.cpp"), PARALLEL])
    environment = os.environ | POOL.environment
    ended = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    print(f"pool: {ended.stdout}", end="")
    if ended.returncode != 0:
        print(f"sanitizers: error: pool: {what_stopped(ended.stderr)}", file=sys.stderr)
    return int(ended.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
