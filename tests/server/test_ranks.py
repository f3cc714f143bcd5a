"""Several ranks on a CPU, joined by gloo, give the tokens of one, each with its part of the memory:
tensor parallelism, pipelines, ranks with requests of their own, and replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checks import assert_nothing_held, wait_until
from harness import Server
from hugging_face import HuggingFace
from parts import few, more
from plugins import make_plugin
from settings import SMALL_ROWS, TWO_RANKS, latents
from tiny_models import LAYERS, TOKEN_BYTES, tiny_model
from workload import tokens

NEW_TOKENS = 24
PAGE = 16
POOL = 20000
LATENT_BYTES = LAYERS * (64 + 16) * 4
FLAGS = ("--chunked-prefill-size", "256", "--max-running-requests", "8")
PROMPTS = [tokens(n, seed=n) for n in (50, 333, 801, 1500, 2000)]
HOST_BYTES = 40 * 2**20
#: Pages of K and V that fit, one of which is padding.
PAGES = HOST_BYTES // (PAGE * TOKEN_BYTES)
#: Host memory is what divides here, not a number of tokens.
DIVIDED = SMALL_ROWS | {"host_memory": HOST_BYTES, "checked": True}
V2, V32 = ({**config, "device_memory": "200MB"} for config in latents(256, 512).values())


@dataclass(frozen=True)
class Ranks:
    """How a model is served by two ranks.

    Attributes:
        flags: of the ranks, beside those of one.
        label: of their metrics.
        config: of one rank, and of several.
        host_bytes: of K and V of each rank; None: not compared.
        kind: of the model.
        tokens: ``--max-total-tokens``; None: what ``config`` gives.
    """

    flags: tuple[str, ...]
    label: str
    config: dict[str, Any]
    host_bytes: tuple[float, float] | None
    kind: str = "llama"
    tokens: int | None = None


TENSOR, ATTENTION = ("--tp-size", "2"), ("--tp-size", "2", "--attn-dp-size", "2")
HALF_TOKEN = TOKEN_BYTES / 2
CASES = {
    "tensor": Ranks(TENSOR, "tp_rank", SMALL_ROWS, ((POOL + PAGE) * HALF_TOKEN,) * 2, tokens=POOL),
    # Each has a part of the latents; they select together, by the query heads of both.
    "tensor, latents": Ranks(
        TENSOR, "tp_rank", V2, ((POOL + PAGE) * LATENT_BYTES / 2,) * 2, "deepseek_v2", POOL
    ),
    # Three layers do not halve. The last one is always dense.
    "pipeline": Ranks(
        ("--pp-size", "2"),
        "pp_rank",
        DIVIDED | {"dense_layers": [2]},
        (PAGES * PAGE * TOKEN_BYTES / LAYERS, PAGES * PAGE * TOKEN_BYTES * 2 / LAYERS),
    ),
    "replicas": Ranks(
        ("--dp-size", "2"), "dp_rank", DIVIDED, (PAGES // 2 * PAGE * TOKEN_BYTES,) * 2
    ),
    "attention": Ranks(ATTENTION, "dp_rank", V2, None, "deepseek_v2", POOL),
    "attention, padded": Ranks(ATTENTION, "dp_rank", V2, None, "deepseek_v2", POOL),
    "attention, dsa": Ranks(ATTENTION, "dp_rank", V32, None, "deepseek_v32", POOL),
    "attention, dsa, padded": Ranks(ATTENTION, "dp_rank", V32, None, "deepseek_v32", POOL),
}

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
Alone = Callable[[str], tuple[list[list[int]], float]]


def start(name: str, log: Path, *flags: str, config: dict[str, Any], **options: Any) -> Server:
    case = CASES[name]
    flags += ("--max-total-tokens", str(case.tokens)) if case.tokens else ()
    options |= {"config": config, "env": TWO_RANKS}
    return Server(tiny_model(case.kind), log, *FLAGS, *flags, **options)


def one_by_one(server: Server) -> tuple[list[list[int]], float]:
    """Tokens of each prompt when nothing else runs, and the pages that all layers attended."""
    tokens_of = [server.generate(prompt, NEW_TOKENS).ids for prompt in PROMPTS]
    # The last request is not counted before its end.
    server.flush_cache()
    metrics = server.metrics()
    return tokens_of, sum(metrics[f"hisparse:{kind}_pages"] for kind in ("hit", "miss"))


@pytest.fixture(scope="module")
def alone(log_dir: Path) -> Alone:
    """What one rank gives and counts."""

    @cache
    def found(name: str) -> tuple[list[list[int]], float]:
        with start(name, log_dir / f"alone-{name}.log", config=CASES[name].config) as one:
            return one_by_one(one)

    # Padding is of several ranks.
    return lambda name: found(name.removesuffix(", padded"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For plug-ins, for the store that replicas share, and for their traces."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module", params=few(CASES, "tensor", "pipeline", "replicas"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(name: str, alone: Alone, folder: Path, log_dir: Path) -> Iterator[Server]:
    alone(name)
    case, path = CASES[name], list[Path]()
    config = case.config
    if name == "replicas":
        config = config | {
            "storage": {"path": str(folder / "store"), "size": "64MiB"},
            "trace": {"path": str(folder / "selections.trace"), "max_bytes": "64MiB"},
        }
    if "padded" in name:
        path = [make_plugin(folder, "pad_all:load", PADDED)]
    log = log_dir / f"ranks-{name}.log"
    with start(name, log, *case.flags, config=config, python_path=path) as running:
        yield running


@more
def test_they_give_one_rank_s_tokens(name: str, server: Server, alone: Alone) -> None:
    """One by one, all at once, from the radix cache; where ranks have requests, of each rank."""
    right, pages = alone(name)
    if name == "pipeline":
        assert one_by_one(server) == (right, pages), "layers keep their numbers"
    assert [a.ids for a in server.generate_many(PROMPTS, NEW_TOKENS)] == right
    cached = [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]
    for rank in (0, 1) if CASES[name].label == "dp_rank" else (None,):
        routed = {} if rank is None else {"routed_dp_rank": rank}
        for _ in range(2):
            answers = server.generate_many(PROMPTS, NEW_TOKENS, **routed)
            assert [answer.ids for answer in answers] == right
        if CASES[name].kind != "deepseek_v32":
            assert [answer.cached for answer in answers] == cached
    hits = server.counted_by(CASES[name].label, "hit_pages")
    assert set(hits) == {"0", "1"} and all(hits.values())


@more
def test_each_has_its_part_of_host_memory(name: str, server: Server) -> None:
    case = CASES[name]
    if case.host_bytes is None:
        pytest.skip("each rank has a pool of its own")
    sizes = server.counted_by(case.label, "host_kv_bytes")
    assert sorted(sizes.values()) == list(case.host_bytes)
    # They agree on the number of tokens.
    (total,) = set(server.counted_by(case.label, "host_tokens_total").values())
    assert total == case.tokens or total in ((PAGES - 1) * PAGE, (PAGES // 2 - 1) * PAGE)


@more
def test_an_aborted_request_leaves_nothing(server: Server) -> None:
    for seed in range(4):
        server.abort_after(tokens(700, seed=seed + 40), 5, 400)
    assert_nothing_held(server)


@more
def test_a_replica_reads_what_another_has_stored(name: str, server: Server, folder: Path) -> None:
    if name != "replicas":
        pytest.skip("no store")
    prompt, counter = tokens(900, seed=17), "storage_offloaded_pages"
    before = server.counted_by("dp_rank", counter)
    first = server.generate(prompt, NEW_TOKENS, routed_dp_rank=0)
    wait_until(
        lambda: server.counted_by("dp_rank", counter)["0"] >= before["0"] + 900 // PAGE,
        "the store did not get the prompt",
    )
    second = server.generate(prompt, NEW_TOKENS, routed_dp_rank=1)
    assert (first.cached, second.cached) == (0, 900 // PAGE * PAGE)
    assert second.ids == first.ids
    assert server.counted_by("dp_rank", "storage_loaded_pages_total")["1"] >= 900 // PAGE
    # Each writes a trace of its own.
    assert len(list(folder.glob("selections*.trace"))) == 2
    assert all(steps > 0 for steps in server.counted_by("dp_rank", "trace_steps_total").values())


#: The algorithm dsa, writing down what the latents of each rank are.
DIGESTS = """
    import hashlib
    import os
    from dataclasses import dataclass
    from pathlib import Path

    import torch

    from hisparse.algorithms.dsa import DSA


    @dataclass(frozen=True, kw_only=True)
    class Digests(DSA):
        folder: str

        def _write(self, keys, layer_id):
            digest = hashlib.sha256(keys.contiguous().view(torch.uint8).numpy()).hexdigest()
            with open(Path(self.folder) / str(os.getpid()), "a") as file:
                print(layer_id, list(keys.shape), digest, file=file)

        def construct_representations(self, keys, queries, layer_id, step):
            self._write(keys, layer_id)
            super().construct_representations(keys, queries, layer_id, step)

        def update_representations(self, keys, layer_id, host_pages, step):
            self._write(keys, layer_id)
            super().update_representations(keys, layer_id, host_pages, step)
