"""The SGLang plugin. SGLang loads it through the entry point group ``sglang.srt.plugins``.

No other package of hisparse imports SGLang.
"""

__all__ = ["activate"]


def activate() -> None:
    """Add ``hisparse`` to the choices of ``--attention-backend`` and register the hooks."""
    from hisparse.sglang.plugin import register

    register()
