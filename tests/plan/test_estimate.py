"""The estimate of a time per token: it follows from bytes, launches and the times of kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.algorithms import entry_bytes
from hisparse.algorithms.dsa import DSA
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.build import choose_selection
from hisparse.plan.estimate import GPUS, Hardware, TokenEstimate, estimate_token
from hisparse.plan.kernel_costs import instructions_us
from hisparse.types import KVSpec
from tests.shapes import LLAMA, TOKEN_BYTES

ROOT = Path(__file__).parents[2]
LONG = 131072
H100, H200 = GPUS["h100"], GPUS["h200"]
#: DeepSeek-V3's latents.
DEEPSEEK = KVSpec(
    **{"num_layers": 61, "num_q_heads": 128, "num_kv_heads": 1, "head_dim": 576},
    **{"v_head_dim": 512, "attention": "MLA"},
    dtype=torch.bfloat16,
    page_size=16,
)
MEASURED = ROOT / "bench" / "results" / "2026-11-26-gpu-h200-2b8255a.json"


def attention(
    batch: int,
    hit_ratio: float = 0.85,
    *,
    context: int = LONG,
    spec: KVSpec = LLAMA,
    hardware: Hardware = H100,
    weight_bytes: int = 0,
    **settings: Any,
) -> TokenEstimate:
    """The estimate for Llama-3.1-8B, by default only of attention."""
    config, sizes = HiSparseConfig(**settings), {"context": context, "batch": batch}
    return estimate_token(
        config, spec, hardware, **sizes, hit_ratio=hit_ratio, weight_bytes=weight_bytes
    )


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=0.15)


def dense_ratios(**options: Any) -> list[float]:
    """Dense attention's time over hisparse's at 1, 8 and 32 requests, with 5% misses."""
    found = [attention(batch, 0.95, **options) for batch in (1, 8, 32)]
    return [each.dense_ms / each.hisparse_ms for each in found]


def first_gain(hardware: Hardware, algorithm: str = "sketch") -> int:
    """Tokens, in units of 1,024, from which one request is faster than with dense attention."""
    for thousands in range(8, LONG // 1024):
        options = {"context": 1024 * thousands, "algorithm": algorithm}
        found = attention(1, 0.95, hardware=hardware, **options)
        if found.hisparse_ms < found.dense_ms:
            return thousands
    raise AssertionError(f"{algorithm} is slower up to {LONG} tokens")


def met(hardware: Hardware) -> list[bool]:
    """Whether ``sketch`` is as fast as it shall be, by docs/sizing.md."""
    ratios = zip(dense_ratios(hardware=hardware), (2.2, 5, 6), strict=True)
    return [*(ratio >= aim for ratio, aim in ratios), first_gain(hardware) <= 32]


def test_the_default_wins_on_an_h100() -> None:
    assert met(H100) == [True] * 4


@pytest.mark.parametrize(("batch", "dense_us"), [(1, 179), (8, 1430)])
def test_dense_attention_of_the_review(batch: int, dense_us: float) -> None:
    """FlashInfer's time in a layer on an H100."""
    assert 1000 * attention(batch).dense_ms / 32 == close(dense_us)


@pytest.mark.parametrize("algorithm", ["sketch", "quest"])
def test_attention_gains_with_the_batch_and_the_hits(algorithm: str) -> None:
    """15% misses take 215 us of a layer at batch 8, for the link."""

    def ratio(*where: float) -> float:
        found = attention(*where, algorithm=algorithm)
        return found.dense_ms / found.hisparse_ms

    assert 1 < ratio(1) < ratio(1, 0.95) < ratio(8, 0.95)
    assert ratio(8) < ratio(8, 0.95)
    missing = attention(8, 0.85).hisparse_ms - attention(8, 1.0).hisparse_ms
    assert 1000 * missing / 32 == close(215)


def test_weights_are_read_once_dense_or_not() -> None:
    found, alone = attention(1, weight_bytes=15 * 10**9), attention(1)
    # 15 GB at 3,000 GB/s.
    assert found.dense_ms - alone.dense_ms == pytest.approx(5)
    assert found.hisparse_ms - alone.hisparse_ms == pytest.approx(5)


@given(
    st.sampled_from(["sketch", "quest", "streaming", "dipr"]),
    st.sampled_from(["layer", "kv_head", "query_head"]),
    st.integers(1, 64),
    st.integers(1, 2 * LONG),
    st.floats(0, 1),
)
def test_more_work_never_takes_less_time(
    algorithm: str, scope: str, batch: int, context: int, hit_ratio: float
) -> None:
    settings = {"algorithm": algorithm, "selection_scope": scope, "reuse_layers": 4}
    here = attention(batch, hit_ratio, context=context, **settings)
    for more in (
        attention(batch + 1, hit_ratio, context=context, **settings),
        attention(batch, hit_ratio, context=context + 16, **settings),
        attention(batch, hit_ratio / 2, context=context, **settings),
    ):
        assert more.hisparse_ms >= here.hisparse_ms - 1e-9
        assert more.dense_ms >= here.dense_ms - 1e-9


