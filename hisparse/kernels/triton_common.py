"""What Triton kernels of several families use: operands of products, rounding, a GPU's limits.

A kernel takes tensors with their strides as tuples, and all that it is compiled for as one named
tuple, ``const``. Triton 3.6 reads its fields as plain numbers, so a size of a new tensor gets a
name, ``TOKENS: tl.constexpr = const.tokens``; no field may be called ``value`` or ``type``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.errors import KernelError

#: Of sm_80. GPUs with less (sm_86, sm_89, sm_120) have 99 KiB.
LARGEST_SHARED = 163 << 10
#: Programs that score that a multiprocessor runs at once, and turns that one takes.
_AT_ONCE, _MOST_TURNS = 4, 16
#: Whether kernels run in Triton's interpreter. It multiplies bfloat16 matrices as if they were
#: integers, so kernels multiply them as float32 there.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return LARGEST_SHARED
    about: Any = torch.cuda.get_device_properties(device)
    return int(about.shared_memory_per_block_optin)


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs_of(device: torch.device, tiles: int, requests: int, parts: int) -> int:
    """Programs that take turns at the tiles of one part of a request's row.

    Each loads its queries: it pays to take some turns, unless the device is left idle. A captured
    step has programs for the longest context: no more than one request keeps busy.

    Args:
        device: of the tensors.
        tiles: of the longest row.
        requests: of the step.
        parts: of a request, such as KV heads, which have programs of their own.
    """
    slots = _AT_ONCE * num_processors(device)
    programs = max(slots // (requests * parts), triton.cdiv(tiles, _MOST_TURNS))
    programs = min(programs, triton.cdiv(slots, parts), tiles)
    # Fewer would take more turns.
    return int(triton.cdiv(tiles, triton.cdiv(tiles, programs)))


def require_dense_rows(**tensors: Tensor | None) -> None:
    """Require that kernels can read rows of tensors without a stride; None is passed over.

    Raises:
        KernelError: names the tensor.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise KernelError(
                f"{name}: got stride {tensor.stride(-1)} in its last dimension, expected 1"
            )


def same_places(a: Tensor, b: Tensor) -> bool:
    """Whether rows of both have the same offsets; last dimensions may differ in size."""
    return all(
        size == 1 or one == other
        for size, one, other in zip(a.shape[:-1], a.stride(), b.stride(), strict=False)
    )


def dot_block(size: int) -> int:
    """A size rounded up to one that ``tl.dot`` accepts: a power of two, 16 at least."""
    return max(16, int(triton.next_power_of_2(size)))


def key_blocks(k: Tensor, v: Tensor) -> dict[str, int]:
    """Widths of keys ``[..., Dk]`` and values ``[..., Dv]``, and the blocks that they are read in.

    Values that are the first columns of keys (MLA: 512 of 576) are read with these, once.
    """
    width, value_width = k.shape[-1], v.shape[-1]
    shared = v.data_ptr() == k.data_ptr() and same_places(k, v) and value_width < width
    first = value_width if shared else width
    return {
        "width": width,
        "first": first,
        "first_block": dot_block(first),
        "rest_block": dot_block(width - first) if shared else 0,
        "value_width": value_width,
        "value_block": dot_block(value_width),
    }


@triton.jit
def existing(page, count):
    """The page, or the nearest of the ``count`` pages that a tensor has."""
    return tl.maximum(tl.minimum(page, count - 1), 0)


@triton.jit
def rounded(x, kind: tl.constexpr):
    """Round float32 to the nearest of ``kind``; the interpreter would truncate to bfloat16."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # It converts what is left below a bfloat16 of 0 to another number: nothing may be left.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(kind)


@triton.jit
def cap_logits(logits, CAP: tl.constexpr):
    """``CAP * tanh(logits / CAP)`` by an exponential that cannot overflow; Triton has no tanh."""
    decay = tl.exp(tl.abs(logits) * (-2.0 / CAP))
    capped = CAP * (1.0 - decay) / (1.0 + decay)
    return tl.where(logits < 0, -capped, capped)


def num_parts(query: torch.dtype, narrow: torch.dtype) -> int:
    """Numbers of the dtype ``narrow`` whose sum is a number of a query, to 22 bits at least.

    A product of two bfloat16 or float16 numbers is exact in float32.
    """
    if narrow == torch.float32:
        return 1
    if narrow == torch.float16:
        return 2 if query == torch.float32 else 1
    return {torch.float32: 3, torch.float16: 2, torch.bfloat16: 1}[query]


def reads_e4m3(device: torch.device) -> bool:
    """Whether GPUs such as ``device`` convert e4m3 by an instruction; others read it as bytes."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def from_e4m3(x):
    """Convert e4m3 bytes to float16, times 2^-8, the difference of the exponents' biases."""
    bits = x.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def power_of(largest):
    """Powers of two 2^n and 2^-n, for which ``largest * 2^n`` is in [2^14, 2^15).

    float16 has few exponents. A query under such a power has its largest number near float16's
    end, so that numbers of down to 2^-31 of it keep all 8 bits of a bfloat16.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    up = (254 + 14 - exponent) << 23
    down = (exponent - 14) << 23
    return up.to(tl.float32, bitcast=True), down.to(tl.float32, bitcast=True)


@triton.jit
def dot_parts(keys, query, acc, kind: tl.constexpr, PARTS: tl.constexpr):
    """``acc + keys [N, K] @ query [Q, K].T``, the query split into PARTS numbers of ``kind``.

    Args:
        keys: of ``kind``, or float32 for bfloat16 in the interpreter.
        query: float32.
        acc: ``[N, Q] float32``.
        kind: dtype of the products' factors.
        PARTS: see :func:`num_parts`.
    """
    left = query
    for part in tl.static_range(PARTS):
        now = rounded(left, kind)
        acc = tl.dot(keys, tl.trans(now.to(keys.dtype)), acc, input_precision="tf32x3")
        if part + 1 < PARTS:
            left -= now.to(tl.float32)
    return acc
