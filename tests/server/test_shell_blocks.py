"""Every shell block of README and quick start runs as it stands, but installs and make targets."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import Server
from tiny_models import tiny_model

from hisparse.eval.models import resolve

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quick-start.md")
#: Blocks that other checks run: `.ci/run` installs, and calls the targets.
NOT_RUN = {'pip install ".[sglang]"', "make demo", "make test"}
#: The README's server stands for one with much memory.
SMALLER = {"64GiB": "1GiB"}


def shell_blocks(page: str) -> list[str]:
    """The shell blocks of a page. A block without a language would escape: it is an error."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert {language for language, _ in fences} <= {"bash", "python", "text"}, page
    return [block for language, block in fences if language == "bash"]


def commands(block: str) -> set[str]:
    """The lines of a block, without comments."""
    return {line.partition("  #")[0].strip() for line in block.splitlines()}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What a user has who activated the environment: its programs, and a folder to work in."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    python_path = [str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
    }


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """Ends the server of a block after the last one that may ask it."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("page", PAGES)
def test_each_block_runs(
    page: str, environment: dict[str, str], servers: ExitStack, log_dir: Path, tmp_path: Path
) -> None:
    # The quick start asks for text, which needs a tokenizer.
    model = resolve("smollm2-135m") if "quick" in page else tiny_model("llama")
    flags = () if "quick" in page else ("--skip-tokenizer-init",)
    url, said = "", ""
    for block in shell_blocks(page):
        if commands(block) <= NOT_RUN:
            continue
        if "sglang.launch_server" in block:
            for large, small in SMALLER.items():
                block = block.replace(large, small)
            joined = re.sub(r"\$?\bMODEL\b", str(model), block.replace("\\\n", " "))
            line = shlex.split(joined)
            line = [sys.executable, *line[1:], "--skip-server-warmup", *flags]
            log = log_dir / f"shell-block-{Path(page).stem}.log"
            url = servers.enter_context(Server(model, log, line=line)).url
            continue
        script = block.replace("http://127.0.0.1:30000", url)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        said = done.stdout
    if "quick" in page:
        assert re.search(r"^hisparse:hit_pages_total\{.*\} [1-9]", said, re.MULTILINE), said
    else:
        assert url, "the README starts a server"


def test_what_is_left_out_is_there() -> None:
    lines = {line for page in PAGES for block in shell_blocks(page) for line in commands(block)}
    assert lines >= NOT_RUN
