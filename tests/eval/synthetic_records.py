"""Records as an evaluation writes them, with chosen figures."""

from __future__ import annotations

from typing import Any


def record(
    document: str,
    method: str,
    *,
    kl: list[float],
    continued: list[float],
    copied: list[list[float]] | None = None,
    right: dict[str, list[bool]] | None = None,
    budget: int = 64,
    scope: str = "kv_head",
    cost: float = 10.0,
) -> dict[str, Any]:
    """A line of records.jsonl.

    Args:
        document: its name.
        method: "dense" selects nothing.
        kl: nats, of each token that follows.
        continued: log-probabilities of the same tokens.
        copied: of each passage's tokens.
        right: by task, of each question.
        budget: tokens.
        scope: of the selection.
        cost: bytes a token.
    """
    items = [{"task": "continue", "right": False, "log_probs": continued}]
    items += [{"task": "copy", "right": True, "log_probs": x} for x in copied or [[-0.5, -0.5]]]
    for task, answers in (right or {"needle": [True, True]}).items():
        items += [{"task": task, "right": answer, "log_probs": [-1.0]} for answer in answers]
    found: dict[str, Any] = {
        "document": document,
        "context": 1024,
        "method": method,
        "algorithm": method.partition("(")[0] if method != "dense" else "streaming",
        "budget": budget,
        "bytes_per_token": cost,
        "kl": kl,
        "items": items,
    }
    if method != "dense":
        found |= {
            "selection_scope": scope,
            "mass": 0.75,
            "oracle_recall": 0.5,
            "kept_mean": budget - 8.0,
        }
    return found
