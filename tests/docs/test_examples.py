"""What docs/write-an-algorithm.md builds is what lies in examples/, and does what the text says."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.cli import eval as eval_command
from hisparse.eval import parse_methods

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hisparse-knorm"
DOC = (ROOT / "docs" / "write-an-algorithm.md").read_text(encoding="utf-8")


def test_the_text_builds_the_example() -> None:
    blocks = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", DOC, re.DOTALL))
    files = {p.name: p.read_text() for p in EXAMPLE.iterdir() if p.is_file()}
    assert blocks == files


def test_the_file_is_as_short_as_it_is_said_to_be() -> None:
    assert len((EXAMPLE / "hisparse_knorm.py").read_text().splitlines()) < 30


def test_a_plug_in_imports_only_the_public_names() -> None:
    tree = ast.parse((EXAMPLE / "hisparse_knorm.py").read_text())
    ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {node.module: [a.name for a in node.names] for node in ours}
    assert {module for module in imported if module.startswith("hisparse")} == {
        "hisparse.algorithms"
    }
    assert imported["hisparse.algorithms"] == [
        "KVSpec",
        "PageScoreAlgorithm",
        "register_algorithm",
    ]


def test_every_capability_has_a_row() -> None:
    rows = re.search(r"\| attribute \| .*?\n\|---\|---\|---\|\n(.*?)\n\n", DOC, re.DOTALL)[1]
    written: dict[str, str] = {}
    for line in rows.splitlines():  # A row may have several, with their defaults in order.
        names, defaults = (re.findall(r"`(.*?)`", cell) for cell in line.split(" | ")[:2])
        written |= zip(names, defaults, strict=True)
    declared = [
        n for n, hint in BaseSparseAlgorithm.__annotations__.items() if "ClassVar" in str(hint)
    ]
    assert list(written) == [*declared, "reads_host_keys", "query_window"]
    for name in declared:
        assert repr(getattr(BaseSparseAlgorithm, name)).replace("'", '"') == written[name], name


def test_every_method_has_a_row() -> None:
    rows = re.search(r"\| method \| .*?\n\|---\|---\|\n(.*?)\n\n", DOC, re.DOTALL)[1]
    methods = [n for n, f in vars(BaseSparseAlgorithm).items() if callable(f) and n[0] != "_"]
    assert re.findall(r"^\| `(\w+)\(", rows, re.MULTILINE) == methods


def test_the_evaluation_is_a_command_that_there_is() -> None:
    """It takes minutes: only that it is understood, with the example's name in it, is tested."""
    line = re.search(r"^hisparse (eval .*)$", DOC, re.MULTILINE)[1]
    commands = argparse.ArgumentParser().add_subparsers()
    eval_command.add_parser(commands)
    arguments = commands.choices["eval"].parse_args(line.split()[1:])
    assert "knorm" in arguments.algorithm
    known = set(arguments.algorithm) - {"knorm"}
    assert parse_methods(sorted(known), arguments.budget, [])
