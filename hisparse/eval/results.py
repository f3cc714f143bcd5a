"""Aggregate records: the cells and the summary that ``hisparse eval --json`` prints."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from hisparse.algorithms import build_algorithm
from hisparse.errors import ConfigError
from hisparse.eval.divergence import (
    MIN_DOCUMENTS,
    Record,
    kl,
    mean_interval,
    perplexities,
    ratio_interval,
)
from hisparse.eval.documents import CONTINUE, COPY
from hisparse.eval.method import DENSE, Method, identity
from hisparse.options import check_fields, parse_object, read_text


class RecordKey(NamedTuple):
    """Identifies a record.

    Attributes:
        document: name of the document.
        method: name of the method.
        budget: tokens.
        config: digest of all settings, with defaults, which may change between releases.
    """

    document: str
    method: str
    budget: int
    config: str

    @classmethod
    def of(cls, document: str, method: Method) -> RecordKey:
        """The key of a method on a document."""
        settings = f"{method.config!r} {build_algorithm(method.config)!r}"
        digest = f"{zlib.crc32(settings.encode()):08x}"
        return cls(document, method.name, method.config.budget, digest)


class Records:
    """A file with a line for each document and method.

    Args:
        folder: contains the file.
        name: of the file.
        kind: ``TypedDict`` of a line.
    """

    def __init__(self, folder: Path, name: str = "records.jsonl", kind: type | None = None) -> None:
        self._path = folder / name
        self._kind = kind or RecordLine

    def read(self) -> dict[RecordKey, dict[str, Any]]:
        """Read all records; cut off the last line if it is incomplete.

        Raises:
            ConfigError: the file cannot be read, or a line is not a record.
        """
        if not self._path.exists():
            return {}
        whole, _, torn = read_text(self._path, "--out").rpartition("\n")
        if torn:
            # Counted in the file: reading converts line ends, which an editor may have changed.
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        lines = whole.split("\n") if whole else []
        records = [self._parse(number, line) for number, line in enumerate(lines, 1)]
        return {
            RecordKey(*(record[name] for name in RecordKey._fields)): record for record in records
        }

    def _parse(self, number: int, line: str) -> dict[str, Any]:
        where = f"{str(self._path)!r} line {number}"
        try:
            record = parse_object(line, where, '{"document": "", ...}')
            check_fields(where, record, self._kind)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; delete this line to evaluate its document and method again"
            ) from None
        return record

    def append(self, record: dict[str, Any]) -> None:
        """Append a record, which includes the fields of its key."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class ItemLine(TypedDict):
    """One question, passage or continuation of a document."""

    task: str
    right: bool
    log_probs: list[float]


class RecordLine(TypedDict):
    """A line of ``records.jsonl``; dense attention has no figures of selections."""

    document: str
    method: str
    budget: int
    config: str
    context: int
    algorithm: str
    bytes_per_token: float
    kl: list[float]
    items: list[ItemLine]


class RulerLine(TypedDict):
    """A line of ``ruler.jsonl``."""

    document: str
    method: str
    budget: int
    config: str
    context: int
    task: str
    tokens: int
    algorithm: str
    score: float
    answer: str


#: Tasks on which the dense model scores lower are shown in brackets and do not rank methods.
USABLE = 0.9
#: The same for RULER's tasks.
USABLE_RULER = 0.5
#: Name of the mean over RULER's usable tasks.
MEAN = "mean"
_MEANS = ("mass", "oracle_recall", "kept_mean")


