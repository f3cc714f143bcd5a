"""Families of models through the real server, with greedy tokens of the models themselves.

Windows, capped logits, sinks, norms, latents, hybrids with linear attention or
convolutions, and a model that SGLang runs with the code of transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hybrids
import pytest
from harness import Server
from hugging_face import greedy, load
from hybrids import HYBRIDS
from parts import MORE, few
from planned_bytes import assert_planned
from settings import CHECKED, MEMORY, ROOMY
from tiny_models import CONTEXT, HYBRID_LAYERS, WINDOW, tiny_model
from workload import tokens

pytestmark = MORE

NEW_TOKENS = 24
_PREFIX = tokens(700, seed=31)
#: The last two share whole pages, and end at other places of a page.
PROMPTS = [tokens(90, seed=40), _PREFIX + tokens(333, seed=32), _PREFIX + tokens(20, seed=33)]
_FLAGS = (
    *("--max-total-tokens", "20000", "--max-running-requests", "4"),
    *("--chunked-prefill-size", "256"),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is special about a kind of ``tiny_models``.

    Attributes:
        windows: tokens of a window, in layers that have one in SGLang.
        num_full: layers without a window, of three.
        is_native: whether dense tokens are those of SGLang's ``torch_native``, for transformers
            has windows in other layers, or of another length.
        flags: of its servers.
    """

    windows: int = WINDOW
    num_full: int = 3
    is_native: bool = False
    flags: tuple[str, ...] = ()

    @property
    def says_windows(self) -> str:
        """The line of its server's log."""
        return f"{3 - self.num_full} of 3 layers attend windows of {self.windows} tokens"


FAMILIES = {
    "mistral": Family(is_native=True),
    "phi3": Family(is_native=True),
    "gemma2": Family(num_full=1),
    "gemma3": Family(num_full=1),
    "cohere2": Family(num_full=1, windows=WINDOW + 1, is_native=True),
    "gpt_oss": Family(num_full=1),
    "smollm3": Family(flags=("--model-impl", "transformers")),
    "exaone4": Family(),
    "glm4_moe_lite": Family(),
    "qwen3_next": Family(flags=hybrids.FLAGS),
    "kimi_linear": Family(flags=hybrids.FLAGS),
    # SGLang keeps no states of it in the radix cache, but in pages of one token.
    "lfm2": Family(flags=(*hybrids.FLAGS, "--disable-radix-cache")),
}
#: A device buffer below the window is raised.
_SMALL = CHECKED | {"budget": 80, "device_buffer_size": 80}
_HYBRID = _SMALL | {"dense_layers": [HYBRID_LAYERS[1]]}
WITH_WINDOWS = ("gemma2", "mistral", "phi3", "gemma3", "cohere2", "gpt_oss")


def serve(kind: str, name: str, log_dir: Path, *flags: str, **options: Any) -> Server:
    if kind in HYBRIDS:
        path = hybrids.python_path(log_dir / "plugin")
        options |= {"env": hybrids.ENV, "python_path": path}
    log = log_dir / f"families-{kind}-{name}.log"
    return Server(tiny_model(kind), log, *_FLAGS, *FAMILIES[kind].flags, *flags, **options)


def dense(kind: str, log_dir: Path) -> list[list[int]]:
    """Tokens of each prompt."""
    if not FAMILIES[kind].is_native:
        # PyTorch's own attention, which transformers takes by default, ignores caps.
        net = load(tiny_model(kind), attn_implementation="eager")
        return [greedy(net, prompt, NEW_TOKENS) for prompt in PROMPTS]
    with serve(kind, "dense", log_dir, "--disable-radix-cache", backend="torch_native") as server:
        return [server.generate(prompt, NEW_TOKENS).ids for prompt in PROMPTS]


@pytest.mark.parametrize("kind", few(FAMILIES, "gemma3", "gpt_oss", "smollm3", "qwen3_next"))
def test_served_tokens_are_those_of_the_model(kind: str, log_dir: Path) -> None:
    expected, family = dense(kind, log_dir), FAMILIES[kind]
    assert all(len(set(ids)) > 5 for ids in expected), "continuations that repeat show little"
    with serve(kind, "roomy", log_dir, config=ROOMY) as server:
        assert [a.ids for a in server.generate_many(PROMPTS, NEW_TOKENS)] == expected
        aborted = server.abort_after(PROMPTS[1], num_tokens=5, max_new_tokens=1000)
        assert aborted[:NEW_TOKENS] == expected[1][: len(aborted)]
        again = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [a.ids for a in again] == expected
        assert (min(a.cached for a in again[1:]) >= 640) == (kind != "lfm2")
        assert (family.says_windows in server.log()) == (family.num_full < 3)
        if kind == "gemma3":
            planned = {"context": CONTEXT, "max_requests": 4}
            assert_planned(server, tiny_model(kind), ROOMY, **planned)


@pytest.mark.parametrize("kind", few((*WITH_WINDOWS, "smollm3", *HYBRIDS), "gemma2"))
def test_a_small_budget_keeps_requests_apart(kind: str, log_dir: Path) -> None:
    with serve(kind, "small", log_dir, config=_HYBRID if kind in HYBRIDS else _SMALL) as server:
        together = server.generate_many(PROMPTS, NEW_TOKENS, top_logprobs=1)
        if kind not in HYBRIDS:
            server.flush_cache()
        alone = [server.generate(prompt, NEW_TOKENS, top_logprobs=1) for prompt in PROMPTS]
        assert [x.ids for x in together] == [x.ids for x in alone]
        assert all(math.isfinite(value) for x in alone for value in x.logprobs)
        assert server.counted("selections")[0] > 0
        if kind in HYBRIDS:
            assert "the layers that attend are 1, 3;" in server.log()
        else:
            assert ("is raised to" in server.log()) == (FAMILIES[kind].num_full < 3)


@pytest.mark.modes
@pytest.mark.parametrize("flags", [(), ("--enable-mixed-chunk",)], ids=["chunks", "mixed"])
def test_retracted_requests_of_a_hybrid_get_their_tokens(
    flags: tuple[str, ...], log_dir: Path
) -> None:
    """SGLang frees and computes again the states of other layers with them."""
    prompts, count = [tokens(60, seed=n) for n in range(50, 54)], 260
    flags += ("--max-total-tokens", "1088")
    with serve(
        "qwen3_next", "retracted", log_dir, *flags, config=MEMORY | {"budget": 512}
    ) as server:
        alone = [server.generate(prompt, count).ids for prompt in prompts]
        retractions = 0
        # Of requests that may end early SGLang admits more than fit, if they come in time.
        for delay_s in (0.1, 0.02, 0.3, 0.0):
            server.flush_cache()
            together = server.generate_many(prompts, count, delay_s=delay_s, ignore_eos=False)
            assert [x.ids for x in together] == alone
            retractions += sum(answer.retractions for answer in together)
            if retractions:
                break
        assert retractions > 0
