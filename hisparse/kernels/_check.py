"""Checks of tensors before a launch; cheap enough for the decode path."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError

__all__ = ["check_tensor"]


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    """Raise ``KernelError`` unless dtype and shape fit; None stands for any size."""
    if tensor.dtype != dtype:
        raise KernelError(f"{name}: got dtype {tensor.dtype}, expected {dtype}")
    got = tensor.shape
    fits = len(got) == len(shape) and all(
        want is None or have == want for have, want in zip(got, shape, strict=True)
    )
    if not fits:
        want_text = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelError(f"{name}: got shape {list(got)}, expected [{want_text}]")
