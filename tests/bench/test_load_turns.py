"""Conversations: a request whose prompt grows by turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse_bench.load.client import Request, _send_all, _turns


class Client:
    """In place of SGLang's: answers after a pause, and writes down what comes."""

    DatasetRow = RequestFuncInput = SimpleNamespace

    def __init__(self) -> None:
        self.ASYNC_REQUEST_FUNCS = {"sglang": self._send}
        self.log: list[tuple[str, int, int]] = []

    @staticmethod
    async def get_request(rows: Sequence[Any], *_: Any) -> AsyncIterator[Any]:
        for row in rows:
            yield row

    async def _send(self, request_func_input: Any, pbar: Any) -> tuple[int, int]:
        about = request_func_input.prompt[0], len(request_func_input.prompt)
        self.log.append(("sent", *about))
        # The first conversation is the slowest.
        await asyncio.sleep(0.02 / about[0])
        self.log.append(("answered", *about))
        return about


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_turn_waits_for_the_answer_before_it(concurrency: int) -> None:
    client = Client()
    requests = [Request(ids=[first] * 10, output=4, turns=3) for first in (1, 2)]
    turns = [_turns(client, x) for x in requests]
    load = {"concurrency": concurrency}
    outputs, _ = asyncio.run(_send_all(client, "", turns, load, Any))
    expected = [(first, length) for first in (1, 2) for length in (4, 7, 10)]
    assert [(x.prompt[0], x.prompt_len) for each in turns for x in each] == expected
    assert outputs == expected, "outputs are in the order of the rows"
    for first in (1, 2):
        own = [entry for entry in client.log if entry[1] == first]
        steps = [(what, first, length) for length in (4, 7, 10) for what in ("sent", "answered")]
        assert own == steps
    # A conversation holds its place until its last answer.
    alone = client.log[:6] == [entry for entry in client.log if entry[1] == 1]
    assert alone == (concurrency == 1)


def test_a_request_of_one_turn_is_its_prompt() -> None:
    (row,) = _turns(Client(), Request(ids=[5, 6, 7], output=4, arrival_ms=8.0))
    assert (row.prompt, row.output_len, row.timestamp) == ([5, 6, 7], 4, 8.0)
