"""A budget far below the context: what a request gets depends on nothing but the request."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import PAGE, alone, counting, of_more_tokens, selected_between, wait_until
from harness import Server
from hugging_face import sparse_tokens
from parts import MORE
from prometheus import ROOT, running_prometheus
from settings import SPARSE
from tiny_models import CONTEXT, KV_HEADS, TOKEN_BYTES, tiny_model
from workload import NEW_TOKENS, PROMPTS, DenseTokens, tokens

BUDGET = SPARSE["budget"]


@pytest.fixture(scope="module")
def running(log_dir: Path) -> Iterator[Server]:
    flags = ("--max-total-tokens", "40000", "--max-running-requests", "8")
    log = log_dir / "sparse.log"
    flags += ("--log-level", "debug")
    with Server(tiny_model("llama"), log, *flags, config=SPARSE) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.flush_cache()
    return running


@pytest.fixture(scope="module")
def expected(running: Server) -> list[list[int]]:
    """Tokens of each prompt when nothing else runs and nothing is cached."""
    return alone(running, PROMPTS.prompts, NEW_TOKENS)


def test_sparse_tokens_are_not_the_dense_ones(
    expected: list[list[int]], dense_tokens: DenseTokens
) -> None:
    """Otherwise the tests below would show nothing."""
    same = [a == d for a, d in zip(expected, dense_tokens("llama", PROMPTS), strict=True)]
    assert same[0], "50 + 40 tokens are within the budget"
    assert not any(same[4:]), "contexts of 801 tokens and more are far beyond the budget"


@pytest.mark.parametrize("order", ["as they are", "reversed", "one after the other"])
def test_tokens_do_not_depend_on_what_else_runs(
    server: Server, expected: list[list[int]], order: str
) -> None:
    step = -1 if order == "reversed" else 1
    delay = 0.1 if order == "one after the other" else 0.0
    # All run at the same time unless this process, which sends them, has to wait for a core.
    for _ in range(10):
        with counting(server, "decode_read_bytes") as read:
            answers = server.generate_many(PROMPTS.prompts[::step], NEW_TOKENS, delay_s=delay)
        assert [a.ids for a in answers][::step] == expected
        if delay or read > [0]:
            return
    raise AssertionError("rows did not shrink: no misses")


def test_rows_shrink_and_grow_while_a_long_request_decodes(server: Server) -> None:
    """Waves of others come and go; the request goes on until some steps after the last."""
    prompt, others = PROMPTS.prompts[-1], [tokens(1000, seed=s) for s in range(200, 207)]

    def several_waves() -> None:
        for wave in (2, 3, 4, 5):
            server.generate_many([[*other, wave] for other in others], 10)

    (before,) = server.counted("decode_read_bytes")
    with (
        ThreadPoolExecutor(1) as thread,
        server.stream(prompt, CONTEXT - len(prompt) - 1) as events,
    ):
        next(events)
        waves, left = thread.submit(several_waves), 20
        while left:
            ids = next(events)["output_ids"]
            left -= waves.done()
        waves.result()
    # A busy server may publish its counters later.
    wait_until(
        lambda: server.counted("decode_read_bytes")[0] > before, "rows did not shrink: no misses"
    )
    # From the radix cache, and anew.
    assert server.generate(prompt, len(ids)).ids == ids
    server.flush_cache()
    assert server.generate(prompt, len(ids)).ids == ids


def test_a_transformers_cache_gives_the_same_tokens(expected: list[list[int]]) -> None:
    assert sparse_tokens("llama", PROMPTS.prompts, NEW_TOKENS, SPARSE) == expected


@pytest.mark.parametrize("kind", [pytest.param("qwen2", marks=MORE)])
def test_a_transformers_cache_gives_the_tokens_of_another_model(kind: str, log_dir: Path) -> None:
    flags = ("--max-total-tokens", "40000")
    with Server(tiny_model(kind), log_dir / f"{kind}.log", *flags, config=SPARSE) as server:
        served = [server.generate(p, NEW_TOKENS).ids for p in PROMPTS.prompts]
    assert sparse_tokens(kind, PROMPTS.prompts, NEW_TOKENS, SPARSE) == served


def test_a_lone_request_with_room_for_its_context_reads_nothing_while_it_decodes(
    server: Server,
) -> None:
    prompt, names = PROMPTS.prompts[-1], ("decode_read_bytes", "miss_pages", "hit_pages")
    seen = []
    for new_tokens in (20, 50):
        server.flush_cache()
        with counting(server, *names, "written_bytes") as counted:
            server.generate(prompt, new_tokens)
        assert counted[:2] == [0, 0], "bytes were read from host memory while decoding"
        assert counted[2] > 0, "nothing was selected"
        seen.append(counted[3])
    written = seen[1] - seen[0]
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


@pytest.mark.parametrize("together", [False, True], ids=["alone", "eight together"])
def test_hits_and_misses_add_up_to_the_pages_selected(server: Server, together: bool) -> None:
    lengths = [20, 50, 100, 120, 300, 801, 1500, 2000] if together else [90]
    names = ("selected_tokens", "hit_pages", "miss_pages", "written_bytes")
    selected, hits, misses, written = of_more_tokens(server, lengths, *names)
    pages, tails = selected_between(lengths)
    assert written == 50 * len(lengths) * TOKEN_BYTES
    assert hits + misses == pages
    assert selected == pages * PAGE + tails


def test_what_is_decided_for_each_request_is_counted_and_logged(server: Server) -> None:
    """In one batch: a short one, one that grows beyond the budget, a long one, a shared prefix."""
    shared = tokens(1500, seed=21)
    server.generate(shared, 1)
    prompts = {
        "short": tokens(50, seed=22),
        "grows": tokens(120, seed=23),
        "long": tokens(801, seed=24),
        "part": shared[:800] + tokens(300, seed=25),
    }
    before = server.counted_by("choice", "requests")
    with ThreadPoolExecutor(4) as threads:
        ask = [threads.submit(server.generate, ids, 40, rid=rid) for rid, ids in prompts.items()]
    assert [reply.result().cached for reply in ask] == [0, 0, 0, 800]
    after = server.counted_by("choice", "requests")
    assert {choice: after[choice] - before[choice] for choice in after} == {
        "resident": 2, "streamed": 0, "sparse": 3, "reused": 1,
    }  # fmt: skip
    line = r"hisparse: request (\w+): (\w+), (\d+) tokens, device pages of (\d+) tokens in each row"
    logged = {
        (rid, choice, int(n)): int(pages)
        for rid, choice, n, pages in re.findall(line, server.log())
    }
    ours = {each: pages for each, pages in logged.items() if each[0] in prompts}
    assert set(ours) == {
        ("short", "resident", 51),
        ("grows", "resident", 121),
        ("grows", "sparse", 129),
        ("long", "sparse", 802),
        ("part", "reused", 800),
        ("part", "sparse", 1101),
    }
    assert min(ours.values()) >= SPARSE["device_buffer_size"]


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
