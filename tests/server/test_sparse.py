"""A budget far below the context: what a request gets depends on nothing but the request."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import assert_nothing_held
from conftest import DenseTokens
from harness import Server
from prometheus import ROOT, running_prometheus
from tiny_models import KV_HEADS, LAYERS, TOKEN_BYTES, tiny_model
from workload import NEW_TOKENS, PROMPTS, SHARED, tokens

from hisparse.cli import main

PAGE = 16
BUDGET = 128
#: Pages that a step selects when there are so many; the tail page is attended on top.
WIDTH = BUDGET // PAGE - 1
#: Device pages for one context of 3,000 tokens, but not for eight of 1,000.
CONFIG = {
    "budget": BUDGET,
    "device_buffer_size": BUDGET,
    "host_memory": "1GiB",
    "device_memory": "14MB",
    "selection_scope": "kv_head",
}


@pytest.fixture(scope="module")
def running(log_dir: Path) -> Iterator[Server]:
    flags = ("--max-total-tokens", "40000", "--max-running-requests", "8")
    log = log_dir / "sparse.log"
    with Server(tiny_model("llama"), log, *flags, config=CONFIG) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.flush_cache()
    return running


@pytest.fixture(scope="module")
def alone(running: Server) -> list[list[int]]:
    """Tokens of each prompt when nothing else runs and nothing is cached."""
    found = []
    for prompt in PROMPTS.prompts:
        running.flush_cache()
        found.append(running.generate(prompt, NEW_TOKENS).ids)
    return found


def test_sparse_tokens_are_not_the_dense_ones(
    alone: list[list[int]], dense_tokens: DenseTokens
) -> None:
    """Otherwise the tests below would show nothing."""
    same = [a == d for a, d in zip(alone, dense_tokens("llama", PROMPTS), strict=True)]
    assert same[0], "50 + 40 tokens are within the budget"
    assert not any(same[4:]), "contexts of 801 tokens and more are far beyond the budget"


@pytest.mark.parametrize("order", ["as they are", "reversed", "one after the other"])
def test_tokens_do_not_depend_on_what_else_runs(
    server: Server, alone: list[list[int]], order: str
) -> None:
    step = -1 if order == "reversed" else 1
    delay = 0.1 if order == "one after the other" else 0.0
    before = server.counted("decode_read_bytes")[0]
    # All run at the same time unless this process, which sends them, has to wait for a core.
    for _ in range(10):
        answers = server.generate_many(PROMPTS.prompts[::step], NEW_TOKENS, delay_s=delay)
        assert [a.ids for a in answers][::step] == alone
        if delay or server.counted("decode_read_bytes")[0] > before:
            return
    raise AssertionError("rows did not shrink: no misses")


def test_rows_shrink_and_grow_while_a_long_request_decodes(server: Server) -> None:
    """Waves of others come and go during 300 steps of one request."""
    prompt = PROMPTS.prompts[-1]
    expected = server.generate(prompt, 300).ids
    server.flush_cache()
    others = [tokens(1000, seed=s) for s in range(200, 207)]
    with ThreadPoolExecutor(1) as thread:
        long = thread.submit(server.generate, prompt, 300)
        waves = 0
        reads = server.counted("decode_read_bytes")
        while not long.done():
            server.generate_many([[*other, 2 + waves] for other in others], 10)
            waves += 1
        assert long.result().ids == expected
    assert waves >= 2, f"only {waves} waves of other requests"
    assert server.counted("decode_read_bytes") > reads, "rows did not shrink: no misses"
    assert server.generate(prompt, 300).ids == expected


def test_a_shared_prefix_gives_what_each_gives_alone(server: Server) -> None:
    expected = []
    for prompt in SHARED.prompts:
        server.flush_cache()
        expected.append(server.generate(prompt, NEW_TOKENS))
    assert [a.cached for a in expected] == [0, 0, 0]
    server.flush_cache()
    one_by_one = [server.generate(p, NEW_TOKENS) for p in SHARED.prompts]
    assert [a.cached for a in one_by_one] == [0, 992, 992]
    assert [a.ids for a in one_by_one] == [a.ids for a in expected]
    together = server.generate_many(SHARED.prompts * 2, NEW_TOKENS)
    assert [a.ids for a in together] == [a.ids for a in expected] * 2


def test_nothing_is_held_when_all_requests_have_ended(server: Server) -> None:
    total = server.counted("host_tokens_total")[0]
    assert total == 40000
    server.generate_many(PROMPTS.prompts, NEW_TOKENS)
    server.abort_after(PROMPTS.prompts[4], num_tokens=5, max_new_tokens=500)
    assert_nothing_held(server)


def test_a_lone_request_with_room_for_its_context_reads_nothing_while_it_decodes(
    server: Server,
) -> None:
    prompt = PROMPTS.prompts[-1]
    before = server.counted("decode_read_bytes", "written_bytes", "hit_pages", "miss_pages")
    server.generate(prompt, 20)
    middle = server.counted("decode_read_bytes", "written_bytes", "hit_pages", "miss_pages")
    server.flush_cache()
    server.generate(prompt, 50)
    after = server.counted("decode_read_bytes", "written_bytes", "hit_pages", "miss_pages")
    assert after[0] == before[0], "bytes were read from host memory while decoding"
    assert after[3] == before[3], "a selected page was not resident"
    assert after[2] > middle[2] > before[2], "nothing was selected"
    written = (after[1] - middle[1]) - (middle[1] - before[1])
    assert written == 30 * TOKEN_BYTES, "30 tokens more write their K and V in each layer, once"


def test_eight_requests_hold_their_device_buffer_each(server: Server) -> None:
    prompts = [tokens(1000, seed=s) for s in range(300, 308)]
    total = server.counted("device_tokens_total")[0]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(server.generate_many, prompts, 600)
        held = []
        while not running.done():
            held.append(server.counted("device_tokens_used")[0])
            time.sleep(0.1)
        assert all(len(a.ids) == 600 for a in running.result())
    assert 8 * KV_HEADS * BUDGET <= max(held) <= total
    assert total < 8 * KV_HEADS * 1000, "all contexts fit, rows did not have to shrink"


def _selected(prompt: int, new_tokens: int) -> tuple[int, int]:
    """Pages selected, and tokens of tail pages attended, over the steps of one request."""
    lengths = range(prompt + 1, prompt + new_tokens)
    pages = sum(min((n - 1) // PAGE, WIDTH) for n in lengths)
    tails = sum((n - 1) % PAGE + 1 for n in lengths)
    return pages * LAYERS * KV_HEADS, tails * LAYERS * KV_HEADS


@pytest.mark.parametrize("together", [False, True], ids=["alone", "eight together"])
def test_hits_and_misses_add_up_to_the_pages_selected(server: Server, together: bool) -> None:
    """The difference between long and short answers, so that steps that the overlap scheduler
    starts before it knows that a request is over cancel out."""
    lengths = [20, 50, 100, 120, 300, 801, 1500, 2000] if together else [90]
    prompts = [tokens(n, seed=n + 400) for n in lengths]
    names = ("hit_pages", "miss_pages", "selected_tokens", "written_bytes")
    seen = []
    for new_tokens in (10, 60):
        server.flush_cache()
        before = server.counted(*names)
        server.generate_many(prompts, new_tokens)
        after = server.counted(*names)
        seen.append([a - b for a, b in zip(after, before, strict=True)])
    hits, misses, selected, written = (b - a for a, b in zip(*seen, strict=True))
    pages = tails = 0
    for n in lengths:
        more, less = _selected(n, 60), _selected(n, 10)
        pages += more[0] - less[0]
        tails += more[1] - less[1]
    assert written == 50 * len(lengths) * TOKEN_BYTES
    assert hits + misses == pages
    assert selected == pages * PAGE + tails


def test_every_panel_of_the_dashboard_has_data(server: Server, tmp_path: Path) -> None:
    dashboard = json.loads((ROOT / "dashboards" / "hisparse.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$__rate_interval", "5m")
        .replace("$model", ".*")
        for panel in panels
        for target in panel["targets"]
    }
    assert len(panels) >= 10
    with running_prometheus(server.url, tmp_path) as prometheus:
        end = time.monotonic() + 180
        missing = dict(queries)
        # A rate is of what rises between two scrapes.
        while missing and time.monotonic() < end:
            server.generate_many(PROMPTS.prompts[-2:], 20)
            missing = {k: text for k, text in missing.items() if not prometheus.query(text)}
        assert not missing, prometheus.scrape_error()
        assert prometheus.query('{__name__=~"hisparse[:_]host_tokens_total"}') == [40000]
        assert not prometheus.query('{__name__=~"hisparse[:_]no_such_metric"}')


def test_top_shows_what_a_server_does(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(server.generate_many, PROMPTS.prompts[-2:], 400)
        while server.metrics()["sglang:num_running_reqs"] < 2:
            assert not running.done()
        assert main(["top", server.url, "--json", "--interval", "500ms"]) == 0
        running.result()
    found = json.loads(capsys.readouterr().out)
    assert found["requests"]["running"] == 2
    assert found["tokens"]["host"]["total"] == 40000
    assert sum(map(len, PROMPTS.prompts[-2:])) <= found["tokens"]["host"]["used"] < 40000
    assert 0 < found["hit_ratio"]["recent"] <= 1
    assert found["per_second"]["written_bytes"] > 0
    assert found["hit_ratio_by_layer"] == {}, "layers are not counted unless asked for"
    assert main(["top", server.url, "--once", "--interval", "100ms"]) == 0
    out = capsys.readouterr().out
    assert "requests running" in out
    assert " of 40,000 " in out
