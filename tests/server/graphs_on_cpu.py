"""A plugin for tests: SGLang's own runner of CUDA graphs on a CPU; graphs are recorded operations.

No graph is replayed while the file EAGER_WHILE exists. Everything is SGLang's but the graphs
themselves: which sizes are captured, how batches are padded, when it calls the attention backend
and with what, and what a model of experts computes.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

BATCH_SIZES = [1, 4]

logger = logging.getLogger("hisparse")

_counts: Counter[str] = Counter()


def _count(kind: str) -> None:
    _counts[kind] += 1
    if _counts[kind] in (1, 10, 100):
        logger.info("%s decode steps: %d", kind, _counts[kind])


class RecordedGraphs:
    """In place of SGLang's ``FullCudaGraphBackend``."""

    def __init__(self, runner: Any) -> None:
        self._graphs: dict[Any, tuple[Any, Any]] = {}

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        key: Any,
        forward: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        from hisparse.testing.recording import record

        for _ in range(2):
            forward()
            if post_warmup_hook is not None:
                post_warmup_hook()
        with record("a decode step") as recording:
            out = forward()
        self._graphs[key] = recording, out

    def can_run(self, forward_batch: Any, key: Any) -> bool:
        return key in self._graphs

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, key: Any, forward_batch: Any, **kwargs: Any) -> Any:
        recording, out = self._graphs[key]
        recording.replay()
        _count("replayed")
        return out

    def cleanup(self) -> None:
        self._graphs.clear()


def load() -> None:
    """Entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hisparse.sglang.features import cuda_graphs

    # The feature is off on a CPU.
    for target, wrapper in cuda_graphs.FEATURE.hooks.items():
        HookRegistry.register(target, wrapper, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
        _capture,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.apply",
        _experts,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.model_executor.runner.eager_runner.EagerRunner._execute_decode",
        _eager,
        HookType.AROUND,
    )


def _eager(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _count("eager")
    return original(*args, **kwargs)


def _experts(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's experts for a CPU read back how many tokens each one gets; those that it has for
    torch.compile do not, nor do those for a GPU.
    """
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native

    return fused_moe_forward_native(layer, dispatch_output)


def _capture(original: Callable[..., Any], *, model_runner: Any) -> Any:
    from unittest.mock import patch

    import msgspec
    import torch
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

    @contextmanager
    def no_stream(stream: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(stream=None)

    model_runner.graph_shared_output = GraphSharedOutput(device="cpu", max_rows=max(BATCH_SIZES))
    torch.cpu.is_current_stream_capturing = lambda: False
    with patch.multiple(
        module,
        resolve_decode_backend=RecordedGraphs,
        get_batch_sizes_to_capture=lambda *_, **__: (BATCH_SIZES, []),
        graph_capture=no_stream,
        get_or_create_global_graph_capture_stream=lambda: None,
        # The recorder has to find all tensors that there are.
        freeze_gc=no_stream,
    ):
        runner = module.DecodeCudaGraphRunner(model_runner)
    eager, can_run_graph = os.environ["EAGER_WHILE"], runner.can_run_graph
    runner.can_run_graph = lambda batch: not os.path.exists(eager) and can_run_graph(batch)
    return msgspec.structs.replace(original(model_runner=model_runner), runner=runner)
