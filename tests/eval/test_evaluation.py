"""The evaluation on a tiny model: what is judged, and that a run goes on where it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.eval import Evaluation, Item, Method, make_cells, make_summary, parse_methods
from hisparse.eval.documents import CONTINUE
from hisparse.eval.evaluation import ItemScores, bytes_per_token, score_items
from hisparse.eval.texts import read_text
from hisparse.transformers import HiSparseCache, disable, enable
from tests.eval.test_documents import Letters
from tests.transformers.hf_models import model, prompt

LENGTH = 300
#: Items begin there: at a page's end, within one, right behind the next.
STARTS = (LENGTH, 320, 333)


@pytest.fixture
def net() -> Any:
    made = model("llama")
    enable(made, {"algorithm": "streaming", "budget": 128}, max_length=512)
    yield made
    disable(made)


def items(seed: int) -> list[Item]:
    lengths = {"short": (9, 3), CONTINUE: (20, 12)}
    return [
        Item(
            task=task,
            start=start,
            ids=prompt(n, seed + n)[0].tolist(),
            scored=list(range(first, n)),
        )
        for start in STARTS
        for task, (n, first) in lengths.items()
    ]


def contents(made: Any, **settings: Any) -> tuple[HiSparseCache, Tensor]:
    ids = prompt(STARTS[-1], 7)
    cache = HiSparseCache(made, settings, max_batch_size=8, max_length=512)
    with torch.no_grad():
        made(ids[:, :LENGTH], past_key_values=cache, logits_to_keep=1)
    return cache, ids


@pytest.mark.parametrize("name", ["sketch", "quest", "oracle"])
def test_bytes_are_those_of_the_tensors(net: Any, name: str) -> None:
    """Of the device that decodes: sketches of a GPU are larger than a CPU's."""
    settings = {"algorithm": name, "budget": 128}
    cache, _ = contents(net, **settings)
    tensors = cache.coordinator.representations.of_pages.values()
    held = sum(x[:, 0].nbytes for x in tensors) / 16
    assert bytes_per_token(net, HiSparseConfig.from_dict(settings)) == held > 0


def test_dense_answers_are_those_of_the_model(net: Any) -> None:
    cache, ids = contents(net, **Method.dense().settings)
    found = score_items(net, cache, ids[0].tolist(), items(1))
    disable(net)
    for got in found:
        start = got.item.start
        whole = torch.cat([ids[:, :start], torch.tensor([got.item.ids])], dim=1)
        with torch.no_grad():
            log_probs = net(whole).logits[0].log_softmax(-1)
        at = torch.tensor(got.item.scored) + start - 1
        tokens = torch.tensor([got.item.ids[i] for i in got.item.scored])
        expected = log_probs[at].gather(1, tokens[:, None])[:, 0]
        assert_close(torch.tensor(got.log_probs), expected, rtol=1e-3, atol=1e-3)
        assert got.correct == (log_probs[at].argmax(-1) == tokens).tolist()
        assert bool(got.distributions) == (got.item.task == CONTINUE)
        if got.distributions:
            assert_close(torch.stack(got.distributions), log_probs[at], rtol=1e-3, atol=1e-3)


def test_a_right_answer_is_seen_as_right(net: Any) -> None:
    cache, ids = contents(net, **Method.dense().settings)
    disable(net)
    best = net.generate(ids[:, :LENGTH], max_new_tokens=6, do_sample=False, pad_token_id=0)[
        0, LENGTH:
    ].tolist()
    enable(net, {"budget": 128}, max_length=512)
    right = Item(task="t", start=LENGTH, ids=best, scored=[1, 2, 3, 4, 5])
    wrong = Item(task="t", start=LENGTH, ids=[*best[:-1], best[-1] ^ 1], scored=[1, 2, 3, 4, 5])
    given = Item(task="t", start=LENGTH, ids=[*wrong.ids[:-1], 7, 7], scored=[2, 4])
    document = ids[0].tolist()
    found = score_items(net, cache, document, [wrong, given, right])
    assert found[0].correct == [True] * 4 + [False]
    assert found[1].correct == [True] * 2, "what is given in between is not judged"
    assert found[2].correct == [True] * 5


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.eval.documents._MAX_QUESTIONS", 3)


def evaluation(folder: Path, methods: list[Method], **changes: Any) -> Evaluation:
    settings: dict[str, Any] = {
        "model": model("llama"),
        "tokenizer": Letters(),
        "methods": methods,
        "contexts": [4000],
        "seeds": 1,
        "folder": folder,
        "texts": {"moby_dick": read_text("moby_dick")},
    }
    return Evaluation(**settings | changes)


