"""Checks of tensors before a launch; cheap enough for the decode path."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from hisparse.errors import KernelError

__all__ = ["check_contiguous", "check_device", "check_divides", "check_once", "check_tensor"]

#: Checks that passed, with the dtypes, shapes and devices that passed them.
_passed: set[Hashable] = set()
_MAX_PASSED = 4096

_DTypes = torch.dtype | tuple[torch.dtype, ...]


def check_once(
    check: Callable[..., None], *tensors: Tensor | None, values: tuple[Hashable, ...] = ()
) -> None:
    """``check(*tensors, *values)``, unless such tensors and these values passed it before.

    A step calls a kernel in every layer, with tensors of the same dtypes, shapes and devices. So
    ``check`` may look at nothing else of a tensor.
    """
    kinds = [None if t is None else (t.dtype, t.shape, t.device) for t in tensors]
    key = (check, values, *kinds)
    if key in _passed:
        return
    check(*tensors, *values)
    if len(_passed) >= _MAX_PASSED:
        _passed.clear()
    _passed.add(key)


def check_tensor(
    name: str,
    tensor: Tensor,
    dtype: _DTypes,
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    """Raise ``KernelError`` unless dtype, shape and device fit.

    Args:
        name: of the tensor, for the message.
        tensor: the tensor.
        dtype: the dtype, or those that are allowed.
        shape: sizes; None stands for any size.
        device: the device; None stands for any device.
    """
    if tensor.dtype != dtype and not (isinstance(dtype, tuple) and tensor.dtype in dtype):
        expected = (
            dtype if isinstance(dtype, torch.dtype) else f"one of {', '.join(map(str, dtype))}"
        )
        raise KernelError(f"{name}: got dtype {tensor.dtype}, expected {expected}")
    got = tensor.shape
    # One comparison of tuples decides the common case, a shape without None.
    if got != shape and not _fits(got, shape):
        want_text = ", ".join("any" if want is None else str(want) for want in shape)
        raise KernelError(f"{name}: got shape {list(got)}, expected [{want_text}]")
    if device is not None:
        check_device(name, tensor, device)


def check_device(name: str, tensor: Tensor, *devices: torch.device) -> None:
    """Raise ``KernelError`` unless the tensor is on one of ``devices``."""
    if tensor.device not in devices:
        expected = " or ".join(dict.fromkeys(map(str, devices)))
        raise KernelError(f"{name}: got device {tensor.device}, expected {expected}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ``KernelError`` unless the tensor is contiguous; not a check for :func:`check_once`."""
    if not tensor.is_contiguous():
        got = list(tensor.stride())
        raise KernelError(f"{name}: got strides {got}, expected a contiguous tensor")


def check_divides(name: str, heads: int, query_heads: int) -> None:
    """Raise ``KernelError`` unless a tensor's KV heads divide the query heads."""
    if heads == 0 or query_heads % heads:
        raise KernelError(
            f"{name}: got {heads} heads, expected a divisor of the {query_heads} query heads"
        )


def _fits(got: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    # A loop, for a generator takes three times as long.
    if len(got) != len(shape):
        return False
    for have, want in zip(got, shape, strict=True):
        if want is not None and have != want:
            return False
    return True