@given(st.integers(1, 256), st.integers(1, 2048))
def test_a_context_within_the_budget_is_dense_but_for_launches(batch: int, context: int) -> None:
    """And for small kernels; the new token's K and V go to host memory too."""
    found = attention(batch, 0.0, context=context)
    written_us = batch * TOKEN_BYTES / (52.8 * 1000)
    beside_us = 1000 * (found.hisparse_ms - found.dense_ms) - written_us
    # Six launches in place of two.
    assert 0 < beside_us < 32 * (4 * 2.0 + 40)
    assert found.hit_ratio == 1.0


def test_misses_beyond_the_device_buffer_only() -> None:
    slow = H100._replace(read=3.52)  # so that the link is what limits

    def missing_us(context: int) -> float:
        half, none = (attention(1, hits, context=context, hardware=slow) for hits in (0.5, 1.0))
        return 1000 * (half.hisparse_ms - none.hisparse_ms)

    assert missing_us(4096 + 16) == 0
    assert missing_us(4096 + 17) == pytest.approx(127 * 16 * TOKEN_BYTES / 2 / 3.52e3)


def test_dense_layers_are_read_over_the_link() -> None:
    few, many = (attention(1, dense_layers=tuple(range(n))) for n in (1, 2))
    assert 1000 * (many.hisparse_ms - few.hisparse_ms) == close(LONG * 4096 / 46.8e3)


def test_layers_that_reuse_a_selection_have_no_scores() -> None:
    own, reused = attention(8), attention(8, reuse_layers=2)
    scores = own.hisparse_ms - attention(8, reuse_layers=32).hisparse_ms
    assert own.hisparse_ms - reused.hisparse_ms == pytest.approx(scores * 16 / 31)


def test_layers_with_a_window_read_it_alone() -> None:
    """Neither scores nor transfers."""
    full, half, none = (
        attention(8, spec=replace(LLAMA, windows=windows))
        for windows in ((), (1024, 0) * 16, (1024,) * 32)
    )
    assert 2 * half.hisparse_ms == pytest.approx(full.hisparse_ms + none.hisparse_ms)
    assert none.hisparse_ms < full.hisparse_ms / 4
    assert none.dense_ms < half.dense_ms < full.dense_ms


def test_sketches_in_host_memory_are_read_for_candidates() -> None:
    """Their bytes cross the link, and PyTorch's operators collect them."""
    economy = {"algorithm_config": {"economy": True}}
    near, far = (
        attention(1, 1.0, hardware=H100._replace(read=read), **economy) for read in (1e9, 35.2)
    )
    read_us = 1000 * (far.hisparse_ms - near.hisparse_ms)
    assert read_us == pytest.approx(32 * 8 * 127 * 8 * 384 / 35.2e3)
    assert near.hisparse_ms > 32 * 44 * 2.0 / 1000


@given(st.sampled_from(["sketch_score", "select", "gather_pages"]), st.integers(1, 700))
def test_times_of_kernels_grow_with_the_work(name: str, width: int) -> None:
    """Between the shapes that they were computed for, too."""
    found = [instructions_us(name, width, *shape) for shape in ((1000, 1), (8191, 1), (8191, 32))]
    assert 0 < found[0] <= found[1] <= found[2]
    middle = instructions_us(name, width, 8191, 16)
    assert found[1] <= middle <= found[2]


def test_an_indexers_algorithm_waits_for_full_tail_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of one token in every step; other algorithms promote them beside the model."""
    spec = replace(DEEPSEEK, index_head_dim=128, page_size=1)

    def us() -> float:
        found = attention(1, spec=spec, algorithm="dsa", page_size=1, device_buffer_size=4096)
        return 1000 * found.hisparse_ms

    waits = us()
    monkeypatch.setattr(DSA, "indexer", False)
    promoted = instructions_us("promote_tail", 576, LONG - 1, 1, 1)
    assert waits - us() == pytest.approx(61 * promoted)


@pytest.mark.parametrize("gpu", GPUS)
def test_a_faster_gpu_or_link_takes_less_time(gpu: str) -> None:
    found, better = GPUS[gpu], Hardware(*(2 * rate for rate in GPUS[gpu]))
    slow, fast = (attention(8, hardware=hardware) for hardware in (found, better))
    assert fast.dense_ms < slow.dense_ms
    # On a GB200 all kernels take the times of their instructions.
    assert slow.hisparse_ms / 2 < fast.hisparse_ms <= slow.hisparse_ms


def page(name: str) -> str:
    """The text of a page of the docs."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def listed(numbers: list[float], form: str = ".2f") -> str:
    """``a, b and c``"""
    first, second, third = (format(number, form) for number in numbers)
    return f"{first}, {second} and {third}"


