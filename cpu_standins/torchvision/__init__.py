"""Stand-in for torchvision on a CPU-only machine: names that SGLang imports, nothing behind them.

torchvision has no CPU build in the package index that PyTorch's CPU wheel comes from, and the one
that pip finds brings CUDA. Text models never call what is missing here.
"""

__version__ = "0.0.0+hisparse.standin"
