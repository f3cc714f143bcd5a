"""Checks of tensors before a launch; cheap enough for the decode path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.errors import KernelError

__all__ = ["check_once", "check_tensor"]

#: Checks that passed, with the dtypes, shapes and devices that passed them.
_passed: set[tuple[object, ...]] = set()
_MOST_PASSED = 4096


def check_once(check: Callable[..., None], *tensors: Tensor) -> None:
    """``check(*tensors)``, unless tensors of these dtypes, shapes and devices passed it before.

    All layers of a step call a kernel with tensors that differ in nothing else.
    """
    key = (check, *[(t.dtype, t.shape, t.device) for t in tensors])
    if key in _passed:
        return
    check(*tensors)
    if len(_passed) >= _MOST_PASSED:
        _passed.clear()
    _passed.add(key)


def check_tensor(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    """Raise ``KernelError`` unless dtype, shape and device fit; None stands for any."""
    if tensor.dtype != dtype:
        raise KernelError(f"{name}: got dtype {tensor.dtype}, expected {dtype}")
    got = tensor.shape
    # One comparison of tuples settles the common case, of a shape that is known in full.
    if got != shape and not _fits(got, shape):
        want_text = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelError(f"{name}: got shape {list(got)}, expected [{want_text}]")
    if device is not None and tensor.device != device:
        raise KernelError(f"{name}: got device {tensor.device}, expected {device}")


def _fits(got: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    # A loop, for a generator takes three times as long.
    if len(got) != len(shape):
        return False
    for have, want in zip(got, shape, strict=True):
        if want is not None and have != want:
            return False
    return True
