"""Adapters: one attention library per file, with one interface."""

from hisparse.adapters.base import ADAPTERS, Attended, BackendAdapter, TableLimits, merge_attended
from hisparse.adapters.choose import ChosenAdapter, choose_adapter
from hisparse.adapters.torch import TorchAdapter, TritonAdapter

__all__ = [
    "ADAPTERS", "Attended", "BackendAdapter", "ChosenAdapter", "TableLimits", "TorchAdapter",
    "TritonAdapter", "choose_adapter", "merge_attended",
]  # fmt: skip
