"""How keys and values are stored: one file for each format."""

from hisparse.cache.formats.base import (
    LATENT_FORMATS,
    KVFormat,
    StoredPart,
    format_of,
    sglang_choices,
)

__all__ = ["LATENT_FORMATS", "KVFormat", "StoredPart", "format_of", "sglang_choices"]
