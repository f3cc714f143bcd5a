"""RULER's tasks with a generator of our own in place of RULER's, and once with RULER's."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.errors import ConfigError, HiSparseError
from hisparse.eval import ruler
from hisparse.eval.method import parse_methods
from hisparse.eval.results import make_ruler_cells
from hisparse.eval.ruler import Prompt, RulerEvaluation, make_prompts, score
from hisparse.eval.tables import make_ruler_tables
from hisparse.eval.texts import read_text
from tests.command import Command
from tests.processes import is_running
from tests.sizes import SWEEPS
from tests.transformers.hf_models import GREEDY, byte_tokenizer, model

#: What `make ruler` installed, apart.
INSTALLED = Path(sys.prefix) / "ruler"
#: Writes documents as RULER's does, with the same flags. "cwe" fails with code 0, "fwe" starts
#: a process that never ends, and ends as that does.
GENERATOR = """
import argparse, json, os, pathlib, subprocess, sys, time
flags = "save_dir task tokenizer_type tokenizer_path max_seq_length num_samples".split()
parser = argparse.ArgumentParser()
for flag in flags:
    parser.add_argument("--" + flag, required=True)
given = parser.parse_args()
assert pathlib.Path(given.tokenizer_path, "tokenizer.json").is_file()
with open(pathlib.Path(os.environ["PYTHONPATH"], "log"), "a") as log:
    print(given.task, given.max_seq_length, file=log)
if given.task == "cwe":
    print("ValueError: no words")
    sys.exit()
if given.task == "fwe":
    child = subprocess.Popen(["python", "-c", "while True: pass"])
    pathlib.Path(os.environ["PYTHONPATH"], "child").write_text(str(child.pid))
    if child.wait():
        sys.exit()
