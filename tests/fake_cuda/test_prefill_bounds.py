"""What a layer launches for a chunk of a prompt, and the memory that it takes, on a fake device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from hisparse.adapters import ADAPTERS, dsa
from hisparse.memory.costs import prefill_bytes
from hisparse.types import AttentionRule
from tests.fake_cuda.device import CUDA, fake_cuda
from tests.fake_cuda.engine import KINDS, LAYER, FakeEngine, model
from tests.fake_cuda.test_captured_memory import Peak
from tests.fake_cuda.test_fallbacks import libraries as libraries
from tests.fake_cuda.test_launches import NAMES, algorithm_of, scope_of

#: Tokens of the chunk and of the prefix, which is read in eight tiles.
CHUNK, PREFIX = 2048, 8192
#: The most kernels that a layer launches for the chunk; those of a tile are about 11.
LAUNCHES = {
    "dsa": 160, "dsa by dsa": 225, "infllm": 1000, "msa": 630, "qsa": 165, "snapkv": 230
}  # fmt: skip
USUAL_LAUNCHES = 115
#: Query heads: those of the model, and fewer, where outputs do not hide what else is allocated.
HEADS = {"GQA": 32, "MLA": 128, "Qwen4-Exp": 24, "MiniMax-M3": 64, "MiniCPM": 32}
FEW_HEADS = {"GQA": 8, "MLA": 16}


def cases() -> Iterator[tuple[str, str, str, int]]:
    for name in NAMES:
        for kind in KINDS[algorithm_of(name).indexer]:
            yield name, kind, "triton", HEADS[kind]
    yield from (("sketch", kind, "triton", heads) for kind, heads in FEW_HEADS.items())
    yield from (("quest", kind, "torch", heads) for kind, heads in HEADS.items())
    for name in NAMES:
        # Algorithms with an indexer choose tokens in a prefill.
        for kind in KINDS[algorithm_of(name).indexer] if algorithm_of(name).indexer else ():
            spec = model(kind)
            for adapter in sorted({*ADAPTERS} - {"triton"}):
                cls = ADAPTERS.get(adapter)
                if spec.attention in cls.attention and not cls.widths_refused(spec):
                    yield name, kind, adapter, HEADS[kind]
    yield from (("dsa", "MLA", adapter, FEW_HEADS["MLA"]) for adapter in ("triton", "torch", "dsa"))
    yield "dsa", "MLA", "dsa without FlashMLA", HEADS["MLA"]


def launches_and_peak(name: str, kind: str, adapter: str, heads: int) -> tuple[int, int, int]:
    """Kernels of one layer, the most bytes that it takes at once, and the bytes charged for it."""
    algorithm, peak = algorithm_of(name), Peak()
    sizes = algorithm.page_sizes
    spec = model(kind, sizes and sizes[0], num_q_heads=heads)
    with fake_cuda() as launches:
        engine = FakeEngine(launches, algorithm, spec, scope_of(algorithm), adapter=adapter)
        layer = launches.layer

        @contextmanager
        def watched(number: int) -> Iterator[None]:
            with layer(number):
                if number == LAYER:
                    with peak:
                        yield
                else:
                    yield

        launches.layer = watched  # type: ignore[method-assign]
        # Launches would hold their tensors.
        launches.add = lambda x: launches.all.append(replace(x, arguments={}))  # type: ignore[method-assign]
        engine.prefill(CHUNK, PREFIX)
        chosen = algorithm.prefill_choices(engine.policy)
        launched = launches.of_layer(LAYER).total()
    return launched, peak.most, prefill_bytes(spec, CHUNK, chosen)


@pytest.mark.parametrize(("name", "kind", "adapter", "heads"), list(cases()))
def test_a_chunk_takes_what_is_charged(
    name: str, kind: str, adapter: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if adapter.endswith("without FlashMLA"):
        monkeypatch.setattr(dsa, "_find_flash_mla", lambda: (None, {}, False))
    launched, taken, charged = launches_and_peak(name, kind, adapter.split()[0], heads)
    usual = LAUNCHES.get(name, USUAL_LAUNCHES)
    assert launched <= LAUNCHES.get(f"{name} by {adapter}", usual)
    # A chunk's tensors beside those of attention are smaller, and gone by then.
    assert 0.9 * charged <= taken <= charged


def test_a_prompt_may_have_more_tokens_than_a_grid_has_rows() -> None:
    with fake_cuda() as launches:
        q, k = (torch.empty(n, 16, 64, device=CUDA) for n in (70_000, 128))
        chosen = torch.empty(70_000, 32, dtype=torch.int32, device=CUDA)
        attended = ADAPTERS.get("torch")().attend_chosen(q, k, k, AttentionRule(0.1), chosen)
        assert attended.out.shape == q.shape
        assert sum(each.kernel is not None for each in launches.all) == 2
