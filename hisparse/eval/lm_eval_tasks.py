"""Tasks of ``lm-eval`` by name, with their documents. https://github.com/EleutherAI/lm-evaluation-harness"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from hisparse.errors import ConfigError

__all__ = ["load_tasks"]

#: What lm-eval calls tasks that a model answers in words.
_GENERATED = "generate_until"


def load_tasks(names: Sequence[str], *, tokenizer: str, contexts: Sequence[int]) -> list[Any]:
    """Tasks and groups of tasks with their documents, from a hub where they are not stored yet.

    Args:
        names: what ``lm-eval ls tasks`` lists, or YAML files of tasks.
        tokenizer: folder or hub id; RULER makes documents by it.
        contexts: lengths of RULER's documents, tokens.

    Raises:
        ConfigError: there is no such task, it generates nothing, or its documents are out of reach.
    """
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    about = {"tokenizer": tokenizer, "max_seq_lengths": list(contexts)}
    # An index of all that it defines takes lm-eval some seconds.
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
    # A group stands before the groups that it holds.
    parts = ([*found["groups"].values()][:1] or found["tasks"].values() for found in loaded)
    return [part for found in parts for part in found]


def _load(manager: Any, name: str) -> Any:
    try:
        return manager.load(name)
    except ImportError:
        raise ConfigError(
            f"--tasks: {name!r} needs packages that are not installed: "
            "pip install 'hisparse[lm-eval]'"
        ) from None
    except Exception as error:
        # Many libraries fetch documents, and each raises its own when a hub is out of reach.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--tasks: the documents of {name!r} are out of reach: {reason}; expected a hub that "
            "can be reached, or documents that are stored here already"
        ) from None