folder = pathlib.Path(given.save_dir, given.task)
folder.mkdir()
with (folder / "validation.jsonl").open("w") as file:
    for i in range(int(given.num_samples)):
        text = "The code is %d.\u2028" % (1000 + i)
        text += "It rains. " * (int(given.max_seq_length) // 12)
        line = {"index": i, "input": text + "The code is", "outputs": [str(1000 + i)], "length": 1}
        file.write(json.dumps(line, ensure_ascii=False) + "\\n")
"""
LENGTHS, NEW = (560, 600, 641), 20


@pytest.fixture
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "a package"
    script = folder / "long_context_eval" / "data" / "prepare.py"
    script.parent.mkdir(parents=True)
    script.write_text(GENERATOR)
    return folder


@pytest.fixture(scope="module")
def said() -> list[list[int]]:
    """The tokens that the model by itself says after each prompt."""
    net, ids = model("llama"), texts()
    found = [net.generate(torch.tensor([x]), max_new_tokens=NEW, **GREEDY)[0] for x in ids]
    return [tokens[len(x) :].tolist() for tokens, x in zip(found, ids, strict=True)]


def texts() -> list[list[int]]:
    text = read_text("moby_dick").encode("ascii", "ignore").decode()
    return [byte_tokenizer()(text[1000 * i :][:n]).input_ids for i, n in enumerate(LENGTHS)]


@pytest.fixture
def prompts(said: list[list[int]], tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """Answers: what comes soon and what never comes; what comes late; what comes first."""
    monkeypatch.setitem(ruler.TASKS, "vt", NEW)
    answers = [
        [tokenizer.decode(said[0][2:5]), "never said"],
        [tokenizer.decode(said[1][9:14]).upper()],
        [tokenizer.decode(said[2][:3])],
    ]
    return [
        Prompt(name=f"p{i}", task="vt", context=1024, ids=ids, answers=answers[i])
        for i, ids in enumerate(texts())
    ]


def evaluation(folder: Path, prompts: list[Prompt], **changes: Any) -> RulerEvaluation:
    settings: dict[str, Any] = {
        "model": model("llama"),
        "tokenizer": byte_tokenizer(),
        "methods": parse_methods(["streaming", "snapkv"], [96], []),
        "prompts": prompts,
        "folder": folder / "model",
    }
    return RulerEvaluation(**settings | changes)


def test_dense_says_what_the_model_says_by_itself(
    tmp_path: Path, prompts: list[Prompt], said: list[list[int]], tokenizer: Any
) -> None:
    before = model("llama").config._attn_implementation
    records = evaluation(tmp_path, prompts).run()
    assert model("llama").config._attn_implementation == before
    assert [(r["document"], r["method"]) for r in records[:3]] == [
        ("p0", "dense"),
        ("p0", "streaming"),
        ("p0", "snapkv"),
    ]
    dense = [r for r in records if r["method"] == "dense"]
    whole = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in said]
    assert dense[0]["answer"] == whole[0], "one answer never comes: the text goes on to its end"
    assert [r["score"] for r in dense] == [0.5, 1, 1]
    for record, text in zip(dense[1:], whole[1:], strict=True):
        assert text.startswith(record["answer"]) and record["answer"] != text
        assert "kept_mean" not in record, "dense attention selects nothing"
    streaming = [r for r in records if r["method"] == "streaming"]
    assert streaming[0]["answer"] != dense[0]["answer"]
    assert all(80 <= r["kept_mean"] <= 96 for r in streaming)
    assert [r["tokens"] for r in streaming] == list(LENGTHS)
    assert sorted(x.name for x in next(tmp_path.iterdir()).iterdir()) == ["ruler.jsonl"]


def test_how_many_are_answered_side_by_side_does_not_matter(
    tmp_path: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts[1] = replace(prompts[1], task="qa_1")
    found = []
    for rows in (1, 2, 3):
        monkeypatch.setattr(ruler, "_BATCH_TOKENS", 1024 * rows)
        found.append(evaluation(tmp_path / str(rows), prompts).run())
    assert found[0] == found[1] == found[2]
    assert len({r["kept_mean"] for r in found[0] if r["method"] == "streaming"}) == 3


def test_a_run_that_was_interrupted_goes_on(
    tmp_path: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruler, "_BATCH_TOKENS", 2048)
    monkeypatch.setattr(ruler, "_GROUP_TOKENS", 2048)
    whole = evaluation(tmp_path / "whole", prompts).run()
    seen: list[tuple[str, int, int]] = []

    def stop(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation(tmp_path / "parts", prompts, progress=stop).run()
    assert seen[-1] == ("2 prompts of 1024: snapkv, 96", 4, 9)
    assert list(tmp_path.glob("parts/*/contexts"))
    seen.clear()
    rest = evaluation(tmp_path / "parts", prompts, progress=lambda *x: seen.append(x)).run()
    assert rest == whole
    assert seen[0] == ("2 prompts of 1024: snapkv, 96", 0, 5)
    assert not list(tmp_path.glob("*/*/contexts"))
    more = parse_methods(["streaming", "oracle"], [96], [])
    seen.clear()
    evaluation(tmp_path / "parts", prompts, methods=more, progress=lambda *x: seen.append(x)).run()
    assert [what for what, _, _ in seen] == [
        "2 prompts of 1024: oracle, 96",
        "1 prompt of 1024: oracle, 96",
        "done",
    ]


def made(
    tokenizer: Any, package: Path, task: str = "vt", context: int = 600, count: int = 3
) -> list[Prompt]:
    return make_prompts(
        tokenizer,
        tasks=[task],
        contexts=[context],
        count=count,
        package=package,
        cache=package / "documents",
    )


def test_documents_are_generated_once(tokenizer: Any, package: Path) -> None:
    first = made(tokenizer, package)
    assert made(tokenizer, package) == first
    assert [p.answers for p in first] == [["1000"], ["1001"], ["1002"]]
    assert tokenizer.decode(first[1].ids).startswith("The code is 1001.\u2028It rains.")
    assert len({p.name for p in first}) == 3
    assert len(made(tokenizer, package, count=2)) == 2
    assert (package / "log").read_text() == "vt 600\n"
    assert made(tokenizer, package, count=4)[:3] == first
    longer = made(tokenizer, package, context=720)
    assert len(longer[0].ids) > len(first[0].ids)
    tokenizer.add_tokens(["rains"])
    assert len(made(tokenizer, package)[0].ids) < len(first[0].ids), "those of its own tokens"
    assert (package / "log").read_text() == "vt 600\nvt 600\nvt 720\nvt 600\n"


def test_a_generator_that_fails_or_never_ends(
    tokenizer: Any, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HiSparseError, match="of cwe at 600 tokens wrote nothing: ValueError: no w"):
        made(tokenizer, package, "cwe")
    monkeypatch.setattr(ruler, "_SECONDS", 1)
    with pytest.raises(ConfigError, match="got 600 tokens, for which RULER's generator of fwe did"):
        made(tokenizer, package, "fwe")
    assert not is_running(int((package / "child").read_text()))
    assert not (package / "documents").exists()
    with pytest.raises(ConfigError, match="make ruler, or pip install --no-deps --target") as error:
        made(tokenizer, package / "none")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:2], lines[2][:20]], "line 3: not JSON"),
        (lambda lines: [*lines[:2], '{"input": "x"}'], "line 3: got no outputs"),
        (lambda lines: ['{"input": "x", "outputs": []}', *lines[1:]], "line 1: outputs: got none"),
    ],
)
def test_damaged_documents_are_named(
    tokenizer: Any, package: Path, damage: Any, message: str
) -> None:
    made(tokenizer, package)
    (file,) = (package / "documents").glob("*/*.jsonl")
    file.write_text("\n".join(damage(file.read_text().removesuffix("\n").split("\n"))))
    with pytest.raises(HiSparseError, match=r"delete the file$") as error:
        made(tokenizer, package)
    assert message in str(error.value) and str(file) in str(error.value)


def test_scores_are_rulers() -> None:
    said = "the numbers are 12, 34; and Paris"
    assert score("vt", said, ["12", "PARIS", "56", "78"]) == 0.5
    assert score("qa_1", said, ["56", "paris"]) == 1
    assert score("qa_2", said, ["56"]) == score("cwe", "", ["a"]) == 0


def record(task: str, number: int, method: str, right: float) -> dict[str, Any]:
    return {
        "document": f"{task}{number}",
        "method": method,
        "budget": 64,
        "config": "",
        "context": 4096,
        "task": task,
        "tokens": 3000 + number,
        "algorithm": method,
        "score": right,
    }


def test_cells_pair_methods_with_dense() -> None:
    scores = {
        "vt": {"dense": [1.0] * 8 + [0.0] * 2, "quest": [1.0] * 6 + [0.0] * 4},
        "cwe": {"dense": [0.4] * 10, "quest": [0.6] * 10},
    }
    records = [
        record(task, i, method, x)
        for task, methods in scores.items()
        for method, values in methods.items()
        for i, x in enumerate(values)
    ]
    found = make_ruler_cells(records)
    cells = {(c["method"], c["task"]): c for c in found}
    vt, cwe = cells["quest", "vt"], cells["quest", "cwe"]
    assert (vt["score"], vt["dense"], vt["usable"], vt["n"]) == (0.6, 0.8, True, 10)
    assert vt["lost"] == pytest.approx(0.2) and 0 <= vt["lost_low"] < 0.2 < vt["lost_high"] <= 0.6
    assert (vt["low"], vt["high"]) == pytest.approx((0.3, 0.9), abs=0.11)
    assert vt["tokens"] == [3000, 3004, 3009]
    assert vt["scores"] == scores["vt"]["quest"]
    assert cells["quest", "mean"]["scores"] == vt["scores"], "prompts in the order of dense"
    assert not cwe["usable"] and cwe["lost"] == pytest.approx(-0.2) == cwe["lost_high"]
    assert cells["quest", "mean"]["score"] == 0.6, "over the tasks that the dense model does"
    assert cells["dense", "mean"]["lost"] == cells["dense", "mean"]["lost_high"] == 0
    (table,) = make_ruler_tables(found)
    assert table.heads == ["task", "dense", "quest, 64"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["cwe (n 10, 3,000-3,009)"] == ["[40 (40\N{EN DASH}40)]", "[60 (60\N{EN DASH}60)]"]
    assert rows["lost"][0] == "0 (0\N{EN DASH}0)" and rows["lost"][1].startswith("20 (")
    assert make_ruler_cells([r for r in records if r["task"] == "cwe"])[-1]["task"] == "cwe"


def test_the_command(
    tmp_path: Path,
    tokenizer: Any,
    package: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hisparse.cli.eval._RULER", package)
    monkeypatch.setattr("hisparse.cli.eval.default_cache", lambda: tmp_path)
    model("llama").save_pretrained(tmp_path / "net")
    tokenizer.save_pretrained(tmp_path / "net")
    line = ["eval", "--ruler", "--model", str(tmp_path / "net"), "--out", str(tmp_path / "out")]
    line += ["--context", "720", "--limit", "2", "--algorithm", "oracle", "--budget", "96"]
    cells = command.json(*line, "--tasks", "vt,qa_1")["cells"]
    assert {(c["method"], c["task"], c["n"]) for c in cells if c["task"] != "mean"} == {
        (method, task, 2) for method in ("dense", "oracle") for task in ("vt", "qa_1")
    }
    kept = {c["method"]: c["bytes_per_token"] for c in cells}
    assert kept["oracle"] > 0 == kept["dense"], "the oracle keeps all keys"
    out, err = command.run(*line, "--tasks", "vt,qa_1")
    assert "RULER at 720 tokens, percent" in out and "qa_1 (n 2, " in out
    assert "0 of 0" in err, "nothing is run again"
    for wrong, message in (
        (["--tasks", "vt,copy"], "--tasks: unknown RULER task 'copy'"),
        (["--tasks", "vt,vt"], "--tasks: got vt more than once"),
        (["--seeds", "2"], "--seeds: got it with --ruler"),
        (["--context", "99999999"], "context: got 99999999 tokens, expected at most"),
        (["--tasks", "cwe"], "wrote nothing: ValueError: no words"),
    ):
        assert message in command.run(*line, *wrong, code=2)[1]


@pytest.mark.sweeps
@pytest.mark.skipif(not SWEEPS, reason="takes a minute: make test-all PART=sweeps")
@pytest.mark.skipif(not INSTALLED.exists(), reason="not installed: make ruler")
def test_rulers_own_documents_and_metrics(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make_prompts(
        tokenizer,
        tasks=["niah_multivalue", "fwe", "qa_1"],
        contexts=[8192],
        count=2,
        package=INSTALLED,
        cache=tmp_path,
    )
    assert [p.task for p in found[::2]] == ["niah_multivalue", "fwe", "qa_1"]
    for prompt in found:
        text = tokenizer.decode(prompt.ids)
        assert 2048 < len(prompt.ids) <= 8192 - ruler.TASKS[prompt.task]
        assert any(answer in text for answer in prompt.answers)
    assert len(found[0].answers) == 4
    assert tokenizer.decode(found[0].ids).endswith("mentioned in the provided text are")
    monkeypatch.syspath_prepend(INSTALLED)
    from long_context_eval.eval.synthetic.constants import TASKS

    for task, name in (("niah_multivalue", "niah"), ("qa_1", "qa"), ("vt", "variable_tracking")):
        for said in ("alpha Beta", "beta", "nothing"):
            answers = ["Alpha", "beta", "gamma"]
            expected = TASKS[name]["metric_fn_per_sample"]([said], [answers])[0] / 100
            assert score(task, said, answers) == pytest.approx(expected)
