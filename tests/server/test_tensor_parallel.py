"""Two ranks on a CPU, joined by gloo: one rank's tokens, and host memory as it was planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import Server
from hugging_face import HuggingFace
from plugins import make_plugin
from settings import TWO_RANKS, latents
from tiny_models import LAYERS, TOKEN_BYTES, tiny_model
from workload import tokens

from tests.sizes import MORE_SERVERS

NEW_TOKENS = 16
POOL_TOKENS = 20000
LATENT_BYTES = LAYERS * (64 + 16) * 4
FLAGS = ("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "256")
SMALL = latents(512, 512)["deepseek_v2"]
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


@contextmanager
def served(
    kind: str, log_dir: Path, tp: int, config: dict[str, object], path: Sequence[Path] = ()
) -> Iterator[Server]:
    env = {"TORCHDYNAMO_DISABLE": "1"} if tp == 1 else TWO_RANKS
    options = {"config": config, "env": env, "python_path": path}
    log = log_dir / f"{kind}-of-{tp}.log"
    with Server(tiny_model(kind), log, *FLAGS, "--tp-size", str(tp), **options) as server:
        yield server


def host_bytes(server: Server) -> list[float]:
    """Host memory of each rank's part of the KV cache."""
    return list(server.counted_by("tp_rank", "host_kv_bytes").values())


def test_ranks_of_dsa_share_latents_and_give_one_rank_s_tokens(
    log_dir: Path, tmp_path: Path
) -> None:
    """Sparse in prefill and in decoding. The latents of both ranks are the same bytes, so either
    may write them to the pool that they share.
    """
    package, folder = tmp_path / "package", tmp_path / "digests"
    folder.mkdir()
    make_plugin(package, "digests:Digests", DIGESTS, group="hisparse.algorithms")
    options = {"index_dtype": "float32", "folder": str(folder)}
    config = latents(0, 0)["deepseek_v32"] | {"algorithm": "digests", "algorithm_config": options}
    prompts = [tokens(n, seed=n) for n in (30, 333, 801)]
    with served("deepseek_v32", log_dir, 2, config, [package]) as server:
        found = [answer.ids for answer in server.generate_many(prompts, NEW_TOKENS)]
        # SGLang's pages are of 64 tokens for DSA; one is padding.
        assert host_bytes(server) == [(POOL_TOKENS // 64 + 1) * 64 * LATENT_BYTES // 2] * 2
    alone = HuggingFace("deepseek_v32")
    assert found == [alone.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    first, second = (path.read_text() for path in folder.iterdir())
    assert first == second, "the latents of a layer differ between the ranks"
    assert len(first.splitlines()) > LAYERS * NEW_TOKENS


@pytest.mark.sweeps
@pytest.mark.skipif(not MORE_SERVERS, reason="two more servers: make test-all PART=sweeps")
@pytest.mark.parametrize(
    ("kind", "token_bytes"),
    [
        ("llama", TOKEN_BYTES),
        pytest.param("deepseek_v2", LATENT_BYTES, marks=pytest.mark.modes),
    ],
)
def test_two_ranks_give_one_rank_s_tokens(kind: str, token_bytes: int, log_dir: Path) -> None:
    """Each rank holds its KV heads, or its part of the latents. Ranks of an MLA model select
    together, by the query heads of all of them.
    """
    prompts, found = [tokens(n, seed=n) for n in (50, 333, 801)], {}
    for tp in (1, 2):
        with served(kind, log_dir, tp, SMALL) as server:
            answers = server.generate_many(prompts, NEW_TOKENS)
            # The second time, prefixes come from the radix cache.
            answers += server.generate_many(prompts, NEW_TOKENS)
            found[tp] = [answer.ids for answer in answers]
            assert host_bytes(server) == [(POOL_TOKENS + 16) * token_bytes // tp] * tp
    assert found[1] == found[2]
