"""When the server can go on after a failed forward, and what it does to the requests."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from sglang.srt.distributed import parallel_state

from hisparse.errors import AlgorithmError
from hisparse.sglang import backend as module
from hisparse.sglang.backend import HiSparseAttnBackend


def request(rid: str = "a", *, finished: bool = False) -> Any:
    return SimpleNamespace(
        rid=rid,
        finished=lambda: finished,
        output_ids=[5, 6],
        finished_len=None,
        to_finish=None,
        skip_radix_cache_insert=False,
    )


class Request:
    """As SGLang's ``Req``: equal only to itself."""

    def __init__(self, rid: str) -> None:
        self.rid = rid


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The group of all ranks: one."""
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: group)
    return group


def test_a_server_of_one_rank_goes_on() -> None:
    assert module._reason_to_stop([request("a"), request("b")]) is None


def test_a_server_stops_where_something_would_be_left_behind(world: SimpleNamespace) -> None:
    assert module._reason_to_stop([]) == "the forward is not of requests"
    world.world_size = 2
    assert module._reason_to_stop([request()]) == "other ranks go on with the batch"


def test_failed_requests_end_with_an_error_and_keep_nothing() -> None:
    running, ended = request(), request(finished=True)
    module._fail_requests([running, ended], "what went wrong")
    assert running.skip_radix_cache_insert
    assert running.finished_len == 2
    assert running.to_finish.to_json() == {
        "type": "abort",
        "message": "what went wrong",
        "status_code": 500,
        "err_type": "InternalServerError",
    }
    assert ended.to_finish is None


def test_a_batch_is_skipped_if_all_its_requests_have_failed() -> None:
    backend = HiSparseAttnBackend.__new__(HiSparseAttnBackend)
    failed, other = Request("a"), Request("b")
    backend._session = SimpleNamespace(requests=[failed])
    backend._failed_requests = WeakSet()
    assert not backend._all_have_failed()
    backend._failed_requests.add(failed)
    assert backend._all_have_failed()
    backend._session.requests = [failed, other]
    assert not backend._all_have_failed()
    backend._session.requests = []
    assert not backend._all_have_failed()


def test_a_server_that_stops_says_why_in_one_line(
    world: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    world.world_size = 2
    backend = HiSparseAttnBackend.__new__(HiSparseAttnBackend)
    backend._session = SimpleNamespace(requests=[request()])
    backend._spec = SimpleNamespace(num_kv_heads=1, num_q_heads=1, head_dim=4, v_head_dim=4)
    backend._spec.attention = "GQA"
    backend._layers, backend._in_graph, backend.num_tokens = {0: 0}, False, 1
    backend._scale = 0.5

    def attention(*args: Any) -> None:
        raise AlgorithmError("Mine (mine), layer 0, retrieve_topk: got None, expected a selection")

    backend.coordinator = SimpleNamespace(attention=attention)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=1, v_head_dim=4, scaling=0.5)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
    with caplog.at_level(logging.ERROR), pytest.raises(AlgorithmError, match="Mine"):
        backend.forward(*(torch.zeros(1, 4) for _ in range(3)), layer, batch)
    assert caplog.messages == [
        "hisparse: error: Mine (mine), layer 0, retrieve_topk: got None, expected a selection; "
        "the server stops, since other ranks go on with the batch"
    ]
    assert backend._session.requests[0].to_finish is None
