"""The program in docs/transformers.md prints the output that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hisparse.eval.models import fetch

DOCS = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_program_and_its_output(tmp_path: Path) -> None:
    fetch("smollm2-135m")
    program = max(re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL), key=len)
    (expected,) = re.findall(r"```\n(\d+ tokens after .*?)```", DOCS, re.DOTALL)
    seconds = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        got, wanted = done.stdout.splitlines(), expected.splitlines()
        seconds.append(float(got[0].split()[-2]))
        assert got[0].split()[:3] == wanted[0].split()[:3]
        assert got[1] == wanted[1]
        # Rounding decides how the model words that it does not know.
        assert got[2].startswith(wanted[2].removesuffix("not specified."))
        assert re.fullmatch(r"\d+\.\d% hits, \d+ MiB read to decode", got[3])
    assert seconds[1] < seconds[0] / 2, "the second run did not take the stored context"
