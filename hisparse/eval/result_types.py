"""Types of what an evaluation writes: results, and the records that they are made of."""

from __future__ import annotations

from typing import Literal, TypedDict


class ResultCell(TypedDict):
    """A method's answers to one task; see :func:`hisparse.eval.make_cells`."""

    method: str
    budget: int | None
    context: int
    task: str
    score: float
    low: float
    high: float
    dense: float
    usable: bool
    n: int
    kept_mean: float | None


class SummaryLine(TypedDict):
    """The other figures of a method; see :func:`hisparse.eval.make_summary`."""

    method: str
    algorithm: str
    budget: int | None
    context: int
    selection_scope: str | None
    documents: int
    resampled: str
    kl: float
    kl_ratio: float | None
    ppl: float | None
    ppl_ratio: float | None
    copy_ppl: float | None
    copy_ppl_ratio: float | None
    intervals: dict[str, list[float] | None]
    mass: float | None
    oracle_recall: float | None
    adjacent_overlap: float | None
    kept_mean: float | None
    kept_p95: float | None
    capped: float | None
    kept_by_head: list[list[float] | None] | None
    hit_ratio: dict[str, float] | None
    bytes_per_token: float


class Result(TypedDict):
    """The object that ``hisparse eval --json`` prints of its own tasks."""

    command: Literal["eval"]
    line: str
    date: str
    machine: str
    versions: dict[str, str]
    commit: str
    model: str
    model_source: str | None
    context: list[int]
    cells: list[ResultCell]
    summary: list[SummaryLine]


class Item(TypedDict):
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
    items: list[Item]
