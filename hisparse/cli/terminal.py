"""What all commands share: how flags are declared, and how results are printed."""

import argparse
import importlib.util
import json
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hisparse.errors import ConfigError

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


@dataclass(frozen=True)
class Values:
    """A kind of value of a flag.

    Attributes:
        read: reads one value; raises ``ValueError`` for another text.
        expected: the valid values in words, for messages.
        metavar: name of one value in ``--help``.
        fits: whether a value is in range.
        several: whether the flag takes a list of values, with commas between them.
    """

    read: Callable[[str], Any]
    expected: str
    metavar: str
    fits: Callable[[Any], bool] = lambda _: True
    several: bool = True

    @property
    def shown(self) -> str:
        """The values in ``--help``: ``"N"`` or ``"N[,N]"``."""
        return f"{self.metavar}[,{self.metavar}]" if self.several else self.metavar

    def text(self, value: Any) -> str:
        """A value as it is written: ``[256, 512]`` -> ``"256,512"``."""
        return ",".join(map(str, value)) if self.several else str(value)

    def __call__(self, text: str) -> Any:
        """Read the text of a flag: ``"256,512"`` -> ``[256, 512]``."""
        try:
            found = [self.read(part) for part in (text.split(",") if self.several else [text])]
        except ValueError:
            found = []
        if not found or not all(map(self.fits, found)):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {self.expected}")
        return found if self.several else found[0]


string = Values(str, "a text", "VALUE", several=False)
names = Values(str, "names, such as quest or quest,sketch", "NAME", bool)
file = Values(Path, "a file", "FILE", several=False)
integer = Values(int, "a number", "N", several=False)
number = Values(int, "a number of at least 1", "N", lambda x: x >= 1, several=False)
numbers = Values(int, "numbers of at least 1, such as 4096 or 256,512", "N", lambda x: x >= 1)
ratio = Values(float, "a fraction from 0 to 1", "F", lambda x: 0 <= x <= 1, several=False)
ratios = Values(float, "fractions from 0 to 1, such as 0.9 or 0.85,1", "F", lambda x: 0 <= x <= 1)
model = Values(str, "a model", "PATH|HUB_ID|NAME", several=False)


def add_flag(
    parser: Any,
    flag: str,
    kind: Values,
    meaning: str,
    default: Any = None,
    *,
    suppress: bool = False,
    **options: Any,
) -> None:
    """Add a flag; its help ends with the default, where there is one.

    Args:
        parser: a parser or a group.
        flag: such as "--budget".
        kind: of its values.
        meaning: help.
        default: value without the flag.
        suppress: whether arguments have no such value without the flag; the help has the default.
        options: of ``add_argument``.
    """
    if "choices" not in options:
        options.setdefault("metavar", kind.shown)
    if default not in (None, "", [], ()):
        meaning = f"{meaning} ({kind.text(default)})"
    if suppress:
        default = argparse.SUPPRESS
    parser.add_argument(flag, type=kind, default=default, help=meaning, **options)


def add_command(
    commands: Any,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int] | None = None,
    *,
    json: bool = True,
) -> argparse.ArgumentParser:
    """Add a subcommand, with ``--json`` unless it has subcommands or prints no result."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    if run is not None:
        parser.set_defaults(run=run)
        if json:
            parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def print_result(
    arguments: argparse.Namespace, found: Mapping[str, Any], show: Callable[[Console], None]
) -> None:
    """Print a result as JSON where ``--json`` asks for that, and by ``show`` elsewhere."""
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(Console(highlight=False))


def make_table(*heads: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """A table without vertical lines; its cells wrap and are never cut off.

    Args:
        heads: heads of the columns.
        right: heads of the columns that are aligned to the right and never wrap.
        title: above the table.
    """
    layout: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", **layout)
    for head in heads:
        if head in right:
            table.add_column(head, justify="right", no_wrap=True)
        else:
            table.add_column(head, overflow="fold")
    return table


def print_paragraph(console: Console, text: str, indent: str = "", hanging: int = 0) -> None:
    """Plain text, wrapped between words at the width of the terminal.

    Args:
        console: where.
        text: one paragraph.
        indent: the beginning of the first line; the others are indented as far.
        hanging: further columns by which all lines but the first are indented.
    """
    lines = textwrap.wrap(
        text,
        width=console.width,
        initial_indent=indent,
        subsequent_indent=" " * (len(indent) + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def require(package: str, user: str, install: str) -> None:
    """Check that a package that only some commands need is installed.

    Args:
        package: its module.
        user: the command or flag that needs it.
        install: what to give to ``pip install``.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{user}: got no package {package}, expected it: pip install {install}")


def progress_bar() -> Progress:
    """A progress bar on standard error; hidden if that is not a terminal."""
    console = Console(stderr=True)
    options: dict[str, Any] = {"transient": True, "disable": not console.is_terminal}
    columns = (BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console, **options)


@contextmanager
def without_sglang_warnings() -> Iterator[None]:
    """Hide the Python warnings that SGLang's modules issue when they are imported.

    On a CPU, for example, its AWQ and GGUF modules warn that they need a GPU. Warnings of every
    other module are still shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"sglang(\.|$)")
        yield
