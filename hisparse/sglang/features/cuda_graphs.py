"""CUDA graphs of decode steps: which steps they serve, and what to change if a capture fails."""

import logging
from collections.abc import Callable
from typing import Any

from hisparse.engine.capabilities import not_captured
from hisparse.errors import AlgorithmError, CapacityError, one_line
from hisparse.sglang.features.base import CUDA_GRAPHS, Feature, Start
from hisparse.sglang.session import current_session, errors_logged
from hisparse.units import format_bytes

logger = logging.getLogger("hisparse")


def around_can_run_graph(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
    """Let a decode step run eagerly if the captured one cannot serve its requests."""
    session = current_session()
    can_run = original(runner, forward_batch)
    return can_run if session is None else can_run and session.backend.can_replay(forward_batch)


def around_capture(original: Callable[..., None], runner: Any) -> None:
    """Say in one line what to change if a capture of decode steps ends the start."""
    session = current_session()
    try:
        original(runner)
    except (RuntimeError, AlgorithmError) as error:
        # Of PyTorch, of Triton, or of an algorithm that one of them ended.
        if session is not None and "out of memory" in str(error):
            sizing = session.setup.sizing
            with errors_logged():
                raise CapacityError(
                    f"device_memory: hisparse got {format_bytes(sizing.device_bytes)}, and "
                    f"the GPU ran out of memory while SGLang captured decode steps of up to "
                    f"{sizing.max_requests} requests; lower device_memory or "
                    f'--max-running-requests, or set "cuda_graph": false ({one_line(error)})'
                ) from error
        if isinstance(error, AlgorithmError):
            logger.error(
                "hisparse: error: %s; the server stops, since it happened while a CUDA graph was "
                "captured",
                error,
            )
        raise


class CudaGraphs(Feature):
    """SGLang's decode runner replays captured steps of the attention backend."""

    name = "cuda_graphs"
    serves = (CUDA_GRAPHS,)
    captures_steps = True
    hooks = {
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
        ".can_run_graph": around_can_run_graph,
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
        ".capture": around_capture,
    }

    def is_on(self, start: Start) -> bool:
        """By default too, where steps can be captured."""
        return not_captured(start.config, start.device) is None


FEATURE = CudaGraphs()
