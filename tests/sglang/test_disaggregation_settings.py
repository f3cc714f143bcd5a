"""What a prefill or decode server makes of its settings, and of a server that does not fit it."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse.algorithms import ALGORITHMS, build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.sglang.features import disaggregation
from hisparse.sglang.features.base import Start
from hisparse.testing import Simulator


def config_in(mode: str, **keys: Any) -> HiSparseConfig:
    config = HiSparseConfig.from_dict(keys)
    args = SimpleNamespace(disaggregation_mode=mode, disaggregation_decode_retraction_backup=None)
    changes = disaggregation.FEATURE.prepare(Start(args=args, config=config, device="cuda"))
    return replace(config, **changes)


@pytest.mark.parametrize("algorithm", [n for n in ALGORITHMS if not ALGORITHMS.get(n).indexer])
def test_a_prefill_server_keeps_no_representations(algorithm: str) -> None:
    found = config_in("prefill", algorithm=algorithm, tail_estimate=True, reuse_layers=2)
    policy = Simulator().policy
    assert build_algorithm(found).representations(policy) == {}
    assert build_algorithm(found).query_window == 0
    assert (dict(found.extensions), found.host_layout) == ({}, "layer_first")


def test_a_prefill_server_keeps_the_keys_of_an_indexer() -> None:
    """They move with K and V, and prompts are attended as the indexer selects."""
    options = {"page_size": 1, "num_sink_pages": 0, "num_recent_pages": 0}
    given = options | {"algorithm_config": {"index_dtype": "float32"}}
    found = config_in("prefill", algorithm="dsa", **given)
    assert found == HiSparseConfig.from_dict(
        given | {"algorithm": "dsa"} | {"host_layout": "layer_first"}
    )


def test_a_decode_server_selects_as_it_is_told() -> None:
    keys: dict[str, Any] = {"algorithm": "quest", "selection_scope": "layer", "tail_estimate": True}
    layout = {"host_layout": "layer_first"}
    assert config_in("decode", **keys) == HiSparseConfig.from_dict(keys | layout)


def test_a_server_that_does_not_fit_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang asks again and again, and then ends the requests."""

    def refuses(manager: Any, bootstrap_addr: str) -> bool:
        raise RuntimeError("Page size mismatch: 16 and 32.")

    hook = disaggregation.around_try_ensure_parallel_info
    with pytest.raises(RuntimeError, match="mismatch"):
        hook(refuses, None, "10.0.0.1:8998")
    monkeypatch.setattr(disaggregation, "current_session", lambda: SimpleNamespace())
    with caplog.at_level(logging.ERROR, "hisparse"):
        assert [hook(refuses, None, "10.0.0.1:8998") for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert record.getMessage() == (
        "hisparse: error: the prefill server at 10.0.0.1:8998 does not fit this server: Page size "
        "mismatch: 16 and 32; its requests end with an error"
    )
    assert hook(lambda manager, bootstrap_addr: True, None, "10.0.0.1:8998")
