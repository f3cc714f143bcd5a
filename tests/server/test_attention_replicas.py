"""``--attn-dp-size``: ranks that share a model's experts and have requests of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import assert_nothing_held
from harness import Server
from plugins import make_plugin
from settings import TWO_RANKS, latents
from tiny_models import tiny_model
from workload import tokens

pytestmark = pytest.mark.modes

NEW_TOKENS = 24
FLAGS = ("--max-total-tokens", "20000", "--chunked-prefill-size", "256")
RANKS = ("--tp-size", "2", "--attn-dp-size", "2")
PROMPTS = [tokens(n, seed=n) for n in (50, 333, 801, 1500, 40)]

#: Pads the batches of all ranks to one length, prompts too: decode steps and the padding of ranks
#: without requests are then labelled as chunks of prompts. Some GPUs' exchanges do so.
PADDED = """
    def load():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "sglang.srt.layers.dp_attention.DpPaddingMode.get_dp_padding_mode"
        HookRegistry.register(target, longest, HookType.AROUND)


    def longest(original, cls, *args):
        return cls.MAX_LEN
"""


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padded")
    return make_plugin(folder, "pad_all:load", PADDED)


@pytest.fixture(
    scope="module",
    params=latents(256, 512).items(),
    ids=["deepseek_v2", "deepseek_v32"],
)
def alone(request: pytest.FixtureRequest, log_dir: Path) -> Iterator[tuple[str, dict, list]]:
    """A model, its settings, and the tokens of each prompt on one rank, one after the other."""
    kind, config = request.param[0], request.param[1] | {"device_memory": "200MB"}
    log = log_dir / f"attention-alone-{kind}.log"
    with Server(tiny_model(kind), log, *FLAGS, config=config, env=TWO_RANKS) as one:
        found = [one.generate(prompt, NEW_TOKENS).ids for prompt in PROMPTS]
    return kind, config, found


@pytest.mark.parametrize("padding", ["as-it-comes", "to-the-longest"])
def test_each_rank_gives_one_rank_s_tokens(
    alone: tuple[str, dict, list], padding: str, padded: Path, log_dir: Path
) -> None:
    """All prompts at once; then of one rank alone, while the other has padding; then aborts."""
    kind, config, expected = alone
    path = [padded] if padding == "to-the-longest" else []
    log = log_dir / f"attention-{kind}-{padding}.log"
    options = {"config": config, "env": TWO_RANKS, "python_path": path}
    with Server(tiny_model(kind), log, *FLAGS, *RANKS, **options) as server:
        assert [a.ids for a in server.generate_many(PROMPTS, NEW_TOKENS)] == expected
        for rank in (0, 1):
            answers = server.generate_many(PROMPTS, NEW_TOKENS, routed_dp_rank=rank)
            assert [answer.ids for answer in answers] == expected
        assert sum(answer.cached for answer in answers) > 0
        hits = server.counted_by("dp_rank", "hit_pages")
        assert set(hits) == {"0", "1"} and all(hits.values())
        server.abort_after(tokens(700, seed=40), 5, 400)
        assert_nothing_held(server)
