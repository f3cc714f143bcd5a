"""Records what a Hugging Face model selects while it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.eval import models
from hisparse.eval.texts import TEXTS
from hisparse.eval.texts import read_text as read_built_in
from hisparse.options import read_text


def tokenizer_of(model: str) -> Callable[[str], list[int]]:
    """A function that turns a text into a model's token ids.

    Args:
        model: a name, a folder or a hub id.
    """
    from transformers import AutoTokenizer

    encode: Callable[[str], list[int]] = models.load(AutoTokenizer, models.resolve(model)).encode
    return encode


def record_text(
    model: str,
    out: Path,
    *,
    settings: Mapping[str, Any],
    text: Path | None,
    context: int,
    steps: int,
    progress: Callable[[str], None],
) -> Path:
    """Record what a model selects while it reads a text; see :func:`record_model`.

    Args:
        model: a name, a folder or a hub id.
        out: the file.
        settings: keys and values of ``--hisparse-config``.
        text: the text that the model reads; None: the built-in texts.
        context: tokens of the prompt.
        steps: decode steps.
        progress: called with a line for each step.

    Raises:
        ConfigError: a setting is invalid, the text is too short, or no step was sparse.
    """
    if "trace" in settings:
        raise ConfigError('--config: got "trace", expected --out to name the file')
    build_algorithm(HiSparseConfig.from_dict(settings))
    from transformers import AutoModelForCausalLM

    folder = models.resolve(model, progress=progress)
    words = "\n\n".join(map(read_built_in, TEXTS)) if text is None else read_text(text, "--text")
    ids = tokenizer_of(folder)(words)
    if len(ids) < context + steps:
        raise ConfigError(
            f"--context: got {context} and {steps} --steps, expected at most {len(ids)} together, "
            "the tokens of the text; give a longer --text"
        )
    return record_model(
        models.load(AutoModelForCausalLM, folder).eval(),
        ids[: context + steps],
        context=context,
        settings=settings,
        path=out,
        note=f"{model}, {text.name if text else 'built-in texts'}",
        progress=lambda step: progress(f"step {step + 1} of {steps}"),
    )


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
    from hisparse.transformers import disable, enable

    options = {"path": str(path), "note": note}
    cache = enable(model, dict(settings) | {"trace": options}, max_length=len(ids))
    trace: Any = cache.coordinator.extensions["trace"]
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
    return Path(trace.path)
