"""Latent attention (MLA), and DeepSeek-V3.2's sparse attention (DSA), against Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checks import counting
from harness import Answer, Server
from hugging_face import Choices, HuggingFace
from planned_bytes import assert_planned
from plugins import make_dummy_runs, make_plugin
from settings import latents
from tiny_models import CONTEXT, INDEX_TOP_K, LAYERS, tiny_model
from torch.testing import assert_close
from workload import tokens

NEW_TOKENS = 24
FLAGS = ("--max-total-tokens", "20000", "--chunked-prefill-size", "256")
#: Compiling a few small functions takes longer than running them.
QUICK = {"TORCHDYNAMO_DISABLE": "1"}
BUDGET = 512
MLA = latents(BUDGET, BUDGET)["deepseek_v2"]
SHORT = [tokens(n, seed=n) for n in (50, 160, 333)]
LONG = tokens(801, seed=801)


@pytest.fixture(scope="module")
def mla(log_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = log_dir / "mla.log"
    plugin = make_dummy_runs(tmp_path_factory.mktemp("dummy-runs"))
    options = {"config": MLA, "env": QUICK, "python_path": [plugin]}
    with Server(tiny_model("deepseek_v2"), log, *FLAGS, **options) as server:
        yield server


@pytest.fixture(scope="module")
def v2() -> HuggingFace:
    return HuggingFace("deepseek_v2")


def test_mla_within_the_budget_is_exact(mla: Server, v2: HuggingFace) -> None:
    """Beside a request that is sparse; in chunks, and with a prefix from the radix cache."""
    expected = [v2.greedy(p, NEW_TOKENS) for p in SHORT]
    answers = mla.generate_many([*SHORT, LONG], NEW_TOKENS)
    assert [a.ids for a in answers[:3]] == expected
    prompts = [tokens(300, seed=1) + tokens(n, seed=n) for n in (20, 100)]
    answers = [mla.generate(p, NEW_TOKENS) for p in prompts]
    assert [a.ids for a in answers] == [v2.greedy(p, NEW_TOKENS) for p in prompts]
    assert [a.cached for a in answers] == [0, 288], "18 whole pages of 16 are shared"


def test_mla_sparse_steps_do_not_depend_on_others(mla: Server) -> None:
    mla.flush_cache()
    with counting(mla, "selected_tokens", "selections", "miss_pages") as counted:
        alone = mla.generate(LONG, NEW_TOKENS)
    selected, selections, misses = counted
    assert selections / LAYERS == NEW_TOKENS - 1
    assert BUDGET - 16 <= selected / selections <= BUDGET
    assert misses > 0
    assert alone.ids == mla.generate_many([*SHORT, LONG], NEW_TOKENS)[3].ids


def test_mla_prefixes_that_are_computed_at_the_same_time(mla: Server) -> None:
    """SGLang keeps one copy. Copies differ by rounding, and "checked" finds a byte that differs."""
    mla.flush_cache()
    prefix = tokens(200, seed=2)
    prompts = [tokens(120, seed=3), *(prefix + tokens(n, seed=n) for n in (10, 15, 20, 25))]
    answers = mla.generate_many(prompts, NEW_TOKENS)
    assert [len(answer.ids) for answer in answers] == [NEW_TOKENS] * len(prompts)


def test_mla_bytes_are_those_of_the_plan(mla: Server) -> None:
    # SGLang runs as many requests as fit.
    requests = int(re.findall(r"max_requests (\d+)", mla.log())[-1])
    assert_planned(mla, tiny_model("deepseek_v2"), MLA, context=CONTEXT, max_requests=requests)


#: The algorithm dsa, writing down what it chooses; a package of its own.
RECORDED = """
    from dataclasses import dataclass
    from itertools import count
    from pathlib import Path

    import torch

    from hisparse.algorithms.dsa import DSA

    COUNT = count()


    @dataclass(frozen=True, kw_only=True)
    class Recorded(DSA):
        folder: str

        def _write(self, layer, slots, positions, rows):
            torch.save((layer, slots, positions, rows), Path(self.folder) / f"{next(COUNT)}.pt")

        def retrieve_topk(self, queries, layer_id, step):
            selection = super().retrieve_topk(queries, layer_id, step)
            positions = step.num_pages.tolist()
            rows = selection.pages[:, 0].tolist()
            for row, position in zip(rows, positions, strict=True):
                if -1 in row:
                    row[row.index(-1)] = position
            self._write(layer_id, step.slots.tolist(), positions, rows)
            return selection

        def select_prefill(self, layer_id, step):
            chosen = super().select_prefill(layer_id, step)
            positions = list(range(step.start, step.start + step.length))
            rows = [range(p + 1) for p in positions] if chosen is None else chosen.tolist()
            self._write(layer_id, [step.slot] * step.length, positions, rows)
            return chosen
