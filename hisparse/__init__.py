"""Sparse attention for SGLang: the KV cache in host memory, a small working set on the device."""

from hisparse.config import HiSparseConfig
from hisparse.errors import CapacityError, ConfigError, HiSparseError, KernelError, PluginError

__all__ = [
    "CapacityError",
    "ConfigError",
    "HiSparseConfig",
    "HiSparseError",
    "KernelError",
    "PluginError",
    "__version__",
]

__version__ = "0.1.0"
