"""Servers whose store is on a full disk or written by two at once, and whose weights change."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checks import wait_for, wait_until
from harness import Answer, Refused, Server
from plugins import make_plugin
from settings import ROOMY, SPARSE
from test_storage import CACHED, DOCUMENT, FLAGS, ask_and_store, start
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, DenseTokens, tokens

from hisparse.storage import FileStore
from tests.sizes import PART
from tests.storage.pages import page_files

pytestmark = pytest.mark.skipif(PART != "faults", reason="servers: make test-all PART=faults")

#: The disk is full while a file exists, as the writer of pages sees it.
FULL = """
    import errno, os

    from hisparse.storage.pages import PageFolder

    def install() -> None:
        write = PageFolder.write

        def limited(self, *args, **options):
            if os.path.exists(os.environ["FULL_WHILE"]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(self, *args, **options)

        PageFolder.write = limited
"""


#: Of a machine that runs two servers beside other work; the faults here are none of time.
PATIENT = {"timeout_s": 60.0}


def answers_of(server: Server, prompts: list[list[int]]) -> list[Answer]:
    return [server.generate(prompt, 20) for prompt in prompts]


def ids_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]


def test_a_full_disk(log_dir: Path, tmp_path: Path) -> None:
    """What does not fit is computed; once there is space, it is stored."""
    store, full = tmp_path / "store", tmp_path / "full"
    prompts = [tokens(1500, seed=s) for s in range(90, 94)]
    with start(log_dir, "reference", None, SPARSE) as server:
        right = ids_of(answers_of(server, prompts))
    plugin = make_plugin(tmp_path / "p", "full:install", FULL)
    options: dict[str, Any] = {"env": {"FULL_WHILE": str(full)}, "python_path": [plugin]}
    options["storage"] = PATIENT
    full.touch()
    with start(log_dir, "full", store, SPARSE, **options) as server:
        for _ in range(2):
            assert ids_of(answers_of(server, prompts)) == right
            wait_for(server, "storage_failed_offloads", 1)
            server.flush_cache()
        assert not page_files(store), "the disk was not full"
        full.unlink()
        end = time.monotonic() + 60
        while True:
            answers = answers_of(server, prompts)
            assert ids_of(answers) == right
            if all(answer.cached == CACHED for answer in answers):
                break
            assert time.monotonic() < end, "pages are not stored once there is space"
            server.flush_cache()
        assert server.counted("storage_damaged_pages", "storage_errors") == (0, 0)
    with start(log_dir, "after-full", store, SPARSE) as server:
        answers = answers_of(server, prompts)
        assert [(x.ids, x.cached) for x in answers] == [(ids, CACHED) for ids in right]


def test_two_servers_that_write_the_same_prompts_at_once(
    log_dir: Path, tmp_path: Path, dense_tokens: DenseTokens
) -> None:
    """With other settings and layouts; a third, dense one reads what both wrote."""
    prompts, right = PROMPTS.prompts[2:7], dense_tokens("llama", PROMPTS)[2:7]
    pages = sum(len(prompt) // 16 for prompt in prompts)
    other = SPARSE | {"host_layout": "page_first"}
    first = start(log_dir, "two-dense", tmp_path, ROOMY | {"algorithm": "quest"}, storage=PATIENT)
    with first, start(log_dir, "two-sparse", tmp_path, other, storage=PATIENT) as second:
        with ThreadPoolExecutor(2) as pool:
            dense, sparse = pool.map(
                lambda server: server.generate_many(prompts, NEW_TOKENS), (first, second)
            )
        assert ids_of(dense) == right
        names = ("storage_offloaded_pages", "storage_known_pages")
        for server in (first, second):
            counted = partial(server.counted, *names)
            wait_until(lambda of=counted: sum(of()) >= pages, "pages are not stored")
            assert server.counted("storage_failed_offloads", "storage_errors") == (0, 0)
        second.flush_cache()
        assert ids_of(second.generate_many(prompts, NEW_TOKENS)) == ids_of(sparse)
    with start(log_dir, "two-reader", tmp_path, ROOMY) as server:
        answers = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
        assert ids_of(answers) == right
        assert [x.cached for x in answers] == [(len(p) - 1) // 16 * 16 for p in prompts]
        assert server.counted("storage_damaged_pages", "storage_failed_loads") == (0, 0)
    with FileStore(tmp_path) as store:
        report = store.verify()
        assert report.damaged == () and report.pages >= pages


def other_weights(folder: Path) -> Path:
    """The tiny model with other keys and values."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_model("llama"), folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if "k_proj.weight" in name or "v_proj.weight" in name]:
        weights[name] = weights[name].roll(1, dims=1).contiguous()
    save_file(weights, file, {"format": "pt"})
    return folder


def update(server: Server, model: Path, **options: Any) -> None:
    """SGLang's live update of the weights."""
    reply = server._post("/update_weights_from_disk", {"model_path": str(model)} | options)
    assert reply.json()["success"], reply.text


def test_a_live_update_of_the_weights(log_dir: Path, tmp_path: Path) -> None:
    """Pages of the old weights are not served to the new ones, and come back with the old ones."""
    model, store = other_weights(tmp_path / "model"), tmp_path / "store"
    with Server(model, log_dir / "new-weights.log", *FLAGS, config=SPARSE) as server:
        right = server.generate(DOCUMENT, NEW_TOKENS).ids
    with start(log_dir, "updated", store, SPARSE, storage=PATIENT) as server:
        old = ask_and_store(server, DOCUMENT, 93)
        assert old.ids != right
        update(server, model)
        new = server.generate(DOCUMENT, NEW_TOKENS)
        assert (new.ids, new.cached) == (right, 0)
        wait_for(server, "storage_offloaded_pages", 2 * 93)
        server.flush_cache()
        again = server.generate(DOCUMENT, NEW_TOKENS)
        assert (again.ids, again.cached) == (right, CACHED)
        update(server, tiny_model("llama"))
        back = server.generate(DOCUMENT, NEW_TOKENS)
        assert (back.ids, back.cached) == (old.ids, CACHED)
        # Without a flush the store rests: nothing computed by a mixture is written or read.
        update(server, model, flush_cache=False)
        server.generate(tokens(400, seed=401), 1)
        assert "/flush_cache" in server.log()
        assert server.counted("storage_offloaded_pages") == (2 * 93,)
        server.flush_cache()
        after = server.generate(DOCUMENT, NEW_TOKENS)
        assert (after.ids, after.cached) == (right, CACHED)
        # It also rests after an update that fails, and while one of several calls is open.
        with pytest.raises(Refused):
            update(server, tmp_path)
        server.generate(tokens(400, seed=402), 1)
        server._post("/begin_weight_update", {})
        server.flush_cache()
        server.generate(tokens(400, seed=403), 1)
        server._post("/end_weight_update", {})
        assert server.generate(DOCUMENT, NEW_TOKENS).cached == 0
        assert server.counted("storage_offloaded_pages") == (2 * 93,)
        server.flush_cache()
        assert server.generate(DOCUMENT, NEW_TOKENS).cached == CACHED
    # A server that was started with the new weights shares their pages.
    log, config = log_dir / "new-again.log", SPARSE | {"storage": {"path": str(store)}}
    with Server(model, log, *FLAGS, config=config) as server:
        fresh = server.generate(DOCUMENT, NEW_TOKENS)
        assert (fresh.ids, fresh.cached) == (right, CACHED)
