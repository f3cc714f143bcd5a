"""The fingerprint of a transformers model."""

from __future__ import annotations

from typing import Any

from hisparse.engine.fingerprint import fingerprint, model_settings

__all__ = ["model_fingerprint"]


def model_fingerprint(model: Any) -> str:
    """A fingerprint of a model's configuration and weights; see :func:`fingerprint`.

    Args:
        model: a transformers model, or its configuration.

    Returns:
        32 hexadecimal digits; "" for a configuration, which has no weights.
    """
    if not hasattr(model, "named_parameters"):
        return ""
    return fingerprint(model_settings(model.config), model.named_parameters())
