"""The ``hisparse`` command: exit codes, one-line errors, only JSON on standard output."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hisparse.cli import main
from hisparse.cli.terminal import without_sglang_warnings
from hisparse.errors import ConfigError
from tests.command import Command


def test_algorithms_as_json(command: Command) -> None:
    found = {entry["name"]: entry for entry in command.json("algorithms")["algorithms"]}
    assert found["quest"]["module"] == "hisparse.algorithms.quest"
    assert found["quest"]["summary"]
    assert "kv_head" in found["quest"]["scopes"]
    assert found["dsa"]["limits"] == [
        "works with page_size 1 only",
        "works with models that have an indexer only",
    ]
    assert found["snapkv"]["options"] == {"window": {"type": "int", "default": 32}}
    assert found["dipr"]["variable_lengths"]


def test_algorithms_fit_80_columns(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("algorithms").splitlines()
    assert max(map(len, lines)) <= 80
    details = lines[lines.index("quest") :]
    assert details[1].startswith("  Keeps the pages ")
    assert details[3] == "  - selection scopes kv_head, layer, query_head"
    assert "  option ranges: int (default 4)" in details


_COMMANDS = ["algorithms", "build", "check", "doctor", "eval", "plan", "bench", "storage"]
_BENCHES = ["serve", "diff-tables", "transfer", "swap-in", "decode", "kernels"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        *([name] for name in _COMMANDS),
        *(["bench", name] for name in _BENCHES),
        *(["storage", name] for name in ("ls", "check", "gc", "rm")),
        ["kvcm", "serve"],
    ],
)
def test_help_fits_80_columns_and_explains_every_flag(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = command(*argv, "--help")
    assert max(map(len, out.splitlines())) <= 80
    options = re.split(r"\n  (?=-)", out.partition("options:\n")[2])
    assert options
    for option in options:
        flag, _, text = " ".join(option.split()).removeprefix("-h, ").partition(" ")
        assert len(re.sub(r"^[A-Z{][^ ]* ?", "", text)) > 5, flag


def test_warnings_of_sglang_are_hidden_and_others_are_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with without_sglang_warnings():
            for module in ("sglang.srt.layers.awq", "sglang", "sglangish", "hisparse.kernels"):
                warnings.warn_explicit(f"from {module}", UserWarning, "x.py", 1, module)
    assert [str(warning.message) for warning in shown] == [
        "from sglangish",
        "from hisparse.kernels",
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "COMMAND"),
        (["no-such-command"], "no-such-command"),
        (["bench"], "BENCH"),
        (["bench", "serve", "--context", "many"], "--context"),
        (["bench", "serve", "--output", "0"], "--output: got '0', expected a number of at least 1"),
        (["bench", "decode", "--steps", "-3"], "--steps: got '-3', expected a number"),
        (["eval", "--context", "4k"], "--context: got '4k', expected numbers of at least 1, such"),
        (["eval", "--budget", "0"], "--budget: got '0', expected numbers"),
        (["plan", "--batch", "0"], "hisparse: error: --batch: got '0', expected numbers"),
        (["plan", "--hit-ratio", "2"], "hisparse: error: --hit-ratio: got '2', expected fract"),
        (["plan", "--batches", "8"], "unrecognized arguments: --batches"),
    ],
)
def test_a_wrong_command_line(argv: list[str], expected: str, command: Command) -> None:
    line = command.refused(*argv)
    assert expected in line
    assert re.search(r"; see hisparse( \w+)* --help$", line)


def test_an_unknown_model_is_one_line(command: Command) -> None:
    err = command.refused("bench", "serve", "--model", "smollm")
    assert err.startswith("hisparse: error: unknown model 'smollm'; did you mean 'smollm2-135m'?")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ConfigError("budget: got 7"), 2, "hisparse: error: budget: got 7\n"),
        (KeyboardInterrupt(), 130, "hisparse: interrupted\n"),
    ],
)
def test_what_ends_a_command(
    raised: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise raised

    monkeypatch.setattr("hisparse.eval.models.resolve", fail)
    assert main(["bench", "serve"]) == code
    assert capsys.readouterr().err == said


def test_output_to_a_full_disk() -> None:
    """One line and no success: a result that was not written looks like an empty one."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hisparse", "algorithms", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "hisparse: error: OSError: [Errno 28] No space left on device\n"
