"""``triton`` and ``dsa`` against ``torch`` under Triton's interpreter, in a separate process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_the_kernel_s_adapters_pass_under_the_interpreter() -> None:
    suite = [f"tests/adapters/test_{name}.py" for name in ("against_torch", "attend_chosen")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *suite],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) >= 20