"""


def read_choices(folder: Path, lengths: list[int]) -> list[Choices]:
    """What was written down for requests of so many computed tokens, each another number.

    Nothing is written of decode steps that attend all there is.
    """
    found: list[Choices] = []
    current: dict[int, Choices] = {}
    for path in sorted(folder.iterdir(), key=lambda p: int(p.stem)):
        layer, slots, positions, rows = torch.load(path, weights_only=False)
        for slot, position, row in zip(slots, positions, rows, strict=True):
            seen = current.get(slot, {})
            if layer == 0 and ((0, position) in seen or (0, position - 1) not in seen):
                # The slot has changed hands.
                current[slot] = {}
                found.append(current[slot])
            current[slot][layer, position] = [token for token in row if token >= 0]
    ends = {max(p for _, p in choices) + 1: choices for choices in found}
    return [ends.get(length, {}) for length in lengths]


@dataclass(frozen=True)
class Served:
    """What four requests at the same time got, and what each of them attended."""

    prompts: list[list[int]]
    answers: list[Answer]
    choices: list[Choices]


@pytest.fixture(scope="module")
def dsa(log_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    package, folder = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("choices")
    make_plugin(package, "recorded:Recorded", RECORDED, group="hisparse.algorithms")
    options = {"index_dtype": "float32", "folder": str(folder)}
    config = latents(0, 0)["deepseek_v32"] | {"algorithm": "recorded", "algorithm_config": options}
    prompts = [tokens(n, seed=n) for n in (30, 160, 333, 801)]
    model, log = tiny_model("deepseek_v32"), log_dir / "dsa.log"
    with Server(model, log, *FLAGS, config=config, python_path=[package], env=QUICK) as server:
        answers = server.generate_many(prompts, NEW_TOKENS, delay_s=0.1, top_logprobs=1)
        # A prompt whose first part is in the radix cache: its index keys are there as well.
        prompts.append(prompts[3][:640] + tokens(90, seed=5))
        answers.append(server.generate(prompts[4], NEW_TOKENS, top_logprobs=1))
        (misses,) = server.counted("miss_pages")
    assert misses > 0
    assert [a.cached for a in answers] == [0, 0, 0, 0, 640]
    requests = read_choices(folder, [len(p) + NEW_TOKENS - 1 for p in prompts])
    requests[4] |= {(x, p): row for (x, p), row in requests[3].items() if p < 640}
    return Served(prompts, answers, requests)


@pytest.fixture(scope="module")
def v32() -> HuggingFace:
    return HuggingFace("deepseek_v32")


def test_dsa_attends_the_tokens_of_hugging_face(dsa: Served, v32: HuggingFace) -> None:
    """In every layer, for each query of prefill and decoding; the logits follow."""
    for prompt, answer, choices in zip(dsa.prompts, dsa.answers, dsa.choices, strict=True):
        expected = v32.logprobs(prompt + answer.ids[:-1], choices)[len(prompt) - 1 :]
        assert all(difference < 1e-4 for difference in v32.swapped), "more than equal scores"
        assert len(v32.swapped) <= 0.01 * LAYERS * len(prompt)
        assert answer.ids == expected.argmax(-1).tolist()
        of_tokens = expected[range(NEW_TOKENS), answer.ids]
        assert_close(torch.tensor(answer.logprobs), of_tokens, rtol=0, atol=1e-3)


def test_dsa_is_sparse_and_that_matters(dsa: Served, v32: HuggingFace) -> None:
    prompt, answer = dsa.prompts[3], dsa.answers[3]
    rows = [row for (_, p), row in dsa.choices[3].items() if p >= INDEX_TOP_K]
    assert {len(row) for row in rows} == {INDEX_TOP_K}
    dense = HuggingFace("deepseek_v32", index_topk=2048)
    got = torch.tensor(answer.logprobs)
    without = dense.logprobs(prompt + answer.ids[:-1])[len(prompt) - 1 :]
    assert (without[range(NEW_TOKENS), answer.ids] - got).abs().max() > 0.1
