"""Tasks of ``lm-eval``, generated through hisparse. https://github.com/EleutherAI/lm-evaluation-harness

A prompt is attended densely and exactly, as in the server, and every generated token over what the
method selects. What ``lm-eval`` scores by likelihood is only a prefill, so it would measure dense
attention whatever the method: ``load_tasks`` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hisparse.eval.method import Method
from hisparse.transformers import HiSparseCache, disable, enable

__all__ = ["HiSparseLM", "run_tasks"]


class HiSparseLM(HFLM):  # type: ignore[misc]
    """A model that ``lm-eval`` asks, with the decode attention of one method.

    Args:
        model: of transformers, enabled.
        tokenizer: of it.
        method: what attends.
    """

    def __init__(self, model: Any, tokenizer: Any, method: Method) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1)
        self._method = method
        #: What the method selected so far, over layers and rows; 0: all contexts were within the
        #: budget, and attended densely.
        self.selections = 0

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        """Called by ``HFLM`` for each batch: ``context [B, T]``, ``max_length`` columns in all."""
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
    """Scores of each method, dense first.

    Args:
        model: of transformers, not enabled yet; it is as it was afterwards.
        tokenizer: of it.
        methods: what is compared; dense comes on top.
        tasks: from ``load_tasks``.
        limit: documents of each task; None: all.
        progress: told the name of each method that begins.

    Returns:
        A line for each method, task and metric: ``stderr`` as lm-eval gives it or None, ``n``
        documents, and ``selections``, see :class:`HiSparseLM`.
    """
    lines = []
    enable(model, Method.dense().config, max_length=1024)
    try:
        for method in [Method.dense(), *methods]:
            progress(method.name)
            asked = HiSparseLM(model, tokenizer, method)
            found = simple_evaluate(
                asked,
                tasks=list(tasks),
                limit=limit,
                log_samples=False,
                task_manager=TaskManager(include_defaults=False),
            )
            lines += _lines(method, asked.selections, found)
    finally:
        disable(model)
    return lines


def _lines(method: Method, selections: int, found: Any) -> list[dict[str, Any]]:
    lines = []
    for task, scores in found["results"].items():
        for key, score in scores.items():
            metric, _, which = key.partition(",")
            # RULER gives -1 for lengths that it was not asked for.
            if not which or metric.endswith("_stderr") or score == -1:
                continue
            stderr = scores.get(f"{metric}_stderr,{which}")
            lines.append(
                {
                    "method": method.name,
                    "algorithm": method.config.algorithm,
                    "budget": method.config.budget,
                    "task": task,
                    "metric": metric if which == "none" else key,
                    "score": score,
                    "stderr": stderr if isinstance(stderr, float) else None,
                    "n": scores["sample_len"],
                    "selections": selections,
                }
            )
    return lines
