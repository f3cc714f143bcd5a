"""`make site` builds docs/ without a warning, and the site loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.prefix) / "site"
pytestmark = pytest.mark.skipif(
    not (TOOLS / "mkdocs").exists(), reason="not installed: make site-tools, which make test does"
)


def _build(settings: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        [*command, "--config-file", str(settings), "--site-dir", str(target)],
        env=os.environ | {"PYTHONPATH": str(TOOLS), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def test_it_builds(tmp_path: Path) -> None:
    done = _build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        name = "index" if page.stem == "README" else page.stem
        text = (tmp_path / "site" / f"{name}.html").read_text(encoding="utf-8")
        # Tags that load something; links of the text may lead anywhere.
        loading = re.findall(r"<(?:link|script|img|iframe)\b[^>]*", text)
        assert not [tag for tag in loading if re.search(r"(?:src|href)=.?(?:https?:)?//", tag)]
        # Table cells show a backslash that GitHub hides.
        assert not re.findall(r"<code>[^<]*\\\|", text), page.name


def test_a_broken_link_fails_it(tmp_path: Path) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "README.md").write_text("# Title\n\n[gone](gone.md), [no such heading](#gone)\n")
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = _build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "'gone.md'" in done.stderr and "'#gone'" in done.stderr
