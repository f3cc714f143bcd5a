"""`overlap` on a model: what it costs in memory, and what tokens it gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hisparse.algorithms import build_algorithm
from hisparse.cache.last_pages import LastPages
from hisparse.config import HiSparseConfig
from hisparse.engine.build import Plan, Resources, make_plan
from hisparse.errors import ConfigError
from hisparse.transformers import HiSparseCache, disable, enable
from tests.shapes import LLAMA
from tests.transformers.hf_models import SMALL, continuation, model, prompt

SIZES = {"max_batch_size": 4, "max_length": 900}
STREAMED = SMALL | {"reuse_layers": 2, "staging_bytes": 65536}


@pytest.fixture
def net() -> Iterator[Any]:
    made = model("llama")
    enable(made, STREAMED, **SIZES)
    yield made
    disable(made)


def open_cache(net: Any, overlap: str | None) -> HiSparseCache:
    return HiSparseCache(net, STREAMED | {"overlap": overlap}, **SIZES)


def logits(net: Any, overlap: str | None) -> torch.Tensor:
    """Of a prompt in two parts, of steps, and of steps of two forks."""
    cache = open_cache(net, overlap)
    found = []
    with torch.no_grad():
        for ids in (prompt(400, 1), prompt(300, 2), *prompt(9, 3).T[:, None]):
            found.append(net(ids, past_key_values=cache, logits_to_keep=1).logits[0])
        forks = cache.fork(2)
        for ids in prompt(20, 4).T[:, None]:
            found.append(net(ids.expand(2, 1), past_key_values=forks).logits[:, 0])
    return torch.cat(found)


def test_transfers_beside_compute_give_the_same_logits(net: Any) -> None:
    assert torch.equal(logits(net, "transfers"), logits(net, None))


def test_split_attention_gives_nearly_the_same(net: Any) -> None:
    got, expected = logits(net, "attention"), logits(net, None)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert not torch.equal(got, expected)


def test_batches_give_what_each_row_gives_alone(net: Any) -> None:
    ids = prompt(500, 5, batch=3)
    together = continuation(net, ids, 20, open_cache(net, "attention"))
    alone = [continuation(net, row[None], 20, open_cache(net, "attention"))[0] for row in ids]
    assert together == alone


INDEXED = replace(LLAMA, index_head_dim=128)


def plan(**settings: Any) -> Plan:
    config = HiSparseConfig(**settings)
    return make_plan(
        config,
        build_algorithm(config),
        replace(INDEXED, page_size=config.page_size),
        128**-0.5,
        Resources(
            host_bytes=64 << 30,
            device_bytes=16 << 30,
            context_length=32768,
            max_requests=4,
            device_type="cpu",
        ),
    )


def test_memory_is_charged() -> None:
    plain, transfers, split = (plan(overlap=x).sizing for x in (None, "transfers", "attention"))
    assert transfers.staging_bytes == split.staging_bytes == 2 * plain.staging_bytes
    assert transfers.request.request_state_bytes == plain.request.request_state_bytes
    kept = split.request.request_state_bytes - plain.request.request_state_bytes
    # 8 heads, and what a budget of 2,048 tokens holds beside the tail page.
    assert kept == LastPages(32, 8, 127, torch.device("cpu")).num_bytes


def test_memory_that_is_taken_is_what_was_charged(net: Any) -> None:
    for overlap in (None, "transfers", "attention"):
        manager = open_cache(net, overlap).coordinator.manager
        assert manager.staging_bytes == (65536 if overlap is None else 2 * 65536)
        assert (manager.table_bytes > manager.device.table_bytes) == (overlap == "attention")


def test_pages_of_the_last_step_need_room_beside_a_page_that_fills() -> None:
    """DSA ranks the page that is being filled: its selections take all of the budget."""
    settings = {"algorithm": "dsa", "page_size": 1, "num_sink_pages": 0, "num_recent_pages": 0}
    settings |= {"selection_scope": "layer"}
    sizes = {"budget": 512, "device_buffer_size": 512}
    message = (
        "overlap: got 'attention' with device_buffer_size 512, expected at least 513, what dsa "
        "selects and a page, or overlap 'transfers'"
    )
    with pytest.raises(ConfigError, match=message):
        plan(**settings, **sizes, overlap="attention")
    plan(**settings, **sizes, overlap="transfers")
    plan(**settings, **sizes | {"device_buffer_size": 513}, overlap="attention")


@pytest.mark.parametrize("value", [True, "yes"])
def test_an_unknown_overlap_names_the_choices(value: object) -> None:
    with pytest.raises(ConfigError, match='overlap: got .*"transfers" or "attention"'):
        HiSparseConfig(overlap=value)
