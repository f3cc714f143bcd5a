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
    (printed,) = re.findall(r"```\n(\d+ of \d+ tokens are computed\nWhat .*?)```", DOCS, re.DOTALL)
    first = printed.splitlines()
    for expected in (first[0], first[0].replace("2857", "9", 1)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        got = done.stdout.splitlines()
        assert got[:2] == [expected, first[1]]
        # Rounding decides how the model words that it does not know.
        assert got[2].startswith(first[2].removesuffix("not the same as the"))
        assert re.fullmatch(r"\d+\.\d% hits, \d+ MiB read to decode", got[3])
