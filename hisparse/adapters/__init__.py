"""Adapters to attention libraries."""

from hisparse.adapters.base import ADAPTERS, Attended, BackendAdapter, merge_attended
from hisparse.adapters.torch import TorchAdapter

__all__ = ["ADAPTERS", "Attended", "BackendAdapter", "TorchAdapter", "merge_attended"]
