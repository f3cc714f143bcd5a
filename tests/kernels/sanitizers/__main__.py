"""``make test-all PART=sanitizers``: what the tests of kernels call, called again in builds of the
kernels that report undefined behaviour, access out of bounds, leaks and races.
"""

from __future__ import annotations

import sys

from tests.kernels.isa.run import rerun_tests
from tests.kernels.sanitizers.builds import BUILDS


def main() -> int:
    """Print a table of calls, and a line for each report; 0 if there is none."""
    return rerun_tests("sanitizers", BUILDS, install=lambda: None)


if __name__ == "__main__":
    sys.exit(main())
