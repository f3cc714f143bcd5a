"""Names only."""

from torchvision.transforms.v2 import functional

__all__ = ["functional"]
