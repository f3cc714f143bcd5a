"""Records what a Hugging Face model selects while it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.eval import models
from hisparse.eval.texts import TEXTS
from hisparse.eval.texts import read_text as read_built_in
from hisparse.options import parse_object, read_text

#: Tokens of the prompt, decode steps, and tokens attended per step.
DEFAULTS: Final[Mapping[str, int]] = {"context": 4096, "steps": 256, "budget": 512}


def tokenizer_of(model: str) -> Callable[[str], list[int]]:
    """What makes token ids of a text for a model: a name, a folder or a hub id."""
    from transformers import AutoTokenizer

    tokenizer = models.load(AutoTokenizer, models.resolve(model))

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    return tokenize


def record_algorithms(
    model: str | None,
    out: Path,
    *,
    algorithms: Sequence[str] | None,
    config: str | None,
    text: Path | None,
    sizes: Mapping[str, int],
    progress: Callable[[str], None],
) -> Iterator[Path]:
    """Record each algorithm in a file of its own.

    Args:
        model: a name, a folder or a hub id; None: smollm2-135m.
        out: the file; with several algorithms their names are added.
        algorithms: None: that of ``config``, or the default.
        config: further settings, as in ``--hisparse-config``.
        text: the text that the model reads; None: the built-in texts.
        sizes: some of :data:`DEFAULTS`; a budget wins over that of ``config``.
        progress: called with a line for each step.

    Yields:
        Each file, when it is whole.

    Raises:
        ConfigError: a setting is invalid, the text is too short, or no step was sparse.
    """
    each = _settings(algorithms, config, sizes.get("budget"))
    from transformers import AutoModelForCausalLM

    name, sizes = model or "smollm2-135m", {**DEFAULTS, **sizes}
    folder = models.resolve(name, progress=progress)
    words = "\n\n".join(map(read_built_in, TEXTS)) if text is None else read_text(text, "--text")
    ids, needed = tokenizer_of(folder)(words), sizes["context"] + sizes["steps"]
    if len(ids) < needed:
        raise ConfigError(
            f"--context: got {sizes['context']} and {sizes['steps']} --steps, the text has "
            f"{len(ids)} tokens; give a longer --text"
        )
    net = models.load(AutoModelForCausalLM, folder).eval()
    note = f"{name}, {text.name if text else 'built-in texts'}"
    for chosen in each:
        label = chosen["algorithm"]

        def say(step: int, label: str = label) -> None:
            progress(f"{label}: step {step + 1} of {sizes['steps']}")

        yield record_model(
            net,
            ids[:needed],
            context=sizes["context"],
            settings=chosen,
            path=out if len(each) == 1 else out.with_name(f"{out.stem}-{label}{out.suffix}"),
            note=note,
            progress=say,
        )


def _settings(
    algorithms: Sequence[str] | None, config: str | None, budget: int | None
) -> list[dict[str, Any]]:
    """The settings of each algorithm, checked."""
    settings = parse_object(config or "{}", "--config", '{"page_size": 32}')
    if budget is not None:
        settings["budget"] = budget
    elif "top_k" not in settings:  # The other name of budget.
        settings.setdefault("budget", DEFAULTS["budget"])
    names = algorithms or [settings.get("algorithm", HiSparseConfig.algorithm)]
    each = [settings | {"algorithm": name} for name in names]
    for chosen in each:
        if "trace" in chosen:
            raise ConfigError('--config: got "trace", expected --out to name the file')
        build_algorithm(HiSparseConfig.from_dict(chosen))
    return each


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