"""


def test_ranks_of_dsa_share_latents_and_give_one_rank_s_tokens(
    log_dir: Path, tmp_path: Path
) -> None:
    """Sparse in prefill and in decoding. The latents of both ranks are the same bytes, so either
    may write them to the pool that they share.
    """
    package, digests = tmp_path / "package", tmp_path / "digests"
    digests.mkdir()
    make_plugin(package, "digests:Digests", DIGESTS, group="hisparse.algorithms")
    options = {"index_dtype": "float32", "folder": str(digests)}
    config = V32 | {"algorithm": "digests", "algorithm_config": options, "device_memory": "600MB"}
    prompts, log = [tokens(n, seed=n) for n in (30, 333, 801)], log_dir / "ranks-digests.log"
    case, path = "attention, dsa", [package]
    with start(case, log, *TENSOR, config=config, python_path=path) as server:
        found = [answer.ids for answer in server.generate_many(prompts, NEW_TOKENS)]
        # SGLang's pages are of 64 tokens for DSA; one is padding.
        halves = server.counted_by("tp_rank", "host_kv_bytes").values()
        assert list(halves) == [(POOL // 64 + 1) * 64 * LATENT_BYTES // 2] * 2
    one = HuggingFace("deepseek_v32")
    assert found == [one.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    first, second = (path.read_text() for path in digests.iterdir())
    assert first == second, "the latents of a layer differ between the ranks"
    assert len(first.splitlines()) > LAYERS * NEW_TOKENS
