"""Load tasks of ``lm-eval`` by name. https://github.com/EleutherAI/lm-evaluation-harness"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from hisparse.errors import ConfigError

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
    # Indexing its own tasks takes lm-eval some seconds.
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
            f"--tasks: {name!r} needs packages that are not installed: "
            "pip install 'hisparse[lm-eval]'"
        ) from None
    except Exception as error:
        # Many libraries download documents, and each raises its own errors.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--tasks: the documents of {name!r} are out of reach: {reason}; expected a hub that "
            "can be reached, or documents that are stored here already"
        ) from None
