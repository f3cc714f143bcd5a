"""Texts of namespaces that no store wrote, and what a command line may say of a store."""

from __future__ import annotations

import json
import os
import random
import shlex
from collections import Counter
from pathlib import Path

import pytest

from hisparse.cli import main
from hisparse.errors import ConfigError
from hisparse.storage import FileStore, Namespace
from tests.hostile.mutations import VALUES, mutated_object, mutated_text
from tests.sizes import PART
from tests.storage.pages import NAMESPACE, fill, key_of, page_file, read

_SCALE = 60 if PART == "hostile" else 1


def _refusal(text: str) -> str:
    """The line of the refusal of a namespace's text; empty if it is read."""
    try:
        Namespace.parse(text)
    except ConfigError as error:
        return str(error)
    return ""


def test_texts_of_namespaces() -> None:
    """A text is refused with one line, or names a namespace whose own text names it again."""
    counted: Counter[str] = Counter()
    for seed in range(1000 * _SCALE):
        rng = random.Random(seed)
        text = NAMESPACE.text
        if rng.random() < 0.6:
            text = json.dumps(mutated_object(rng, json.loads(text)))
        if rng.random() < 0.5:
            text = mutated_text(rng, text)
        if line := _refusal(text):
            assert "\n" not in line and len(line) < 1_500
        else:
            found = Namespace.parse(text)
            assert Namespace.parse(found.text) == found
        counted["refused" if line else "read"] += 1
    assert min(counted.values()) > 10, counted


#: Flags of each action; those without a value have none here.
_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "ls": {"--json": ()},
    "check": {"--json": ()},
    "gc": {"--json": (), "--size": ("4KiB", "100GiB", "1MB")},
    "rm": {"--all": (), "--unused-days": ("0", "1.5"), "--namespace": (NAMESPACE.key[:12],)},
    "novel": {"--novel": ()},
}
_TEXTS = (
    "-1", "1e3", "nan", "inf", "2", "1,0", "9" * 400 + "GiB", "1e999", "0GiB",
    "", " ", "a\nb", "%s", "abcd", "--", "x" * 5000, NAMESPACE.key[:3],
)  # fmt: skip
_PATHS = ("", "/dev/null", "~nobody-here/x", "x" * 5000, "\ud800", "/proc/1/fd", "a/b/c")


def _arguments(rng: random.Random, folder: Path) -> list[str]:
    """A command line of ``hisparse storage``, half of them with something wrong."""
    action = rng.choice(("ls", "check", "gc", "gc", "rm", "rm"))
    line, flags, way = [action, str(folder)], _FLAGS[action], rng.randrange(8)
    for name in rng.sample(list(flags), 1):
        values = flags[name]
        line += [name, rng.choice(values)] if values else [name]
    if way == 0:
        line[1] = rng.choice(_PATHS)
    elif way == 1:
        line[0] = rng.choice(list(_FLAGS))
    elif way == 2:
        # No command line holds the first character, and pytest's standard error not the second.
        value = str(rng.choice(VALUES)).replace("\0", "0").replace("\ud800", "?")
        line[-1] = rng.choice((value, rng.choice(_TEXTS)))
    elif way == 3:
        line += rng.choice(list(flags.items()))[0], rng.choice(_TEXTS)
    return line


def test_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes are 0 and 2, an error is one line, and pages that are left are whole."""
    folder, counted = tmp_path / "store", Counter[int]()
    for seed in range(40 * _SCALE):
        with FileStore(folder) as store:
            keys = [key_of(number) for number in range(3)]
            fill(store, [i for i, key in enumerate(keys) if not store.find(NAMESPACE, [key])])
        line = _arguments(random.Random(seed), folder)
        try:
            code = main(["storage", *line])
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else -1
        except Exception as error:
            pytest.fail(f"{shlex.join(line)[:300]!r} raises {error!r}")
        err = capsys.readouterr().err
        assert code in (0, 1, 2), line
        assert bool(code) == (len(err.splitlines()) == 1), (line, err)
        assert len(err) < 1_500
        counted[code] += 1
        with FileStore(folder) as store:
            read(store, keys)
            assert store.verify().damaged == ()
    assert min(counted[0], counted[2]) > 5 * _SCALE, counted


@pytest.mark.parametrize("at", [0, 2**63 - 1], ids=["first", "last"])
def test_ls_of_times_that_no_clock_shows(
    at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileStore(tmp_path) as store:
        keys = fill(store, range(3))
    for key in keys:
        os.utime(page_file(tmp_path, key), ns=(at, at))
    assert main(["storage", "ls", str(tmp_path)]) == 0
    # Lines are as long as the terminal, and the folder's name as it comes.
    assert "3 pages" in " ".join(capsys.readouterr().out.split())
