"""Retracted requests leave host memory for a store, and come back to go on where they were."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checks import retract_until_seen, wait_until
from harness import Server
from plugins import make_exact_products
from settings import DSA as INDEXER
from settings import MEMORY, SMALL_POOL_FLAGS, SPARSE, TWO_RANKS, WHOLE
from tiny_models import tiny_model
from workload import NEW_TOKENS, RETRACTED, DenseTokens, tokens

from hisparse.storage import FileStore
from tests.sizes import PART

pytestmark = [
    pytest.mark.sweeps,
    pytest.mark.skipif(
        PART not in ("faults", "sweeps"), reason="more servers: make test-all PART=sweeps"
    ),
]
#: CI, which runs the sweeps, has no time for every kind of page.
faults = pytest.mark.skipif(PART != "faults", reason="more servers: make test-all PART=faults")

#: A model that was trained sparse: prefill and decode steps select alike.
DSA = MEMORY | INDEXER | {"algorithm_config": {}, "staging_bytes": 65536}


def start(
    log_dir: Path,
    name: str,
    store: Path,
    config: dict[str, Any],
    python_path: Sequence[Path] = (),
    **options: Any,
) -> Server:
    kind, flags = options.pop("kind", "llama"), options.pop("flags", ())
    storage = {"path": str(store), "swap_min_tokens": 0, "timeout_s": 60.0} | options
    log = log_dir / f"swap-{name}.log"
    settings: dict[str, Any] = {"config": config | {"storage": storage}, "python_path": python_path}
    if "--tp-size" in flags:
        settings["env"] = TWO_RANKS
    return Server(tiny_model(kind), log, *SMALL_POOL_FLAGS, *flags, **settings)


def assert_swapped(server: Server) -> None:
    """Pages left host memory, and all of them came back."""
    swapped, back, failed = server.counted(
        "storage_swapped_pages", "storage_swapped_in_pages", "storage_failed_swaps"
    )
    assert swapped == back > 0
    assert failed == 0


def num_swapped(store: Path) -> int:
    """Pages of retracted requests in a store."""
    with FileStore(store, create=False) as opened:
        uses = opened.describe().namespaces
    return sum(use.pages for use in uses if use.namespace.model == "retracted requests")


def test_a_swapped_request_has_the_tokens_of_dense_attention(
    log_dir: Path, tmp_path: Path, dense_tokens: DenseTokens
) -> None:
    with start(log_dir, "dense", tmp_path, WHOLE) as server:
        retract_until_seen(server, dense_tokens("llama", RETRACTED))
        assert_swapped(server)
        wait_until(lambda: not num_swapped(tmp_path), "pages of requests that have ended stay")


@faults
@pytest.mark.parametrize(
    ("name", "kind", "config", "flags"),
    [
        ("mla", "deepseek_v2", WHOLE, ()),
        ("dsa", "glm_moe_dsa", DSA, ()),
        ("fp8", "llama", WHOLE | {"host_layout": "page_first"}, ("--kv-cache-dtype", "fp8_e4m3")),
        ("pages of 64", "llama", WHOLE | {"host_layout": "layer_first"}, ("--page-size", "64")),
        ("chunks", "qwen2", WHOLE, ("--chunked-prefill-size", "128")),
        ("ranks", "llama", WHOLE, ("--tp-size", "2")),
        ("ranks of latents", "deepseek_v2", WHOLE, ("--tp-size", "2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_that_a_page_holds_comes_back(
    name: str, kind: str, config: dict[str, Any], flags: tuple[str, ...], log_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Tokens are those of the request alone."""
    exact = make_exact_products(tmp_path / "exact")
    with start(
        log_dir, name, tmp_path / "store", config, kind=kind, flags=flags, python_path=[exact]
    ) as server:
        answers = retract_until_seen(server)
        assert_swapped(server)
        server.flush_cache()
        for prompt, answer in zip(RETRACTED.prompts, answers, strict=True):
            if answer.retractions:
                assert answer.ids == server.generate(prompt, RETRACTED.new_tokens).ids


@faults
def test_sparse_requests_are_swapped_with_what_they_are(log_dir: Path, tmp_path: Path) -> None:
    """Their pages come back, and do not enter what servers share."""
    with start(log_dir, "sparse", tmp_path, SPARSE) as server:
        answers = retract_until_seen(server)
        assert_swapped(server)
        alone = server.generate(RETRACTED.prompts[0], RETRACTED.new_tokens)
        never = [answer.ids for answer in answers[:1] if not answer.retractions]
        assert never in ([], [alone.ids])
        prompts = sum(len(prompt) // 16 for prompt in RETRACTED.prompts)
        assert server.counted("storage_offloaded_pages")[0] <= prompts


def test_pages_of_aborted_requests_are_removed(log_dir: Path, tmp_path: Path) -> None:
    prompts = [tokens(300, seed=s) for s in range(200, 212)]
    with start(log_dir, "aborted", tmp_path, WHOLE) as server, ThreadPoolExecutor(12) as threads:
        waiting = [
            threads.submit(server.generate, prompt, 3000, ignore_eos=False) for prompt in prompts
        ]
        wait_until(lambda: num_swapped(tmp_path), "nothing is swapped", 120)
        server._post("/abort_request", {"rid": "", "abort_all": True})
        for future in waiting:
            future.exception()
        # SGLang lets go of the last batch in the next one.
        server.generate(prompts[0][:50], NEW_TOKENS)
        wait_until(lambda: not num_swapped(tmp_path), "pages of aborted requests stay")
        assert server.counted("storage_failed_swaps") == (0,)