def test_a_run_writes_records_as_they_come_and_goes_on_from_them(tmp_path: Path) -> None:
    methods = parse_methods(["streaming"], [128], ['{"algorithm": "snapkv", "budget": 256}'])
    seen: list[str] = []

    def stop(what: str, done: int, total: int) -> None:
        seen.append(what)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluation(tmp_path, methods, progress=stop).run()
    (lines,) = tmp_path.parent.glob(f"{tmp_path.name}-float32-*/records.jsonl")
    assert len(lines.read_text().splitlines()) == 2
    # The last line is cut off where the machine went down.
    lines.write_text(lines.read_text()[:-20])
    seen.clear()
    records = evaluation(tmp_path, methods).run()
    assert [r["method"] for r in records] == ["dense", "streaming", "snapkv"]
    assert evaluation(tmp_path, methods).run() == records
    assert len(lines.read_text().splitlines()) == 3
    other = copy.deepcopy(model("llama"))
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(0.5)
    theirs = evaluation(tmp_path, methods[:1], model=other).run()
    assert theirs[1]["kl"] != records[1]["kl"], "records of another model are not taken over"

    summary = {line["method"]: line for line in make_summary(records)}
    assert summary["dense"]["kl"] == 0
    assert summary["streaming"]["kl"] > 0.01
    assert summary["dense"]["mass"] is None
    assert 0 < summary["streaming"]["mass"] < 1
    assert summary["streaming"]["bytes_per_token"] == 0
    assert summary["streaming"]["selection_scope"] == "kv_head"
    json.dumps(list(summary.values()), allow_nan=False)
    cells = make_cells(records)
    assert {c["task"] for c in cells} == {"needle", "multikey", "variable", "qa", "copy"}
    for cell in cells:
        assert 0 < cell["n"] <= 20
        assert 0 <= cell["low"] <= cell["score"] <= cell["high"] <= 1
        assert not cell["usable"], "a random model answers nothing"


def test_figures_do_not_depend_on_how_many_rows_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = parse_methods(["oracle"], [128], [])
    # All items at once, and seven by seven.
    tasks = ("copy",)
    whole = make_summary(evaluation(tmp_path / "whole", methods, tasks=tasks).run())
    monkeypatch.setattr("hisparse.eval.evaluation.rows_that_fit", lambda model, config: 7)
    parts = make_summary(evaluation(tmp_path / "parts", methods, tasks=tasks).run())
    for line, other in zip(whole, parts, strict=True):
        for name in ("kl", "mass", "oracle_recall", "kept_mean"):
            if line[name] is not None:
                assert other[name] == pytest.approx(line[name], rel=1e-3)


def test_an_item_with_several_answers_has_a_line_for_each(tmp_path: Path) -> None:
    kept = {"correct": [True, False, True, True], "log_probs": [-1.0, -2.0, -3.0, -4.0]}

    def lines(task: str) -> list[tuple[bool, list[float]]]:
        item = Item(task=task, start=0, ids=[0] * 9, scored=[2, 3, 6, 8])
        return [(x["right"], x["log_probs"]) for x in ItemScores(item=item, **kept).lines()]

    assert lines("facts") == [(False, [-1.0, -2.0]), (True, [-3.0]), (True, [-4.0])]
    assert lines("variable") == [(False, kept["log_probs"])], "both parts are one answer"
    (cell,) = make_cells(evaluation(tmp_path, [], tasks=("turns",)).run())
    # A second and a third question after each first: 3 needles and 3 keys are three by three.
    assert cell["task"] == "turns"
    assert cell["n"] in range(4, 10, 2)


def test_keys_and_values_stored_in_eight_bits_are_compared(tmp_path: Path) -> None:
    methods = parse_methods([], [128], ['{"algorithm": "oracle", "kv_cache_dtype": "fp8_e4m3"}'])
    summary = make_summary(evaluation(tmp_path, methods, tasks=("copy",)).run())
    assert summary[1]["kl"] > 0


def test_a_budget_goes_by_either_name() -> None:
    (method,) = parse_methods([], [128], ['{"top_k": 256}'])
    assert method.config.budget == 256


def test_a_configuration_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "quest.json").write_text('{"algorithm": "quest", "budget": 512}')
    (method,) = parse_methods([], [128], [f"@{tmp_path / 'quest.json'}"])
    assert (method.name, method.config.budget) == ("quest", 512)


def test_contexts_beyond_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"context: got 9000000 tokens, expected at most"):
        evaluation(tmp_path, [], contexts=[9000000]).run()


def test_an_algorithm_is_compared_under_several_budgets() -> None:
    found = parse_methods(["oracle", "quest"], [128, 256], [])
    assert [(method.name, method.config.budget) for method in found] == [
        ("oracle", 128),
        ("oracle", 256),
        ("quest", 128),
        ("quest", 256),
    ]


@pytest.mark.parametrize(
    ("algorithms", "configs", "message"),
    [
        (["qest"], [], "unknown algorithm 'qest'; did you mean 'quest'"),
        (["quest", "quest"], [], "method 'quest' is given more than once"),
        (["quest"], ["{"], "--config: not JSON at line 1 column 2"),
        (["quest"], ['{"budgt": 64}'], "unknown config key 'budgt'"),
        (["quest"], ["[1]"], "--config: got [1] (list), expected an object"),
        (["quest"], ['{"algorithm_config": 5}'], "algorithm_config: got 5"),
    ],
)
def test_methods_that_cannot_be(algorithms: list[str], configs: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_methods(algorithms, [128], configs)
    assert message in str(caught.value)
