"""A plugin for tests: SGLang's dummy runs, which it makes on some GPUs before it serves.

FlashInfer's autotune and the warm-up of DeepGEMM make them, of batches without requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("hisparse")


def load() -> None:
    """Entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.runner.base_runner.BaseRunner.warmup",
        _warm_up,
        HookType.AROUND,
    )


def _warm_up(original: Callable[..., None], runner: Any) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from hisparse.sglang.session import require_session

    original(runner)
    buffers, batch_size = runner._autotune_buffers()
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        runner._dummy_run(batch_size, forward_mode_override=mode, buffers=buffers)
        stats = require_session().coordinator.stats()
        logger.info(
            "dummy run: %s of %d tokens by %s, %d bytes written, %d selections",
            mode.name,
            batch_size,
            type(runner).__name__,
            stats.written_bytes,
            stats.selections,
        )
