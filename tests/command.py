"""The command ``hisparse`` in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hisparse.cli import main


class Command:
    """Runs ``hisparse``; a fixture of all tests.

    Args:
        capsys: takes what it prints.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *argv: str, code: int = 0) -> tuple[str, str]:
        """What it prints to standard output and to standard error.

        Args:
            argv: words of the command line.
            code: the exit code that it must have.
        """
        self._capsys.readouterr()
        try:
            found: Any = main(list(argv))
        except SystemExit as end:
            found = end.code
        said = self._capsys.readouterr()
        assert found == code, f"exit code {found}\n{said.out}\n{said.err}"
        return said.out, said.err

    def __call__(self, *argv: str, code: int = 0) -> str:
        """What it prints to standard output."""
        return self.run(*argv, code=code)[0]

    def json(self, *argv: str, code: int = 0) -> Any:
        """The object that it prints with ``--json``."""
        return json.loads(self(*argv, "--json", code=code))

    def refused(self, *argv: str, code: int = 2) -> str:
        """The line that it ends with, alone: an error of the user's input."""
        out, err = self.run(*argv, code=code)
        assert out == ""
        assert err.startswith("hisparse: error: ") and err.count("\n") == 1, err
        return err
