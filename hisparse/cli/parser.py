"""The command line's parser: an error is one line."""

from __future__ import annotations

import argparse
from typing import Final, NoReturn

#: Characters of a message, which may quote what was given.
_MOST: Final = 1000


class OneLineParser(argparse.ArgumentParser):
    """Prints an error as commands print theirs, without the usage; so do its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and how to see the flags, and exit with code 2."""
        message = "\\n".join(message.removeprefix("argument ").splitlines())
        if len(message) > _MOST:
            message = f"{message[: _MOST // 2]} ... {message[-_MOST // 2 :]}"
        self.exit(2, f"hisparse: error: {message}; see {self.prog} --help\n")
