"""Triton's operations, imported when the first is asked for."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

logger = logging.getLogger(__name__)

__all__ = ["triton_ops"]


@functools.cache
def triton_ops() -> ModuleType:
    """The Triton operations, or, after a warning, PyTorch's if Triton cannot be imported."""
    try:
        return importlib.import_module("hisparse.kernels.triton")
    except ImportError as error:
        logger.warning("Triton kernels are off, PyTorch's operators do their work: %s", error)
        return importlib.import_module("hisparse.kernels.reference")
