"""Algorithms that select by the last queries of a prompt."""

from collections.abc import Callable
from typing import Any

from hisparse.sglang.features.base import PROMPT_QUERIES, Feature
from hisparse.sglang.session import current_session


def _around_compute_max_prefix_len(
    original: Callable[..., int], request: Any, input_len: int
) -> int:
    """Shorten the radix cache hit so that an algorithm sees the last queries of a prompt."""
    session = current_session()
    max_prefix_len = original(request, input_len)
    if session is None:
        return max_prefix_len
    return max(0, min(max_prefix_len, input_len - session.setup.algorithm.query_window))


class PromptQueries(Feature):
    """The radix cache leaves the queries to be computed."""

    name = "prompt_queries"
    serves = (PROMPT_QUERIES,)
    hooks = {
        "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len": (
            _around_compute_max_prefix_len
        )
    }


FEATURE = PromptQueries()
