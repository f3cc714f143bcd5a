"""Splits of a row's attention: how many there are, and how they merge; a merge of two parts."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.triton_common import num_processors, rounded

#: Tokens of a split at least; shorter splits cost more to merge than they save.
_MIN_SPLIT_TOKENS = 128
#: Elements that a program merges at once: 32 registers a thread with 4 warps.
_MERGED_AT_ONCE = 4096
#: Elements of a program that merges two parts: eight a thread.
_PART_ELEMENTS = 1024
#: Counters of a device at least: 64 KiB, more than most configurations ever need.
_MIN_COUNTERS = 1 << 14

#: By device, all that were made: a captured graph holds the address of those it was captured with.
_made: dict[torch.device, list[Tensor]] = {}


class _MergeConstants(NamedTuple):
    """What the kernel that merges two parts is compiled for."""

    lines: int  # outputs that a program merges
    width: int  # Dv, of an output
    block: int  # the same, rounded up to a power of two
    both: bool  # whether there are two parts
    sinks: bool  # whether there are sinks


def merge_attention(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor | None,
    other_lse: Tensor | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.merge_attention`; a program merges 1,024 numbers or a head."""
    rows, queries, width = out.shape
    results = out.new_empty(out.shape, dtype=dtype), lse.new_empty(lse.shape)
    if out.numel() == 0:
        return results
    both = other_out is not None and other_lse is not None
    block = triton.next_power_of_2(width)
    lines = max(1, _PART_ELEMENTS // block)
    parts = [(x, *x.stride()) for x in (out, lse)]
    others = [(x, *x.stride()) for x in (other_out, other_lse) if x is not None]
    _merge_kernel[(triton.cdiv(rows * queries, lines),)](
        tuple(parts),
        # What there is not is not read.
        tuple(others or parts),
        (lse, 0) if sinks is None else (sinks, *sinks.stride()),
        results,
        (rows * queries, queries),
        _MergeConstants(lines, width, block, both, sinks is not None),
    )
    return results


def num_splits(
    device: torch.device, programs: int, at_once: int, most_tokens: int, token_partials: float
) -> int:
    """Splits of each row, without reading the lengths.

    As many as run at the same time: rounded up, a second wave of few programs would run alone. The
    program that merges a block reads no more for it than for its own split.

    Args:
        device: of the tensors.
        programs: programs without splits.
        at_once: programs that a multiprocessor runs at once, at least.
        most_tokens: tokens that a row can have.
        token_partials: bytes of a token's keys and values over those of a program's partial result.
    """
    wanted = at_once * num_processors(device) // max(programs, 1)
    balanced = math.isqrt(int(most_tokens * token_partials))
    return max(1, min(wanted, balanced, -(-most_tokens // _MIN_SPLIT_TOKENS)))


def merged_at_once(elements: int) -> int:
    """Splits that a program merges at once, each with so many elements of a partial result."""
    return max(1, _MERGED_AT_ONCE // elements)


def arrival_counters(count: int, device: torch.device) -> Tensor:
    """At least ``count`` counters, ``[n] int32``, all 0 between launches.

    A kernel that counts leaves them at 0. Kernels that count have to run one after the other, so on
    one stream of a device: the forward's.
    """
    made = _made.setdefault(device, [])
    if not made or made[-1].numel() < count:
        size = max(_MIN_COUNTERS, 1 << (count - 1).bit_length())
        counters = torch.zeros(size, dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Not zero until the graph replays, so only this graph may use them.
            return counters
        made.append(counters)
    return made[-1]


@triton.jit
def range_of_split(length, split, numbers, const: tl.constexpr):
    """The first token of a split, the one after its last, and the oldest that is attended."""
    length, oldest, base = tl.minimum(length, numbers[3]), 0, 0
    if const.window > 0:
        # Steps begin at multiples of their tokens, so that a step's pages are whole.
        oldest = tl.maximum(length - const.window, 0)
        base = oldest // const.tokens * const.tokens
    share = tl.cdiv(tl.cdiv(length - base, numbers[2]), const.tokens) * const.tokens
    begin = base + split * share
    return begin, tl.minimum(begin + share, length), oldest


@triton.jit
def normalized(acc, total, highest):
    """The output and its log-sum-exp: without a token 0 and -inf."""
    some = tl.where(total > 0, total, 1.0)
    acc = acc * tl.where(total > 0, 1.0 / some, 0.0)[:, None]
    return acc, tl.where(total > 0, highest + tl.log(some), -float("inf"))


@triton.jit
def store_attended(to, target, acc, summed, asked, VALUE: tl.constexpr):
    """Write the outputs and log-sum-exps of queries."""
    out, lse = to
    dim = tl.arange(0, acc.shape[1])
    shown = asked[:, None] & (dim < VALUE)[None, :]
    shaped = rounded(acc, out.dtype.element_ty)
    tl.store(out + target[:, None] * VALUE + dim[None, :], shaped, mask=shown)
    tl.store(lse + target, summed, mask=asked)


@triton.jit
def merge_last(
    results,  # out [R, Q, Dv] and lse [R, Q]
    partials,  # of splits: [R, splits, Q, Dv], [R, splits, Q]; those that ended [R, blocks]
    block,  # the row, the first query, and a count of queries that may be beyond the last
    numbers,  # softmax scale, Q, splits, tokens of the page table, N
    const: tl.constexpr,
):
    """Merge the splits of a block of queries in the program that ends last.

    Each program releases what all of its threads stored, and the last one acquires it. The order
    of summation is that of the splits, whichever ends last. The counter is 0 again for the next
    launch.
    """
    partial, lses, arrivals = partials
    row, first, count = block
    queries, splits = numbers[1], numbers[2]
    MEMBERS: tl.constexpr = const.members
    VALUE_BLOCK: tl.constexpr = const.value_block
    arrival = arrivals + row * tl.num_programs(1) + tl.program_id(1)
    tl.debug_barrier()
    ended = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
    if ended == splits - 1:
        member, dim = tl.arange(0, MEMBERS), tl.arange(0, VALUE_BLOCK)
        asked = member < count
        highest = tl.full((MEMBERS,), -float("inf"), tl.float32)
        total = tl.zeros((MEMBERS,), tl.float32)
        acc = tl.zeros((MEMBERS, VALUE_BLOCK), tl.float32)
        for start in range(0, splits, const.merged):
            split = start + tl.arange(0, const.merged)
            there = (split < splits)[:, None] & asked[None, :]
            at = (row * splits + split)[:, None] * queries + first + member[None, :]
            parts = tl.load(lses + at, mask=there, other=-float("inf"))
            x = tl.load(
                partial + at[:, :, None] * const.value_width + dim[None, None, :],
                mask=there[:, :, None] & (dim < const.value_width)[None, None, :],
                other=0.0,
            )
            top = tl.maximum(highest, tl.max(parts, axis=0))
            shift = tl.where(top == -float("inf"), 0.0, top)
            weights = tl.exp(parts - shift[None, :])
            shrink = tl.exp(highest - shift)
            total = total * shrink + tl.sum(weights, axis=0)
            acc = acc * shrink[:, None] + tl.sum(x * weights[:, :, None], axis=0)
            highest = top
        some = tl.where(total > 0, total, 1.0)
        summed = tl.where(total > 0, highest + tl.log(some), -float("inf"))
        target = row * queries + first + member
        store_attended(results, target, acc / some[:, None], summed, asked, const.value_width)
        tl.store(arrival, 0)


@triton.jit
def _load_part(part, line, queries, there, const: tl.constexpr):
    """Outputs ``[lines, channels]`` and log-sum-exps ``[lines]`` of a part, float32."""
    out, out_row, out_query, out_dim = part[0]
    lse, lse_row, lse_query = part[1]
    BLOCK: tl.constexpr = const.block
    row, query, dim = line // queries, line % queries, tl.arange(0, BLOCK)
    source = out + (row * out_row + query * out_query)[:, None] + (dim * out_dim)[None, :]
    seen = there[:, None] & (dim < const.width)[None, :]
    x = tl.load(source, mask=seen, other=0.0).to(tl.float32)
    summed = tl.load(lse + row * lse_row + query * lse_query, mask=there, other=-float("inf"))
    return x, summed


@triton.jit
def _merge_kernel(
    part,  # out [R, Q, Dv] with its strides, and lse [R, Q] with its
    other,  # the same, if there are two parts
    sinks,  # [Q] with its stride, if there are any
    results,  # out [R, Q, Dv] and lse [R, Q], dense
    numbers,  # R * Q, Q
    const: tl.constexpr,
):
    LINES: tl.constexpr = const.lines
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    there = line < numbers[0]
    # A part that is not there is one without keys.
    acc, own = _load_part(part, line, numbers[1], there, const)
    x, lse = _load_part(other, line, numbers[1], there & const.both, const)
    at = sinks[0] + line % numbers[1] * sinks[1]
    logits = tl.load(at, mask=there & const.sinks, other=-float("inf")).to(tl.float32)
    top = tl.maximum(own, lse)
    shift = tl.where(top == -float("inf"), 0.0, top)
    weight, weight_x = tl.exp(own - shift), tl.exp(lse - shift)
    acc, total = acc * weight[:, None] + x * weight_x[:, None], weight + weight_x
    summed = tl.where(total == 0, -float("inf"), shift + tl.log(tl.where(total == 0, 1.0, total)))
    total += tl.exp(logits - shift)
    acc /= tl.where(total == 0, 1.0, total)[:, None]
    store_attended(results, line, acc, summed, there, const.width)
