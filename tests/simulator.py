"""Moved to ``hisparse.testing``."""

from hisparse.testing import Request, Simulator

__all__ = ["Request", "Simulator"]
