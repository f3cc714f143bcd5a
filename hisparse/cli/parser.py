"""The command line's parser: an error is one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

__all__ = ["OneLineParser"]


class OneLineParser(argparse.ArgumentParser):
    """Prints an error as commands print theirs, without the usage; so do its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and how to see the flags, and exit with code 2."""
        message = message.removeprefix("argument ")
        self.exit(2, f"hisparse: error: {message}; see {self.prog} --help\n")
