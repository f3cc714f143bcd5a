"""Parts that are merged, and sinks: a softmax with one more key, whose value is 0."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from hisparse.adapters import Attended, merge_attended
from tests.sizes import sized


def attend(logits: Tensor, values: Tensor) -> Attended:
    """``logits [T, Hq, keys]``, ``values [keys, Dv]``; 0 and -inf without keys."""
    lse = logits.logsumexp(-1)
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return Attended((weights @ values).float(), lse.float())


@settings(max_examples=sized(40, 400), deadline=None)
@given(
    queries=st.integers(1, 4),
    heads=st.integers(1, 6),
    split=st.integers(0, 9),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    level=st.sampled_from([-60.0, 0.0, 60.0]),
    seed=st.integers(0, 2**31),
)
def test_a_sink_is_a_key_whose_value_is_nothing(
    queries: int, heads: int, split: int, spread: float, level: float, seed: int
) -> None:
    """Of nine keys, in two tiles that are merged before; one of them may be empty."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(queries, heads, 9, generator=rng).double() * spread
    values = torch.randn(9, 5, generator=rng).double()
    sinks = (torch.randn(heads, generator=rng) * spread + level).to(torch.bfloat16)
    parts = [attend(logits[..., keys], values[keys]) for keys in (slice(split), slice(split, 9))]
    out = merge_attended(*parts, sinks=sinks).out
    later = merge_attended(merge_attended(*parts), sinks=sinks).out
    assert_close(later, out, rtol=0, atol=0)
    column = sinks.double().expand(queries, heads)[..., None]
    expected = attend(
        torch.cat([logits, column], -1), torch.cat([values, torch.zeros(1, 5).double()])
    )
    assert out.dtype == torch.float32
    assert_close(out, expected.out, rtol=1e-4, atol=1e-5)


def test_a_query_without_keys_attends_the_sink_alone() -> None:
    sinks = torch.tensor([0.5, -2.0])
    empty = Attended(torch.zeros(3, 2, 4), torch.full((3, 2), -torch.inf))
    assert_close(merge_attended(empty, empty, sinks=sinks).out, torch.zeros(3, 2, 4))


def test_the_dtype_of_one_part_s_output_stays() -> None:
    attended = Attended(torch.ones(1, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 2))
    assert merge_attended(attended) is attended
    out = merge_attended(attended, sinks=torch.zeros(2, dtype=torch.bfloat16)).out
    assert out.dtype == torch.bfloat16
    assert (out == 0.5).all()
    assert merge_attended(attended, attended).out.dtype == torch.float32