def measured_us(step: str, impl: str) -> float:
    """The median on an H200."""
    steps = json.loads(MEASURED.read_text())["steps"]
    (found,) = (each["output"] for each in steps if each["step"] == f"bench decode {step}")
    (case,) = found["cases"]
    return float(next(x["median_us"] for x in case["results"] if x["impl"] == impl))


def test_the_page_about_sizing_has_these_estimates() -> None:
    """Of a layer in us, beside what was measured; 5% of the pages are missing."""
    text = page("sizing")
    for batch in (1, 8, 32):
        step = f"128k x {batch}"
        found = [
            attention(batch, 0.95, hardware=H200, algorithm=name) for name in ("sketch", "quest")
        ]
        dense, ours = measured_us(step, "flashinfer_tensor_cores"), measured_us(step, "cuda")
        cells = [f"{1000 * found[0].dense_ms / 32:,.0f}", f"{dense:,.0f}"]
        cells += [f"{1000 * found[0].hisparse_ms / 32:,.0f}", f"{ours:,.0f}"]
        cells.append(f"{1000 * found[1].hisparse_ms / 32:,.0f}")
        # Not timed at 32 requests.
        cells.append(f"{measured_us(f'{step} quest', 'cuda'):,.0f}" if batch < 32 else "-")
        line = "| " + " | ".join([f"{batch}", *cells]) + " |"
        assert line in text, line
    assert met(H200) == [True, True, False, False]
    slow, fast = (listed(dense_ratios(hardware=each)) for each in (H200, H100))
    for sentence in (
        f"takes {slow} times as long as `sketch` on an H200, and {fast} times on an H100.",
        f"from {first_gain(H200)}k tokens on with `sketch` and from "
        f"{first_gain(H200, 'quest')}k on with `quest`, and from {first_gain(H100)}k on an H100",
    ):
        assert sentence in " ".join(text.split()), sentence


def page_bytes(spec: KVSpec, algorithm: str = "sketch") -> int:
    """Bytes on the device that a page in host memory is scored by, in a layer."""
    _, _, kept = choose_selection(HiSparseConfig(algorithm=algorithm), spec, 1.0)
    return entry_bytes(kept, "page")


def test_scores_read_a_sixteenth_of_k_and_v_but_of_latents() -> None:
    for width in (64, 96, 128, 256):
        spec = replace(LLAMA, head_dim=width, v_head_dim=width)
        assert 16 * page_bytes(spec) <= format_of(spec).layer_token_bytes * spec.page_size
    share = page_bytes(DEEPSEEK) / format_of(DEEPSEEK).layer_token_bytes / 16
    sizes = f"{page_bytes(DEEPSEEK) / 16:.0f} bytes per token and layer, {100 * share:.1f}% of"
    quest = f"`quest` keeps {page_bytes(DEEPSEEK, 'quest') / 16:.0f}."
    assert sizes in page("deepseek") and quest in page("deepseek"), (sizes, quest)


def test_the_page_about_deepseek_has_these_estimates() -> None:
    """``sketch`` and ``quest`` score latents for longer than dense attention takes."""
    text = " ".join(page("deepseek").split())
    sentence = f"dense attention takes {listed(dense_ratios(spec=DEEPSEEK))} times as long as"
    assert sentence in text, sentence
    assert max(dense_ratios(spec=DEEPSEEK, algorithm="quest")) < 1
    bounds = json.loads((ROOT / "tests/kernels/timing/bounds.json").read_text())["576"]
    scores = listed([bounds[batch]["sketch_score"] for batch in ("1", "8", "32")], ",.0f")
    assert f"scores alone take {scores} us" in text, scores


@pytest.mark.parametrize("batch", [1, 8])
def test_dipr_takes_the_kernels_of_sketches(batch: int) -> None:
    """The benchmark's rows hold 4,096 tokens, all of them in range.

    It was measured with an earlier ``sketch_score`` and a launch of its own to append, of which the
    estimate was 0.77 to 1.05.
    """
    found = attention(batch, 0.95, hardware=H200, algorithm="dipr", device_buffer_size=4096)
    share = 1000 * found.hisparse_ms / 32 / measured_us(f"128k x {batch} dipr", "cuda")
    assert 0.67 < share < 1.05


def test_sketches_of_another_layout_take_the_kernel_for_any() -> None:
    """Not the time of the nearest width that has a kernel of its own."""
    known, other = (instructions_us("sketch_score", width, 8191, 1) for width in (64, 112))
    assert other > 5 * known
    assert instructions_us("sketch_score", 80, 8191, 1, 32) == pytest.approx(
        2 * instructions_us("sketch_score", 80, 8191, 1)
    )
