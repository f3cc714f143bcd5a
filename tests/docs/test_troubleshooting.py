"""docs/troubleshooting.md quotes messages as the code has them.

A quoted text stands in the first cell of a table row. Each value in it is written "…". A message
that says what was expected needs no row; any other one with which a server ends has one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [
    text
    for cell in re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)
    for text in re.findall(r"`(.+?)`(?:<br>|$)", cell)
]

#: Where messages come from that a server or `HiSparseCache` ends with.
COMPLETE = (
    "adapters", "algorithms", "cache", "engine", "memory", "sglang", "storage", "trace",
    "transformers",
)  # fmt: skip
MODULES = ("config.py", "model_config.py", "options.py", "registry.py")
ERRORS = {"AlgorithmError", "CapacityError", "ConfigError", "HiSparseError", "PluginError"}


def template(node: ast.AST) -> str:
    """A string expression as it is printed, "…" for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%[-\d.]*[sdf]", "…", node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(map(template, node.values))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = template(node.left) + template(node.right)
    else:
        text = "…"
    return re.sub("…+", "…", text)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in (ROOT / "hisparse", ROOT / "bench" / "hisparse_bench"):
        for file in sorted(folder.rglob("*.py")):
            yield file, ast.parse(file.read_text(encoding="utf-8"))


TREES = dict(trees())
TEXTS = {template(node) for tree in TREES.values() for node in ast.walk(tree)} - {"…"}


def messages() -> Iterator[tuple[str, str]]:
    """File and message of each error without "expected" that these modules raise."""
    for file, tree in TREES.items():
        name = file.relative_to(ROOT / "hisparse") if "hisparse_bench" not in str(file) else file
        if name.parts[0] not in (*COMPLETE, *MODULES):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind, text = ast.unparse(node.exc.func), template(node.exc.args[0])
                # What another function words is quoted where that function has it.
                worded = len(re.findall(r"[a-z]{3,}", text)) > 2
                if kind in ERRORS and worded and "expected" not in text:
                    yield str(name), text


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) > 50
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_code_has_each_quoted_message(quoted: str) -> None:
    assert any(quoted in text for text in TEXTS)
    assert len(re.findall(r"\w{2,}", quoted)) > 1, "too short to find"


def test_a_message_that_says_no_expectation_has_a_row() -> None:
    missing = {text: file for file, text in messages() if not any(q in text for q in QUOTED)}
    listed = "\n".join(f"{file}: {text}" for text, file in sorted(missing.items()))
    assert not missing, f"docs/troubleshooting.md lacks:\n{listed}"
