"""Puts the parts together for one rank of SGLang."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hisparse.engine.build import assemble
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.memory.sizing import resize
from hisparse.sglang.runtime import Session

__all__ = ["build_coordinator"]

logger = logging.getLogger("hisparse")


def build_coordinator(session: Session, model_runner: Any) -> SparseCoordinator:
    """Allocate the device side for the pools that SGLang has built, and connect it all."""
    pool, rows = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
    # --max-total-tokens and --max-running-requests may have lowered what was planned.
    session.sizing = resize(session.sizing, kv_tokens=pool.size, max_requests=rows.size)
    logger.info("hisparse: %s", session.sizing.describe())
    return assemble(
        session,
        pool.host,
        num_slots=rows.req_to_token.shape[0],
        device=torch.device(model_runner.device),
    )
