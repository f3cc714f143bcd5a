"""Prefixes in a store below host memory: after a restart, and on servers with other settings."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import mooncake_master
import pytest
import torch
from adapters import ADAPTER_FLAGS, adapter_path, write_adapter
from checks import wait_for, wait_until
from harness import Answer, Server
from hugging_face import greedy, load
from parts import few, more
from plugins import make_plugin
from settings import DSA, MSA, MSA_FLAGS, ROOMY, SPARSE, TWO_RANKS
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, DenseTokens, tokens

from hisparse.demo.document import text as document
from hisparse.transformers import DB
from tests.storage.pages import page_files
from tests.transformers.hf_models import Characters, run_program

FLAGS = ("--max-total-tokens", "40000", "--max-running-requests", "4")
PROMPT = PROMPTS.prompts[5]
DOCUMENT = tokens(1500, seed=1500)
#: Whole pages of 16 tokens before the last token, which is always computed.
CACHED = 1488
Tokens = Callable[[list[list[int]]], list[list[int]]]


@pytest.fixture(scope="module")
def tokens_without(log_dir: Path) -> Iterator[Tokens]:
    """Tokens of prompts on a server without a store."""
    with ExitStack() as stack:

        @cache
        def server() -> Server:
            return stack.enter_context(start(log_dir, "reference", None, SPARSE))

        yield lambda prompts: [server().generate(prompt, 20).ids for prompt in prompts]


def start(
    log_dir: Path, name: str, store: Path | None, config: dict[str, Any], **options: Any
) -> Server:
    storage = (
        {} if store is None else {"storage": {"path": str(store)} | options.pop("storage", {})}
    )
    kind, flags = options.pop("kind", "llama"), options.pop("flags", ())
    log = log_dir / f"storage-{name}.log"
    return Server(tiny_model(kind), log, *FLAGS, *flags, config=config | storage, **options)


def ask_and_store(server: Server, prompt: list[int], pages: int) -> Answer:
    answer = server.generate(prompt, NEW_TOKENS)
    wait_for(server, "storage_offloaded_pages", pages)
    return answer


def test_a_second_server_with_other_settings_reads_what_a_sparse_one_wrote(
    log_dir: Path, tmp_path: Path, dense_tokens: DenseTokens
) -> None:
    """The first is killed. Its second turn follows sparse steps: no page of it may be shared.

    Representations come from the store to the algorithm that wrote them, and are built for others.
    """
    prompt = PROMPT
    with start(log_dir, "writer", tmp_path, SPARSE) as server:
        first = ask_and_store(server, prompt, 93)
        turns = prompt + first.ids + tokens(200, seed=9)
        second = server.generate(turns, NEW_TOKENS)
        assert second.cached > len(prompt)
        wait_for(server, "storage_inexact_pages", 12)
        assert server.counted("storage_offloaded_pages") == (93,)
        # What is in host memory comes from there.
        assert server.generate(prompt, NEW_TOKENS).ids == first.ids
        assert server.counted("storage_loaded_pages") == (0,)
    other = ROOMY | {"algorithm": "quest", "host_layout": "page_first"}
    with start(log_dir, "reader", tmp_path, other) as server:
        answer = server.generate(prompt, NEW_TOKENS)
        assert answer.ids == dense_tokens("llama", PROMPTS)[5]
        assert answer.cached == CACHED
        assert server.counted("storage_loaded_pages", "storage_failed_loads") == (93, 0)
        assert server.counted("storage_built_pages") == (93,)
        # Pages of the prompt are there, those of the sparse answer are not.
        server.flush_cache()
        exact = server.generate(turns, NEW_TOKENS)
        assert exact.cached == CACHED
    with start(log_dir, "again", tmp_path, SPARSE) as server:
        again = server.generate(prompt, NEW_TOKENS)
        assert (again.ids, again.cached) == (first.ids, CACHED)
        assert server.counted("storage_loaded_pages", "storage_built_pages") == (93, 0)


_INDEXED: dict[str, Any] = {"algorithm_config": {}, "device_memory": "64MB"}
#: Model, what is set beside SPARSE, and flags.
RESTARTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "fp8": ("llama", {"host_layout": "page_first"}, ("--kv-cache-dtype", "fp8_e4m3")),
    "layers": ("qwen2", {"host_layout": "layer_first"}, ()),
    "pages of 64": ("llama", {}, ("--page-size", "64")),
    "snapkv": ("llama", {"algorithm": "snapkv"}, ()),
    "dipr": ("llama", {"algorithm": "dipr", "device_buffer_size": 512}, ()),
    "tail": ("llama", {"tail_estimate": True}, ()),
    "chunks": ("llama", {}, ("--chunked-prefill-size", "128")),
    "mla": ("deepseek_v2", {}, ()),
    "dsa": ("deepseek_v32", DSA | _INDEXED, ()),
    "dsa, shared selections": ("glm_moe_dsa", DSA | _INDEXED, ()),
    "msa": ("minimax_m3", MSA | _INDEXED, MSA_FLAGS),
}


@more
@pytest.mark.parametrize("name", few(RESTARTS, "fp8", "dsa, shared selections"))
def test_a_restart_changes_no_token(name: str, log_dir: Path, tmp_path: Path) -> None:
    """SIGKILL, the same server again, the same tokens from loaded pages as from computed ones."""
    kind, config, flags = RESTARTS[name]
    size = 64 if name.startswith(("pages of 64", "dsa")) else 16
    cached = (len(DOCUMENT) - 1 - 32 * (name == "snapkv")) // size * size
    config, options = SPARSE | config, {"kind": kind, "flags": flags}
    with start(log_dir, f"{name}-first", tmp_path, config, **options) as server:
        before = ask_and_store(server, DOCUMENT, len(DOCUMENT) // size)
        asked = [DOCUMENT[:800] + tokens(300, seed=5), tokens(500, seed=6), tokens(900, seed=7)]
        others = [server.generate(prompt, NEW_TOKENS) for prompt in asked]
        stored = sum(n // size for n in (len(DOCUMENT), 1100, 500, 900)) - 800 // size
        wait_for(server, "storage_offloaded_pages", stored)
    with start(log_dir, f"{name}-second", tmp_path, config, **options) as server:
        after = server.generate(DOCUMENT, NEW_TOKENS)
        assert after.ids == before.ids
        assert after.cached == cached
        server.flush_cache()
        # Several requests load at the same time.
        answers = server.generate_many(asked, NEW_TOKENS)
        assert [answer.ids for answer in answers] == [answer.ids for answer in others]
        assert answers[0].cached >= 800 // size * size
        if name != "snapkv":
            assert min(answer.cached for answer in answers[1:]) >= 499 // size * size
        assert server.counted("storage_failed_loads", "storage_errors") == (0, 0)


@more
@pytest.mark.parametrize("kind", few(["llama", "qwen2", "mistral", "cohere2"], "llama", "mistral"))
def test_a_server_and_the_library_read_each_others_pages(
    kind: str, log_dir: Path, tmp_path: Path
) -> None:
    """But not of models whose windows only one of the two applies, or whose windows differ."""
    shared = kind in ("llama", "qwen2")
    model = load(tiny_model(kind))
    settings = {"budget": 128, "device_buffer_size": 128}

    def ask(db: DB, prompt: list[int], cached: int) -> list[int]:
        session, rest = db.create_session(prompt)
        with session:
            assert len(prompt) - len(rest) == cached
            found = greedy(model, prompt, NEW_TOKENS, past_key_values=session.cache)
            ids = torch.tensor(prompt + found)
            assert session.store(ids)
        return found

    with start(log_dir, f"served-{kind}", tmp_path, SPARSE, kind=kind) as server:
        first = ask_and_store(server, DOCUMENT, 93)
    other = DOCUMENT[:800] + tokens(700, seed=12)
    with DB(tmp_path, model, settings, max_length=2048) as db:
        got = ask(db, DOCUMENT, CACHED if shared else 0)
        assert (got == first.ids) is shared
        second = ask(db, other, 800)
    with start(log_dir, f"reads-{kind}", tmp_path, SPARSE, kind=kind) as server:
        answer = server.generate(other, NEW_TOKENS)
        assert (answer.ids == second) is shared
        # Of the other front end's pages, or of its own, which are the beginning.
        assert answer.cached == (CACHED if shared else 800)
        assert server.counted("storage_failed_loads") == (0,)


@more
@pytest.mark.parametrize("index", few(["sketch", "flat"], "flat"))
def test_the_program_of_the_docs_on_a_servers_store(
    index: str, log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the running server has computed, and the server what it has stored."""
    text = Characters()(document()[:400], "pt").input_ids[0].tolist()
    config = SPARSE | {"algorithm": "dipr", "algorithm_config": {"index": index}}
    config["device_buffer_size"] = 2 * config["budget"]
    with start(log_dir, f"program-{index}", tmp_path, config) as server:
        ask_and_store(server, text, 400 // 16)
        ran = run_program(monkeypatch, tmp_path, {"index": index})
        assert ran["session"].cache.stats().choices == {
            "resident": 0, "streamed": 0, "sparse": 2, "reused": 2,
        }  # fmt: skip
        ids = ran["ids"][0].tolist()
        server.flush_cache()
        answer = server.generate(ids, 8)
        assert ran["out"][0].tolist() == ids + answer.ids
        assert answer.cached == (len(ids) - 1) // 16 * 16 > 400
        assert server.counted("storage_loaded_pages", "storage_failed_loads") == (len(ids) // 16, 0)


@more
def test_an_adapter_that_is_trained_again_finds_no_page_of_before(
    log_dir: Path, tmp_path: Path
) -> None:
    """Its name and path are the same, and so is SGLang's id of it."""
    store, folder = tmp_path / "store", tmp_path / "adapter"
    path = adapter_path(tmp_path / "plugin")
    flags = (*ADAPTER_FLAGS, "--lora-paths", f"a={write_adapter(folder, seed=1)}")
    with start(log_dir, "lora-first", store, SPARSE, flags=flags, python_path=path) as server:
        base = ask_and_store(server, DOCUMENT, 93)
        first = server.generate(DOCUMENT, NEW_TOKENS, lora_path="a")
        wait_for(server, "storage_offloaded_pages", 2 * 93)
    assert first.cached == 0 and first.ids != base.ids
    before = write_adapter(tmp_path / "before", seed=1)
    write_adapter(folder, seed=2)
    with start(log_dir, "lora-second", store, SPARSE, flags=flags, python_path=path) as server:
        second = server.generate(DOCUMENT, NEW_TOKENS, lora_path="a")
        assert second.cached == 0
        computed = server.generate(DOCUMENT, NEW_TOKENS, lora_path="a", extra_key="alone")
        assert (computed.ids, computed.cached) == (second.ids, 0)
        again = server.generate(DOCUMENT, NEW_TOKENS)
        assert (again.ids, again.cached) == (base.ids, CACHED)
        # The first adapter, of another name, path and id.
        server.load_adapter("b", before)
        found = server.generate(DOCUMENT, NEW_TOKENS, lora_path="b")
        assert (found.ids, found.cached) == (first.ids, CACHED)
        server.unload_adapter("b")
        server.load_adapter("b", folder)
        found = server.generate(DOCUMENT, NEW_TOKENS, lora_path="b")
        assert (found.ids, found.cached) == (second.ids, CACHED)
        assert server.counted("storage_failed_loads") == (0,)


def damage(store: Path, seed: int) -> int:
    """Flip a bit in half of the pages, and cut one short. Returns how many were flipped."""
    rng, files = random.Random(seed), page_files(store)
    cut, *flipped = rng.sample(files, len(files) // 2)
    for path in flipped:
        with path.open("r+b") as file:
            at = rng.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    os.truncate(cut, cut.stat().st_size * 7 // 8)
    return len(flipped)


@more
@pytest.mark.parametrize("sign", few(["SIGTERM", "SIGKILL"], "SIGKILL"))
def test_a_server_that_ends_in_mid_offload_and_damaged_pages(
    sign: str, log_dir: Path, tmp_path: Path, tokens_without: Tokens
) -> None:
    """What it wrote until then is there and whole; the rest is computed, and what is damaged."""
    prompts = [tokens(1500, seed=s) for s in range(50, 56)]
    right = tokens_without(prompts)
    with start(log_dir, f"ended-{sign}", tmp_path, SPARSE) as server:
        for prompt in prompts:
            server.generate(prompt, 1)
        end_with = os.killpg if sign == "SIGKILL" else os.kill
        end_with(server.pid, signal.Signals[sign])
        wait_until(lambda: server._process.poll() is not None, "the server did not end")
    with start(log_dir, f"after-{sign}", tmp_path, SPARSE) as server:
        answers = [server.generate(prompt, 20) for prompt in prompts]
        assert [answer.ids for answer in answers] == right
        assert max(answer.cached for answer in answers) == CACHED
        assert server.counted("storage_damaged_pages", "storage_failed_loads") == (0, 0)
    assert damage(tmp_path, seed=1) > 100
    with start(log_dir, f"damaged-{sign}", tmp_path, SPARSE) as server:
        for _ in range(2):
            assert [server.generate(prompt, 20).ids for prompt in prompts] == right
        assert sum(server.counted("storage_damaged_pages", "storage_lost_pages")) > 0


#: A store that hangs in each read while a file exists; a package of its own.
HANGING = """
    import os, time

    from hisparse.storage import FileStore

    def install() -> None:
        get = FileStore.get

        def slow(self, *args, **options):
            while os.path.exists(os.environ["HANG_WHILE"]):
                time.sleep(0.05)
            return get(self, *args, **options)

        FileStore.get = slow
"""


@more
def test_a_store_that_hangs_delays_no_one_beyond_the_limit(log_dir: Path, tmp_path: Path) -> None:
    store, hang = tmp_path / "store", tmp_path / "hang"
    prompts = [tokens(600, seed=s) for s in range(80, 84)]
    with start(log_dir, "before-hang", store, SPARSE) as server:
        right = [server.generate(prompt, 20).ids for prompt in prompts]
        wait_for(server, "storage_offloaded_pages", 4 * 37)
    plugin = make_plugin(tmp_path / "p", "hanging:install", HANGING)
    hang.touch()
    options: dict[str, Any] = {"env": {"HANG_WHILE": str(hang)}, "python_path": [plugin]}
    with start(log_dir, "hang", store, SPARSE, storage={"timeout_s": 0.5}, **options) as server:
        answers = [server.generate(prompt, 20) for prompt in prompts]
        assert [(x.ids, x.cached) for x in answers] == [(ids, 0) for ids in right]
        late, failed = server.counted("storage_late_calls", "storage_failed_loads")
        assert late >= 1 and failed >= 1
        assert "timeout_s is 0.5" in server.log()
        hang.unlink()
        server.flush_cache()
        end = time.monotonic() + 90
        while not (answer := server.generate(prompts[0], 20)).cached:
            assert time.monotonic() < end, "the store was not tried again"
            server.flush_cache()
            time.sleep(0.5)
        assert (answer.ids, answer.cached) == (right[0], 592)


@more
@pytest.mark.parametrize("kind", few(["llama", "deepseek_v2"], "llama"))
def test_two_ranks_find_what_two_ranks_wrote(kind: str, log_dir: Path, tmp_path: Path) -> None:
    """Each its heads; of latents, which are the same on both, one writes for both."""
    options = {"kind": kind, "flags": ("--tp-size", "2"), "env": TWO_RANKS}
    config = SPARSE | {"device_memory": "200MB"}
    with start(log_dir, f"ranks-{kind}-first", tmp_path, config, **options) as server:
        # The metrics of both ranks are summed.
        writers = 2 if kind == "llama" else 1
        before = ask_and_store(server, DOCUMENT, 93 * writers)
    with start(log_dir, f"ranks-{kind}-second", tmp_path, config, **options) as server:
        after = server.generate(DOCUMENT, NEW_TOKENS)
        assert (after.ids, after.cached) == (before.ids, CACHED)
        assert server.counted("storage_loaded_pages") == (2 * 93,)


@more
@pytest.mark.skipif(not mooncake_master.is_installed(), reason="needs make mooncake-tools")
def test_two_servers_share_mooncake(
    log_dir: Path, tmp_path: Path, dense_tokens: DenseTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes, the other reads; then the server with the pages dies, and then the master."""
    monkeypatch.setenv("LD_LIBRARY_PATH", mooncake_master.LIBRARY_PATH)
    tools = {"python_path": [mooncake_master.TOOLS], "forked": False}
    prompts, right = PROMPTS.prompts[3:6], dense_tokens("llama", PROMPTS)[3:6]
    with mooncake_master.running(tmp_path) as master:
        storage = {"backend": "mooncake", "options": master.options, "timeout_s": 2.0}
        config, other = SPARSE | {"storage": storage}, ROOMY | {"host_layout": "page_first"}
        reader = start(log_dir, "mooncake-reader", None, other | {"storage": storage}, **tools)
        with start(log_dir, "mooncake-writer", None, config, **tools) as writer, reader:
            sparse = ask_and_store(writer, prompts[2], 93)
            answer = reader.generate(prompts[2], NEW_TOKENS)
            assert (answer.ids, answer.cached) == (right[2], CACHED)
            assert reader.counted("storage_loaded_pages", "storage_failed_loads") == (93, 0)
            writer.flush_cache()
            again = writer.generate(prompts[2], NEW_TOKENS)
            assert (again.ids, again.cached) == (sparse.ids, CACHED)
            # Each server holds a part of the store.
            writer.stop()
            reader.flush_cache()
            assert [reader.generate(p, NEW_TOKENS).ids for p in prompts] == right
            master.process.kill()
            reader.flush_cache()
            assert [reader.generate(p, NEW_TOKENS).ids for p in prompts] == right
