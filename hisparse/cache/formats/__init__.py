"""How keys and values are stored: one file for each format."""

from hisparse.cache.formats.base import KVFormat, StoredPart, format_of, sglang_choices

__all__ = ["KVFormat", "StoredPart", "format_of", "sglang_choices"]
