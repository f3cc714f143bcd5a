"""The evaluation on a tiny model: what is judged, and that a run goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.errors import ConfigError
from hisparse.eval import Evaluation, Item, Method, make_cells, make_summary, parse_methods
from hisparse.eval.answer import answer
from hisparse.eval.report import to_markdown
from hisparse.eval.watch import Watch
from hisparse.texts import read_text
from hisparse.transformers import HiSparseCache, disable, enable
from tests.eval.test_documents import Letters
from tests.transformers.hf_models import model, prompt

LENGTH = 300


@pytest.fixture
def net() -> Any:
    made = model("llama")
    enable(made, {"algorithm": "streaming", "budget": 128}, max_length=512)
    yield made
    disable(made)


def items(seed: int) -> list[Item]:
    lengths = {"short": (9, 3), "long": (20, 12)}
    return [
        Item(task=task, ids=prompt(n, seed + n)[0].tolist(), first=first)
        for task, (n, first) in lengths.items()
    ]


def contents(made: Any, **settings: Any) -> tuple[HiSparseCache, Tensor]:
    ids = prompt(LENGTH, 7)
    cache = HiSparseCache(made, settings, max_batch_size=3, max_length=512)
    with torch.no_grad():
        made(ids, past_key_values=cache, logits_to_keep=1)
    return cache, ids


def test_dense_answers_are_those_of_the_model(net: Any) -> None:
    cache, ids = contents(net, **Method.dense().settings)
    found = answer(net, cache, items(1), keep=lambda item: item.task == "long")
    disable(net)
    for got in found:
        whole = torch.cat([ids, torch.tensor([got.item.ids])], dim=1)
        with torch.no_grad():
            log_probs = net(whole).logits[0].log_softmax(-1)
        at = slice(LENGTH + got.item.first - 1, LENGTH + len(got.item.ids) - 1)
        tokens = torch.tensor(got.item.ids[got.item.first :])
        expected = log_probs[at].gather(1, tokens[:, None])[:, 0]
        assert_close(got.log_probs, expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(got.right, log_probs[at].argmax(-1) == tokens)
        assert (got.distributions is not None) == (got.item.task == "long")
        if got.distributions is not None:
            assert_close(got.distributions, log_probs[at], rtol=1e-3, atol=1e-3)


def test_a_right_answer_is_seen_as_right(net: Any) -> None:
    cache, ids = contents(net, **Method.dense().settings)
    disable(net)
    best = net.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, LENGTH:].tolist()
    enable(net, {"budget": 128}, max_length=512)
    right = Item(task="t", ids=best, first=1)
    wrong = Item(task="t", ids=[*best[:-1], best[-1] ^ 1], first=1)
    found = answer(net, cache, [right, wrong], keep=lambda item: False)
    assert found[0].right.tolist() == [True] * 5
    assert found[1].right.tolist() == [True] * 4 + [False]


def test_the_watch_sees_mass_recall_and_hits(net: Any) -> None:
    seen = {}
    for name in ("oracle", "streaming"):
        cache, _ = contents(net, algorithm=name, budget=128)
        watch = Watch({"1x": 8, "all": 100})
        cache.coordinator.observe(watch)
        answer(net, cache, items(2), keep=lambda item: False)
        seen[name] = watch.summary()
    oracle, streaming = seen["oracle"], seen["streaming"]
    assert 1 >= oracle["mass"] > streaming["mass"] > 0
    # Sinks and recents are kept whether or not they are among the best.
    assert oracle["oracle_recall"] > 0.7 > streaming["oracle_recall"]
    assert streaming["adjacent_overlap"] > 0.9
    assert oracle["hit_ratio"]["all"] >= oracle["hit_ratio"]["1x"]
    for found in (oracle, streaming):
        assert 112 < found["kept_mean"] <= found["kept_p95"] <= 128
        assert found["capped"] == 1
    whole, _ = contents(net, algorithm="oracle", budget=512)
    nothing = Watch({})
    whole.coordinator.observe(nothing)
    answer(net, whole, items(2), keep=lambda item: False)
    assert nothing.summary() == {}, "a context within the budget is not selected from"


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
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2
    records = evaluation(tmp_path, methods).run()
    assert [r["method"] for r in records] == ["dense", "streaming", "snapkv"]
    assert evaluation(tmp_path, methods).run() == records
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3

    summary = {line["method"]: line for line in make_summary(records)}
    assert abs(summary["dense"]["kl"]) < 1e-2, "but for the half precision it is kept in"
    assert summary["streaming"]["kl"] > 0.01
    assert summary["dense"]["mass"] is None
    assert 0 < summary["streaming"]["mass"] < 1
    assert summary["streaming"]["bytes_per_token"] == 0
    page = to_markdown(
        {
            "line": "hisparse eval",
            "date": "today",
            "machine": "mine",
            "commit": "abc",
            "versions": {"torch": "2"},
            "model": "tiny",
            "cells": make_cells(records),
            "summary": make_summary(records),
        }
    )
    rows = [line for line in page.splitlines() if line.startswith("| snapkv, 256 of 4000 |")]
    assert len(rows) == 2, "one of scores, one of the summary"
    assert f"{summary['snapkv']['kl']:.3g}" in rows[1]
    cells = make_cells(records)
    assert {c["task"] for c in cells} == {"needle", "multikey", "variable", "copy"}
    for cell in cells:
        assert cell["n"] == 5
        assert 0 <= cell["low"] <= cell["score"] <= cell["high"] <= 1
        assert not cell["usable"], "a random model answers nothing"


def test_scores_and_intervals() -> None:
    def record(document: str, method: str, right: list[bool]) -> dict[str, Any]:
        asked = [{"task": "needle", "right": r, "log_prob": -2.0, "tokens": 2} for r in right]
        rest = [
            {"task": t, "right": True, "log_prob": -3.0, "tokens": 3} for t in ("copy", "continue")
        ]
        return {
            "document": document,
            "context": 100,
            "method": method,
            "algorithm": "quest",
            "budget": 64,
            "kl": 0.5,
            "bytes_per_token": 10.0,
            "items": [*asked, *rest],
        }

    records = [
        record("a", "dense", [True] * 10),
        record("a", "quest", [True] * 4 + [False] * 6),
        record("b", "dense", [True] * 9 + [False]),
        record("b", "quest", [True] * 8 + [False] * 2),
    ]
    cell = next(c for c in make_cells(records) if c["method"] == "quest" and c["task"] == "needle")
    assert cell["score"] == 0.6
    assert cell["dense"] == 0.95
    assert cell["usable"]
    assert cell["n"] == 20
    assert 0.35 < cell["low"] < 0.45
    assert 0.75 < cell["high"] < 0.85
    line = next(s for s in make_summary(records) if s["method"] == "quest")
    assert line["ppl"] == pytest.approx(2.718281828)
    assert line["kl"] == 0.5


@pytest.mark.parametrize(
    ("algorithms", "configs", "message"),
    [
        (["qest"], [], "unknown algorithm 'qest'; did you mean 'quest'"),
        (["quest", "quest"], [], "method 'quest' is given more than once"),
        (["quest"], ["{"], "--config: got '{', which is not JSON"),
        (["quest"], ['{"budgt": 64}'], "unknown config key 'budgt'"),
    ],
)
def test_methods_that_cannot_be(algorithms: list[str], configs: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_methods(algorithms, [128], configs)
    assert message in str(caught.value)