def make_cells(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A cell for each method, budget, context and task: the fraction of correct answers.

    ``low`` and ``high`` are a 95% bootstrap interval over documents, or over the questions in each
    where there are few, see :func:`~hisparse.eval.divergence.ratio_interval`. ``dense`` is the
    score of the dense model on the same questions, and ``usable`` says whether it is at least
    :data:`USABLE`.
    """
    cells = []
    dense = _dense(records)
    for (method, budget, context), group in _grouped(records):
        tasks = sorted({x["task"] for r in group for x in r["items"]} - {CONTINUE})
        for task in tasks:
            parts = _correct(group, task)
            correct = np.concatenate(parts)
            reference = np.concatenate(_correct([dense[r["document"]] for r in group], task)).mean()
            low, high = ratio_interval(parts, [np.ones_like(part) for part in parts])
            cells.append(
                {
                    **identity(method, group[0]["algorithm"], budget),
                    "context": context,
                    "task": task,
                    "score": float(correct.mean()),
                    "low": low,
                    "high": high,
                    "dense": float(reference),
                    "usable": bool(reference >= USABLE),
                    "n": len(correct),
                    "kept_mean": _mean(group, "kept_mean"),
                }
            )
    return cells


def make_ruler_cells(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A cell for each method, budget, context and task of RULER, and one for their mean.

    ``low`` and ``high`` are a 95% bootstrap interval over prompts; so are ``lost_low`` and
    ``lost_high`` of ``lost``, the dense model's score less the method's, in pairs. ``tokens`` are
    the shortest, mean and longest prompt. ``usable`` says whether the dense model scores at least
    :data:`USABLE_RULER`; ``MEAN`` is over the prompts of such tasks. ``scores`` has every prompt's,
    in the order of all other methods' with as many.
    """
    cells = []
    dense = {key: r["score"] for key, r in _dense(records).items()}
    for (method, budget, context), group in _grouped(records):
        tasks: dict[str, list[Record]] = {}
        for r in group:
            tasks.setdefault(r["task"], []).append(r)
        references = {
            task: float(np.mean([dense[r["document"]] for r in part]))
            for task, part in tasks.items()
        }
        usable = [r for r in group if references[r["task"]] >= USABLE_RULER]
        for task, part in {**tasks, **({MEAN: usable} if usable else {})}.items():
            scores = np.array([r["score"] for r in part])
            lost = np.array([dense[r["document"]] for r in part]) - scores
            tokens = [r["tokens"] for r in part]
            low, high = mean_interval(scores)
            lost_low, lost_high = mean_interval(lost)
            reference = float(scores.mean() + lost.mean())
            cells.append(
                {
                    **identity(method, group[0]["algorithm"], budget),
                    "context": context,
                    "task": task,
                    "tokens": [min(tokens), round(float(np.mean(tokens))), max(tokens)],
                    "score": float(scores.mean()),
                    "low": low,
                    "high": high,
                    "lost": float(lost.mean()),
                    "lost_low": lost_low,
                    "lost_high": lost_high,
                    "dense": reference,
                    "usable": reference >= USABLE_RULER,
                    "n": len(part),
                    "kept_mean": _mean(part, "kept_mean"),
                    "scores": [round(float(x), 4) for x in scores],
                }
            )
    return cells


def make_summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A line for each method, budget and context.

    - ``kl``: mean KL divergence from the dense next-token distribution, nats per token;
    - ``ppl``, ``copy_ppl``: perplexity of the following text and of repeated passages;
    - ``ppl_ratio``, ``copy_ppl_ratio``: over the dense model's, on the same documents;
    - ``intervals``: ``[low, high]`` of each of these, 95% bootstrap, ratios resampled in pairs;
    - ``resampled``: the unit of resampling;
    - ``mass``: fraction of exact attention on the tokens kept;
    - ``oracle_recall``: fraction of the n best pages that are among the n selected pages;
    - ``kept_mean``: tokens attended per step and row;
    - ``bytes_per_token``: device memory for representations.
    """
    lines = []
    dense = _dense(records)
    for (method, budget, context), group in _grouped(records):
        estimates = {
            "kl": kl(group),
            **perplexities("ppl", group, dense, CONTINUE),
            **perplexities("copy_ppl", group, dense, COPY),
        }
        lines.append(
            {
                **identity(method, group[0]["algorithm"], budget),
                "context": context,
                "selection_scope": group[0].get("selection_scope"),
                "documents": len(group),
                "resampled": "documents" if len(group) >= MIN_DOCUMENTS else "tokens and passages",
                **{name: x[0] if x else None for name, x in estimates.items()},
                "intervals": {name: list(x[1]) if x else None for name, x in estimates.items()},
                **{name: _mean(group, name) for name in _MEANS},
                "bytes_per_token": group[0]["bytes_per_token"],
            }
        )
    return lines


def _dense(records: Iterable[Record]) -> dict[str, Record]:
    return {r["document"]: r for r in records if r["method"] == DENSE}


def _grouped(records: Iterable[Record]) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Records by method, budget and context, in the order of each group's first record."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = record["method"], record["budget"], record["context"]
        groups.setdefault(key, []).append(record)
    return list(groups.items())


def _correct(records: Iterable[Record], task: str) -> list[np.ndarray]:
    """Whether each answer is right, 1 or 0, of the documents that have some of the task."""
    found = ([x["right"] for x in r["items"] if x["task"] == task] for r in records)
    return [np.array(part, float) for part in found if part]


def _mean(records: Sequence[Record], name: str) -> float | None:
    """Mean over the records; None for dense attention, which selects nothing."""
    values = [r[name] for r in records if name in r]
    return float(np.mean(values)) if values else None
