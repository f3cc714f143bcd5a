"""Kernel calls that are recorded and made again; what they write in a model's dtype."""

from __future__ import annotations

import pytest
import torch

from hisparse.errors import KernelError
from hisparse.kernels import gather_pages
from hisparse.kernels.build.cpu import CallRecorder, call_cpu
from hisparse.types import PagedKV


def test_outputs_are_rounded_as_by_pytorch() -> None:
    """Also at ties, for subnormal numbers, and next to the largest one."""
    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int64).to(torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    edges = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 3.4e38, 1e-45, float("nan")])
    numbers = torch.cat([bits.view(torch.float32), ties.view(torch.float32), edges])
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(len(numbers), dtype=dtype)
        call_cpu("write_output", numbers, out)
        torch.testing.assert_close(out, numbers.to(dtype), rtol=0, atol=0, equal_nan=True)


def pages(count: int) -> PagedKV:
    return PagedKV(torch.randn(count, 1, 4, 8), torch.randn(count, 1, 4, 8))


def lists(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.int32)


def test_calls_are_made_again_with_other_inputs() -> None:
    """Inputs may lie in one tensor; one of another shape, or with V apart from K, is refused."""
    source, target = pages(6), pages(6)
    of_step = torch.stack([lists(1, 2, -1), lists(3, 4, -1)])
    lasting = {x.untyped_storage().data_ptr() for x in target}
    recorder = CallRecorder((source.k, source.v, of_step), lasting)
    with recorder:
        gather_pages(source, of_step[0], target, of_step[1], impl="cpu")
    run = recorder.joined
    assert run is not None
    other, places = pages(6), torch.stack([lists(5, 0, 1), lists(0, 2, 5)])
    assert run(other.k, other.v, places)
    for into, of in zip(target, other, strict=True):
        assert torch.equal(into[[0, 2, 5]], of[[5, 0, 1]])
    before = target.k.clone()
    assert not run(other.k[:5], other.v, places)
    assert not run(other.k, other.v, places.long())
    assert not run(other.k, other.v.transpose(2, 3).contiguous().transpose(2, 3), places)
    assert torch.equal(target.k, before)
    with pytest.raises(KernelError, match="got 6"):
        run(other.k, other.v, torch.full_like(places, 6))


def test_values_that_were_a_part_of_keys_have_to_be_that_again() -> None:
    """Only keys are moved then."""
    (k, other), into, list_ = torch.randn(2, 3, 1, 4, 8), torch.zeros(3, 1, 4, 8), lists(0, 2)
    target = PagedKV(into, into[..., :4])
    with CallRecorder((k, k[..., :4], list_), {into.untyped_storage().data_ptr()}) as recorder:
        gather_pages(PagedKV(k, k[..., :4]), list_, target, list_, impl="cpu")
    run = recorder.joined
    assert run is not None
    assert not run(other, k[..., :4], list_)
    assert run(other, other[..., :4], list_)
    assert torch.equal(into[[0, 2]], other[[0, 2]])


@pytest.mark.parametrize("computed", ["operator", "numpy", "new"])
def test_what_else_computes_is_not_recorded(computed: str) -> None:
    source, target, list_ = pages(3), pages(3), lists(0, 2)
    lasting = {x.untyped_storage().data_ptr() for x in (*source, *target)}
    with CallRecorder((list_,), lasting) as recorder:
        if computed == "operator":
            source.k.mul_(2)
        elif computed == "numpy":
            list_ = torch.from_numpy(list_.numpy()[:, ::-1].copy())
        else:
            source = PagedKV(torch.empty(3, 1, 4, 8), source.v)
        gather_pages(source, list_, target, list_, impl="cpu")
    assert recorder.joined is None
