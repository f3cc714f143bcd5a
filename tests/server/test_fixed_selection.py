"""With a selection that is known, the server's logprobs are those of transformers in float64 over
exactly those positions. The algorithm comes from a package of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Server
from hugging_face import load
from parts import MORE, few
from plugins import make_plugin
from tiny_models import tiny_model
from torch import Tensor
from workload import tokens

PAGE = 16
BUDGET = 128
SINKS, RECENT = 1, 2
WIDTH = BUDGET // PAGE - 1

_FIRST_PAGES = '''
    """Keeps the first pages: the score falls with the page index."""

    from dataclasses import dataclass

    import torch

    from hisparse.algorithms import PageScoreAlgorithm


    @dataclass(frozen=True, kw_only=True)
    class FirstPages(PageScoreAlgorithm):
        def summary_shape(self, kv):
            return (1,)

        def summarize(self, keys, mask):
            return keys.new_zeros(keys.shape[0], 1)

        def score(self, query, summaries):
            falling = -torch.arange(summaries.shape[1], dtype=torch.float32)
            return falling.expand(query.shape[0], query.shape[1], -1)
'''


def attended(length: int) -> list[int]:
    """Positions that a decode step attends when the context has ``length`` tokens."""
    full = (length - 1) // PAGE
    pages = set(range(min(full, WIDTH)))
    if full > WIDTH:
        pages = set(range(WIDTH - RECENT)) | set(range(full - RECENT, full))
    chosen = [page * PAGE + i for page in sorted(pages) for i in range(PAGE)]
    return chosen + list(range(full * PAGE, length))


@pytest.fixture(
    scope="module", params=few(["kv_head", "layer", "query_head"], "kv_head", others=MORE)
)
def server(
    request: pytest.FixtureRequest, log_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    scope = request.param
    folder = make_plugin(
        tmp_path_factory.mktemp("algorithm"),
        "first_pages:FirstPages",
        _FIRST_PAGES,
        group="hisparse.algorithms",
    )
    config = {
        "algorithm": "first_pages",
        "selection_scope": scope,
        "budget": BUDGET,
        "num_sink_pages": SINKS,
        "num_recent_pages": RECENT,
        "host_memory": "1GiB",
        "device_memory": "32MB",
    }
    flags = ("--max-total-tokens", "20000", "--max-running-requests", "8")
    log = log_dir / f"fixed-{scope}.log"
    with Server(tiny_model("llama"), log, *flags, config=config, python_path=[folder]) as server:
        yield server


@torch.no_grad()
def logprobs(net: Any, ids: list[int], first: int) -> Tensor:
    """``[len(ids), V]``, of the token after each; rows from ``first`` on attend a selection."""
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for row in range(first, len(ids)):
        mask[row] = False
        mask[row, attended(row + 1)] = True
    return net(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0].log_softmax(-1)


def test_logprobs_are_those_of_float64_over_the_selected_positions(server: Server) -> None:
    net = load(tiny_model("llama")).double()
    prompts = [tokens(n, seed=n + 600) for n in (40, 127, 300, 1001)]
    worst = sparse_effect = 0.0
    for prompt, answer in zip(
        prompts, server.generate_many(prompts, 40, top_logprobs=20), strict=True
    ):
        ids = prompt + answer.ids[:-1]
        expected = logprobs(net, ids, first=len(prompt))[len(prompt) - 1 :]
        dense = logprobs(net, ids, first=len(ids))[len(prompt) - 1 :]
        for step, found in enumerate(answer.top_logprobs):
            where = torch.tensor(list(found))
            got = torch.tensor(list(found.values()), dtype=torch.float64)
            worst = max(worst, float((got - expected[step, where]).abs().max()))
            sparse_effect = max(sparse_effect, float((got - dense[step, where]).abs().max()))
        assert answer.ids == expected.argmax(-1).tolist()
    assert worst < 1e-4
    assert sparse_effect > 0.1, "dense attention gives the same: the test shows nothing"
