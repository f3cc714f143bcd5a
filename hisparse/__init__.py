"""Sparse attention for SGLang: the KV cache in host memory, a small working set on the device."""

from hisparse.config import HiSparseConfig
from hisparse.errors import (
    AlgorithmError,
    CapacityError,
    ConfigError,
    HiSparseError,
    KernelError,
    PluginError,
)

__all__ = [
    "AlgorithmError", "CapacityError", "ConfigError", "HiSparseConfig", "HiSparseError",
    "KernelError", "PluginError", "__version__",
]  # fmt: skip

__version__ = "0.1.0"
