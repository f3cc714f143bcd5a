"""Answers the requests of a batch with an error, so that the server can go on without them."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

__all__ = ["fail_requests", "reason_to_stop"]


def reason_to_stop(requests: Sequence[Any]) -> str | None:
    """Why the server cannot go on after a forward of these requests failed; None: it can.

    Args:
        requests: SGLang's ``Req`` of the batch.
    """
    from sglang.srt.distributed.parallel_state import get_world_group

    if get_world_group().world_size > 1:
        return "other ranks go on with the batch"
    return None if requests else "the forward is not of requests"


def fail_requests(requests: Sequence[Any], message: str) -> None:
    """End requests with HTTP 500 as SGLang ends aborted ones; nothing of them is kept.

    The radix cache must not get the K, V and representations that the failed forward has left out.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for request in requests:
        if request.finished():
            continue
        request.skip_radix_cache_insert = True
        # What the failed forward samples is not part of the answer.
        request.finished_len = len(request.output_ids)
        request.to_finish = FINISH_ABORT(
            message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
        )
