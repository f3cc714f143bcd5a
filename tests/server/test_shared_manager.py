"""Servers that share pages by a manager, which knows their places and sees none of their bytes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mooncake_master
import pytest
from checks import wait_for
from harness import Server
from parts import MORE, few
from plugins import make_plugin
from settings import ROOMY, SPARSE
from test_storage import CACHED, start
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, DenseTokens

from tests.kvcm.manager import Forker, Manager, group, redis_server, running

pytestmark = MORE
PROMPT = PROMPTS.prompts[5]


@dataclass
class Shared:
    """A manager, and what servers need to use it.

    Attributes:
        manager: the manager.
        storage: more options of the key ``storage``.
        tools: options of :class:`Server`.
    """

    manager: Manager
    storage: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(params=few(("files", "mooncake"), "files"))
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shared]:
    """A manager with SQLite and files, or with Redis and a Mooncake."""
    with ExitStack() as stack:
        store, found = str(tmp_path / "kvcm.db"), {}
        if request.param == "mooncake":
            if not mooncake_master.is_installed():
                pytest.skip("needs make mooncake-tools")
            store = stack.enter_context(redis_server(tmp_path))
            monkeypatch.setenv("LD_LIBRARY_PATH", mooncake_master.LIBRARY_PATH)
            monkeypatch.syspath_prepend(str(mooncake_master.TOOLS))
            found = stack.enter_context(mooncake_master.running(tmp_path)).options
        forker = Forker()
        stack.callback(forker.close)
        manager = stack.enter_context(running(forker, tmp_path, store=store, apart=False))
        if not found:
            manager.root.mkdir(mode=0o700)
            yield Shared(manager)
            return
        spec = {
            "metadata_connstring": found["metadata_server"],
            "master_service_entry": found["master_server_address"],
        }
        storage = {"global_unique_name": "mc", "mooncake": spec}
        manager.http.admin("addStorage", storage=storage)
        made = group("mooncake", storage_candidates=["mc"])
        manager.http.admin("createInstanceGroup", instance_group=made)
        tools = {"python_path": [mooncake_master.TOOLS], "forked": False}
        yield Shared(manager, {"manager_group": "mooncake", "size": "256MB"}, tools)


def managed(shared: Shared, config: dict[str, Any], **options: Any) -> dict[str, Any]:
    address = f"127.0.0.1:{shared.manager.ports['rpc']}"
    storage = {"manager": address, "timeout_s": 20.0} | shared.storage | options
    return config | {"storage": storage}


def test_two_servers_on_one_manager(
    log_dir: Path, shared: Shared, dense_tokens: DenseTokens
) -> None:
    """With other settings. Then the manager dies, comes back with all pages, and dies again."""
    *_, other_right, right = dense_tokens("llama", PROMPTS)[:6]
    manager, tools = shared.manager, shared.tools
    other = managed(shared, ROOMY | {"algorithm": "quest"}, timeout_s=2.0)
    reader = start(log_dir, "managed-reader", None, other, **tools)
    config = managed(shared, SPARSE)
    with start(log_dir, "managed-writer", None, config, **tools) as writer, reader:
        sparse = writer.generate(PROMPT, NEW_TOKENS)
        wait_for(writer, "storage_offloaded_pages", 93)
        answer = reader.generate(PROMPT, NEW_TOKENS)
        assert (answer.ids, answer.cached) == (right, CACHED)
        assert reader.counted("storage_loaded_pages", "storage_built_pages") == (93, 93)
        writer.flush_cache()
        again = writer.generate(PROMPT, NEW_TOKENS)
        assert (again.ids, again.cached) == (sparse.ids, CACHED)
        assert writer.counted("storage_loaded_pages", "storage_built_pages") == (93, 0)
        before = len(reader.log())  # SGLang's start may tell of a request of its own that failed.
        manager.kill()
        manager.start()
        assert _asked_again(reader).ids == right
        manager.kill()
        alone = reader.generate(PROMPTS.prompts[4], NEW_TOKENS)
        assert alone.ids == other_right
        assert "prompts are computed without the store" in reader.log()
        assert "UNAVAILABLE" in reader.log() and "Traceback" not in reader.log()[before:]


def _asked_again(server: Server, prompt: list[int] = PROMPT) -> Any:
    """The answer of a server that finds the prompt in the store."""
    end = time.monotonic() + 60
    while True:
        server.flush_cache()
        answer = server.generate(prompt, NEW_TOKENS)
        if answer.cached == (len(prompt) - 1) // 16 * 16:
            return answer
        assert time.monotonic() < end, "the prompt is not found"
        time.sleep(0.5)


def test_a_server_without_its_manager(log_dir: Path, dense_tokens: DenseTokens) -> None:
    storage = {"manager": "127.0.0.1:1", "timeout_s": 1.0}
    with start(log_dir, "no-manager", None, ROOMY | {"storage": storage}) as server:
        answer = server.generate(PROMPT, NEW_TOKENS)
        assert answer.ids == dense_tokens("llama", PROMPTS)[5]
        lines = [line for line in server.log().splitlines() if "127.0.0.1:1:" in line]
        assert "UNAVAILABLE" in lines[0] and "prompts are computed" in lines[0]
        assert len(lines) <= 3, lines


def stock(log_dir: Path, tmp_path: Path, shared: Shared, model: str, layout: str) -> Server:
    """SGLang without hisparse's attention, with its own hierarchical cache."""
    source = (Path(__file__).parent / "hicache_on_cpu.py").read_text()
    backend = {"backend_name": "kvcm", "class_name": "HiCacheKVCM", "model": model}
    backend |= {"module_path": "hisparse.sglang.hicache", "prefetch_threshold": 16}
    backend |= managed(shared, {})["storage"]
    plugin = make_plugin(tmp_path / "plugin", "hicache_on_cpu:load", source)
    return Server(
        tiny_model("llama"),
        log_dir / f"managed-stock-{layout}.log",
        *("--page-size", "16", "--max-total-tokens", "8000", "--enable-cache-report"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", layout, "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", json.dumps(backend)),
        backend="torch_native",
        **shared.tools | {"python_path": [plugin, *shared.tools.get("python_path", ())]},
    )


def test_a_server_without_hisparse_shares_pages_with_one_that_has_it(
    log_dir: Path, tmp_path: Path, shared: Shared, dense_tokens: DenseTokens
) -> None:
    right, other = dense_tokens("llama", PROMPTS), PROMPTS.prompts[4]
    tools = shared.tools
    with start(log_dir, "managed-sparse", None, managed(shared, SPARSE), **tools) as server:
        server.generate(PROMPT, NEW_TOKENS)
        wait_for(server, "storage_offloaded_pages", 93)
        (model,) = re.findall(r"storage: manager .*, model (\w{32}),", server.log())
        with stock(log_dir, tmp_path, shared, model, "layer_first") as without:
            answer = _asked_again(without)
            assert (answer.ids, answer.cached) == (right[5], CACHED)
            assert without.generate(other, NEW_TOKENS).ids == right[4]
            config = managed(shared, ROOMY)
            with start(log_dir, "managed-dense", None, config, **tools) as dense:
                assert _asked_again(dense, other).ids == right[4]
                assert dense.counted("storage_damaged_pages", "storage_errors") == (0, 0)
            before = len(without.log())
            shared.manager.kill()
            assert without.generate(PROMPTS.prompts[3], NEW_TOKENS).ids == right[3]
            assert "UNAVAILABLE" in without.log() and "Traceback" not in without.log()[before:]
