"""Run tasks of ``lm-eval`` with sparse decoding. https://github.com/EleutherAI/lm-evaluation-harness

As in the server, a prompt is attended densely, and each generated token attends to the pages that
the method selects. Tasks that ``lm-eval`` scores by likelihood only prefill, so they would measure
dense attention under every method: ``load_tasks`` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hisparse.errors import ConfigError
from hisparse.eval.method import Method, identity
from hisparse.transformers import HiSparseCache, disable, enable

#: The output type of tasks whose answers are generated.
_GENERATED = "generate_until"


def load_tasks(names: Sequence[str], *, tokenizer: str, contexts: Sequence[int]) -> list[Any]:
    """Load tasks and groups of tasks, and download documents that are not cached.

    Args:
        names: names that ``lm-eval ls tasks`` lists, or YAML files of tasks.
        tokenizer: folder or hub id; RULER needs it to make documents of a given length.
        contexts: lengths of RULER's documents, tokens.

    Raises:
        ConfigError: a task is unknown, generates nothing, or its documents cannot be downloaded.
    """
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    about = {"tokenizer": tokenizer, "max_seq_lengths": list(contexts)}
    # lm-eval takes seconds to index its tasks.
    manager = TaskManager(include_defaults=len(files) < len(names), metadata=about)
    for name in names:
        if not (Path(name).is_file() if name in files else name in manager.all_tasks):
            raise ConfigError(
                f"--tasks: unknown task {name!r}; expected names that `lm-eval ls tasks` lists, "
                "such as longbench or ruler, or YAML files"
            )
    loaded = [_load(manager, name) for name in names]
    for name, task in (pair for found in loaded for pair in found["tasks"].items()):
        kind = task.get_config("output_type")
        if kind != _GENERATED:
            raise ConfigError(
                f"--tasks: {name!r} is scored by {kind}, which only reads a prompt, densely under "
                f"every method; expected tasks of type {_GENERATED}, such as longbench or ruler"
            )
    # A group comes before the groups inside it.
    parts = ([*found["groups"].values()][:1] or found["tasks"].values() for found in loaded)
    return [part for found in parts for part in found]


def _load(manager: Any, name: str) -> Any:
    try:
        return manager.load(name)
    except ImportError:
        raise ConfigError(
            f"--tasks: got {name!r} without packages that it needs, expected them: "
            "pip install 'hisparse[lm-eval]'"
        ) from None
    except Exception as error:
        # Many libraries download documents, and each raises its own errors.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--tasks: the documents of {name!r} are out of reach: {reason}; expected a hub that "
            "can be reached, or documents that are stored here already"
        ) from None


class HiSparseLM(HFLM):  # type: ignore[misc]
    """The model as ``lm-eval`` calls it, with one method's decode attention.

    Args:
        model: a transformers model with hisparse enabled.
        tokenizer: the model's tokenizer.
        method: configures decode attention.
    """

    def __init__(self, model: Any, tokenizer: Any, method: Method) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1)
        self._method = method
        #: Selections so far, over layers and rows. 0 means that no context exceeded the budget, so
        #: that all were attended densely.
        self.selections = 0

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """Generate from ``context [B, T]`` up to ``max_length`` columns; ``HFLM`` calls it."""
        cache = HiSparseCache(
            self.model,
            self._method.config,
            max_batch_size=context.shape[0],
            max_length=max_length,
        )
        with cache, torch.no_grad():
            out = super()._model_generate(
                context, max_length, stop, past_key_values=cache, **kwargs
            )
            self.selections += cache.stats().selections
        return out


def run_tasks(
    model: Any,
    tokenizer: Any,
    methods: Sequence[Method],
    tasks: Sequence[Any],
    *,
    limit: int | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Score dense attention, then each method.

    Args:
        model: a transformers model; hisparse is enabled for the run and disabled after it.
        tokenizer: the model's tokenizer.
        methods: methods to compare, without dense attention.
        tasks: from ``load_tasks``.
        limit: documents of each task; None for all.
        progress: called with the name of each method as it begins.

    Returns:
        A dictionary for each method, task and metric: ``stderr`` as lm-eval gives it or None,
        ``n`` documents, and ``selections`` (see :class:`HiSparseLM`).
    """
    lines = []
    enable(model, Method.dense().config, max_length=1024)
    try:
        for method in [Method.dense(), *methods]:
            progress(method.name)
            wrapped = HiSparseLM(model, tokenizer, method)
            found = simple_evaluate(
                wrapped,
                tasks=list(tasks),
                limit=limit,
                log_samples=False,
                task_manager=TaskManager(include_defaults=False),
            )
            lines += _lines(method, wrapped.selections, found)
    finally:
        disable(model)
    return lines


def _lines(method: Method, selections: int, found: Any) -> list[dict[str, Any]]:
    lines = []
    for task, scores in found["results"].items():
        for key, score in scores.items():
            metric, _, which = key.partition(",")
            # RULER reports -1 for lengths that were not requested.
            if not which or metric.endswith("_stderr") or score == -1:
                continue
            stderr = scores.get(f"{metric}_stderr,{which}")
            lines.append(
                {
                    **identity(method.name, method.config.algorithm, method.config.budget),
                    "task": task,
                    "metric": metric if which == "none" else key,
                    "score": score,
                    "stderr": stderr if isinstance(stderr, float) else None,
                    "n": scores["sample_len"],
                    "selections": selections,
                }
            )
    return lines
