"""Everything that imports SGLang; loaded by SGLang itself through its plugin entry point."""

from __future__ import annotations

__all__ = ["activate"]


def activate() -> None:
    """Entry point ``sglang.srt.plugins``: make ``--attention-backend hisparse`` known."""
    from hisparse.sglang.plugin import register

    register()
