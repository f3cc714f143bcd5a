"""``make test-all PART=isa``: what the tests of kernels call on this processor, called again in
builds of the kernels for other instruction sets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.kernels.isa.builds import ARM_TOOLS, BUILDS
from tests.kernels.isa.run import Failed, rerun_tests


def main() -> int:
    """Print a table of calls and a line for each difference; 0 if there is none."""
    return rerun_tests("isa", BUILDS, install_tools)


def install_tools() -> None:
    """Install the compiler and the emulator for ARM if this user may."""
    missing = [name for name in ARM_TOOLS if not shutil.which(name)]
    if not missing:
        return
    install = ["apt-get", "install", "-y", *(ARM_TOOLS[name] for name in missing)]
    said = f"{' and '.join(missing)} missing; on Debian: {' '.join(install)}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Failed(said)
    print(f"isa: {' '.join(install)}")
    for command in (["apt-get", "update"], install):
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            raise Failed(said)


if __name__ == "__main__":
    sys.exit(main())
