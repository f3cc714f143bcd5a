"""Whether a server is to use hisparse. Imports nothing: every process of every server asks."""

from __future__ import annotations

from typing import Any

__all__ = ["BACKEND", "DRAFT_BACKEND", "is_requested"]

#: Name of the attention backend in SGLang.
BACKEND = "hisparse"

#: Name of the attention backend of a draft model.
DRAFT_BACKEND = "hisparse_draft"


def is_requested(server_args: Any) -> bool:
    """Whether one of SGLang's three attention backend flags names hisparse."""
    flags = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(getattr(server_args, flag, None) == BACKEND for flag in flags)
