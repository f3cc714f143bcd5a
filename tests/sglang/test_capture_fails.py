"""A capture that fails ends the start with one line that says what to change."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hisparse.errors import AlgorithmError, CapacityError
from hisparse.sglang import install, session
from hisparse.sglang.features import cuda_graphs

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB in all.\nMore"


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    sizing = SimpleNamespace(device_bytes=60 << 30, max_requests=200)
    monkeypatch.setattr(session, "_session", SimpleNamespace(setup=SimpleNamespace(sizing=sizing)))


def capture(error: Exception) -> None:
    """SGLang's capture, which raises ``error``, under the hook."""

    def original(runner: Any) -> None:
        raise error

    cuda_graphs.around_capture(original, None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(OUT_OF_MEMORY),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        AlgorithmError(f"KNorm (knorm), layer 0, score: got {OUT_OF_MEMORY[:50]}, expected none"),
    ],
    ids=["torch", "triton", "algorithm"],
)
def test_a_gpu_that_is_full_is_one_line(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang would advise to disable graphs by a flag of its own, which hisparse sets itself."""
    with caplog.at_level(logging.ERROR), pytest.raises(CapacityError) as raised:
        capture(error)
    (line,) = caplog.messages
    assert line == f"hisparse: error: {raised.value}"
    assert "\n" not in line
    words = ("device_memory: hisparse got 60 GiB", "up to 200 requests", '"cuda_graph": false')
    assert all(word in line for word in (*words, "--max-running-requests", "out of memory"))
    # SGLang gives a RuntimeError lines of its own.
    assert not isinstance(raised.value, RuntimeError)


def test_sglang_s_runner_captures_under_the_hook() -> None:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    def full() -> Any:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    install.install(cuda_graphs.FEATURE.hooks)
    runner = object.__new__(DecodeCudaGraphRunner)
    # What SGLang's capture does first.
    runner.model_context = full
    with pytest.raises(CapacityError, match="device_memory"):
        runner.capture()


def test_another_error_stays_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        capture(RuntimeError("an illegal memory access"))
    assert caplog.messages == []
    with caplog.at_level(logging.ERROR), pytest.raises(AlgorithmError, match="got KeyError"):
        capture(AlgorithmError("KNorm, layer 3, score: got KeyError"))
    (line,) = caplog.messages
    assert line.endswith("the server stops, since it happened while a CUDA graph was captured")


def test_a_server_without_hisparse_keeps_sglang_s_own_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session, "_session", None)
    with pytest.raises(torch.OutOfMemoryError):
        capture(torch.OutOfMemoryError(OUT_OF_MEMORY))
    assert caplog.messages == []
