"""Records what a Hugging Face model selects while it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hisparse.engine.extensions.trace import Trace
from hisparse.errors import ConfigError
from hisparse.transformers import disable, enable


def record_model(
    model: Any,
    ids: Sequence[int],
    *,
    context: int,
    settings: Mapping[str, Any],
    path: Path,
    note: str,
    progress: Callable[[int], None] = lambda _step: None,
) -> Path:
    """Prefill a text, then feed the rest token by token, as decode steps.

    Args:
        model: a transformers model, hisparse not enabled yet.
        ids: token ids.
        context: tokens of the prefill; each later token is a step.
        settings: keys and values of the configuration, but ``trace``.
        path: the file; a number is added if it exists.
        note: text for the file.
        progress: called after each step with its number, from 0.

    Returns:
        The file.

    Raises:
        ConfigError: a setting is invalid, or no step was sparse.
    """
    options = {"path": str(path), "note": note}
    cache = enable(model, dict(settings) | {"trace": options}, max_length=len(ids))
    (trace,) = (x for x in cache.coordinator.extensions if isinstance(x, Trace))
    tokens = torch.tensor([list(ids)], device=model.device)
    try:
        with torch.no_grad():
            model(tokens[:, :context], past_key_values=cache, logits_to_keep=1)
            for step, at in enumerate(range(context, len(ids))):
                model(tokens[:, at : at + 1], past_key_values=cache, logits_to_keep=1)
                progress(step)
    finally:
        trace.close()
        disable(model)
    if not cache.stats().extensions["trace_steps"]:
        trace.path.unlink()
        raise ConfigError(
            f"--context: got {context} tokens, which the budget holds, so that nothing was "
            "selected; expected a longer context or a smaller --budget"
        )
    return trace.path
