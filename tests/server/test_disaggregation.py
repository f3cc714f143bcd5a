"""A prompt prefilled in one process and decoded in another; K and V move over Mooncake."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import disaggregated
import mooncake_master
import pytest
import settings
from checks import assert_nothing_held, certain
from disaggregated import Pair
from harness import Refused, Server
from parts import MORE, few
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, RETRACTED, SHARED, DenseTokens, tokens

pytestmark = [
    *MORE,
    pytest.mark.skipif(not mooncake_master.is_installed(), reason="needs make mooncake-tools"),
]

modes = pytest.mark.modes

#: Requests on their way have rows too.
SPARSE = settings.SPARSE | {"device_memory": "24MB"}
DENSE = SPARSE | {"budget": 4096, "device_buffer_size": 4096, "device_memory": "600MB"}
FLAGS = ("--chunked-prefill-size", "512", "--max-running-requests", "8")
POOL = ("--max-total-tokens", "40000")
#: What a token has to lead the second best by, where K and V are in eight bits.
FP8_LEAD = 0.05
#: A long prompt, short ones at the edges of a page, and prompts with a common prefix.
DOCUMENTS = [tokens(n, seed=n) for n in (7000, 801, 48, 15)] + SHARED.prompts

INDEXER = settings.DSA | {"host_memory": "1GiB", "device_memory": "200MB"}
MSA = settings.MSA | {"host_memory": "1GiB", "device_memory": "200MB"}


def leaks_nothing(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        assert_nothing_held(server)


FP8 = {"kv_cache_dtype": "fp8_e4m3"}
LATENTS = SPARSE | {"device_memory": "200MB"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sketch": ("llama", SPARSE),
    "quest": ("qwen2", SPARSE | {"algorithm": "quest", "selection_scope": "layer"}),
    "fp8": ("llama", SPARSE | FP8),
    "latents": ("deepseek_v2", LATENTS),
    "fp8 latents": ("deepseek_v2", LATENTS | FP8),
    "indexer": ("deepseek_v32", INDEXER),
    "fp8 indexer": ("deepseek_v32", INDEXER | FP8),
    "shared selections": ("glm_moe_dsa", INDEXER),
    "indexer of blocks": ("minimax_m3", MSA),
    "fp8 indexer of blocks": ("minimax_m3", MSA | FP8),
    "windows": ("gemma3", SPARSE),
    "windows, caps": ("gemma2", SPARSE),
}
OF_MODEL = {"minimax_m3": settings.MSA_FLAGS}


@pytest.mark.parametrize("name", few(CASES, "sketch"))
def test_sparse_tokens_are_those_of_one_process(name: str, log_dir: Path) -> None:
    kind, config = CASES[name]
    env = {"TORCHDYNAMO_DISABLE": "1"}
    flags, options = (*FLAGS, *POOL, *OF_MODEL.get(kind, ())), {"config": config}
    log = log_dir / f"one-{name}.log"
    with Server(tiny_model(kind), log, *flags, **options, env=env) as server:
        right = [server.generate(prompt, NEW_TOKENS, top_logprobs=2) for prompt in DOCUMENTS]
    both = {"prefill": options, "decode": options, "env": env}
    with disaggregated.running(log_dir, name, kind, *flags, **both) as pair:
        assert [pair.generate(p, NEW_TOKENS).ids for p in DOCUMENTS] == [a.ids for a in right]
        pair.flush_cache()
        # Prompts that come together are cut into other pieces.
        sure = [certain(answer, FP8_LEAD if "fp8" in name else 0.0) for answer in right]
        together = zip(pair.generate_many(DOCUMENTS, NEW_TOKENS), sure, strict=True)
        assert [answer.ids[: len(same)] for answer, same in together] == sure
        assert sum(map(len, sure)) >= 12
        leaks_nothing(pair)


STOCK = {"backend": "torch_native"}
#: hisparse's pages, and what runs on a CPU.
STOCK_FLAGS = ("--page-size", "16", "--disable-overlap-schedule")
STOCK_FLAGS += ("--disaggregation-decode-retraction-backup", "cpu_tensor")


@modes
@pytest.mark.parametrize("stock", ["prefill", "decode"])
def test_one_server_of_a_pair_may_be_sglangs_own(
    stock: str, log_dir: Path, dense_tokens: DenseTokens
) -> None:
    servers: dict[str, Any] = {"prefill": {"config": DENSE}, "decode": {"config": DENSE}}
    servers |= {stock: STOCK, f"{stock}_flags": STOCK_FLAGS}
    name = f"stock-{stock}"
    with disaggregated.running(log_dir, name, "llama", *FLAGS, *POOL, **servers) as pair:
        for case in (PROMPTS, SHARED):
            answers = pair.generate_many(case.prompts, NEW_TOKENS)
            assert [a.ids for a in answers] == dense_tokens("llama", case)


@modes
def test_a_decode_server_that_keeps_prefixes(log_dir: Path) -> None:
    """Only what follows a prefix that it has is sent."""
    flags, options = (*FLAGS, *POOL), {"config": SPARSE}
    turns = [SHARED.prompts[0], SHARED.prompts[0] + tokens(100, seed=9), SHARED.prompts[1]]
    with Server(tiny_model("llama"), log_dir / "one-kept.log", *flags, **options) as server:
        right = [server.generate(prompt, NEW_TOKENS).ids for prompt in turns]
    both: dict[str, Any] = {"prefill": options, "decode": options}
    both |= {"decode_flags": ["--disaggregation-decode-enable-radix-cache"]}
    with disaggregated.running(log_dir, "kept", "llama", *flags, **both) as pair:
        answers = [pair.generate(prompt, NEW_TOKENS) for prompt in turns]
        assert [answer.ids for answer in answers] == right
        assert [a.ids for a in pair.generate_many(turns, NEW_TOKENS)] == right
        leaks_nothing(pair)


@modes
def test_servers_with_different_page_sizes(log_dir: Path) -> None:
    """Requests end with an error after SGLang's retries, and the decode server goes on."""
    options = {"config": SPARSE}
    both: dict[str, Any] = {"prefill": options, "decode": options}
    both |= {"decode_flags": ("--page-size", "32"), "prefill_flags": ("--page-size", "16")}
    env = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "10"}
    with disaggregated.running(log_dir, "pages", "llama", *FLAGS, *POOL, env=env, **both) as pair:
        for prompt in PROMPTS.prompts[:2]:
            with pytest.raises(Refused):
                pair.generate(prompt, NEW_TOKENS)
        lines = [x for x in pair.decode.log().splitlines() if "hisparse: error: " in x]
        assert len(lines) == 1
        assert "page_size=16, but decode server has page_size=32" in lines[0]
        leaks_nothing(pair)


@modes
def test_requests_that_the_decode_server_retracts(log_dir: Path, dense_tokens: DenseTokens) -> None:
    """Their K and V are kept, so they continue where they were."""
    right, options = dense_tokens("llama", RETRACTED), {"config": DENSE}
    small = ("--max-total-tokens", "4096", "--num-reserved-decode-tokens", "16")
    both: dict[str, Any] = {"prefill": options, "decode": options}
    both |= {"decode_flags": small, "prefill_flags": POOL}
    flags = ("--max-running-requests", "8")
    with disaggregated.running(log_dir, "retracted", "llama", *flags, **both) as pair:
        answers = pair.generate_many(RETRACTED.prompts, RETRACTED.new_tokens, ignore_eos=False)
        assert [a.ids for a in answers] == right
        assert any(answer.retractions for answer in answers), "the pool is too large"
        leaks_nothing(pair)


@pytest.fixture(scope="module")
def expected(log_dir: Path) -> list[list[int]]:
    """Sparse tokens of ``PROMPTS`` in one process."""
    options = {"config": SPARSE}
    flags = (*FLAGS, *POOL)
    with Server(tiny_model("llama"), log_dir / "one.log", *flags, **options) as server:
        return [server.generate(prompt, NEW_TOKENS).ids for prompt in PROMPTS.prompts]


def start_again(server: Server) -> None:
    """The same server on the same port, after its end."""
    server.stop()
    server.__enter__()


def until_right(pair: Pair, prompt: list[int], right: list[int]) -> None:
    """Ask until the servers know of each other again, for a minute."""
    end = time.monotonic() + 60
    while True:
        try:
            assert pair.generate(prompt, NEW_TOKENS).ids == right
            return
        except (Refused, RuntimeError):
            if time.monotonic() > end:
                raise
            time.sleep(1)


@modes
@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_the_other_server_goes_on_when_one_is_killed(
    killed: str, log_dir: Path, expected: list[list[int]]
) -> None:
    options, prompts = {"config": SPARSE}, PROMPTS.prompts
    # How long a server waits for one that is gone.
    env = {
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "10",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "10",
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    }
    both: dict[str, Any] = {"prefill": options, "decode": options, "env": env}
    name = f"killed-{killed}"
    with disaggregated.running(log_dir, name, "llama", *FLAGS, *POOL, **both) as pair:
        assert pair.generate(prompts[0], NEW_TOKENS).ids == expected[0]
        gone = getattr(pair, killed)
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(pair.generate, p, NEW_TOKENS) for p in prompts]
            time.sleep(0.3)
            gone.stop()
            # Requests that had all they need end as ever; the others end with an error.
            for reply, right in zip(asked, expected, strict=True):
                error = reply.exception()
                assert error or reply.result().ids == right
        start_again(gone)
        until_right(pair, prompts[1], expected[1])
        assert [a.ids for a in pair.generate_many(prompts, NEW_TOKENS)] == expected
        leaks_nothing(pair)


@modes
def test_aborts_on_either_server(log_dir: Path, expected: list[list[int]]) -> None:
    options, prompts = {"config": SPARSE}, PROMPTS.prompts
    both: dict[str, Any] = {"prefill": options, "decode": options}
    with disaggregated.running(log_dir, "aborts", "llama", *FLAGS, *POOL, **both) as pair:
        with ThreadPoolExecutor(12) as threads:
            asked = [threads.submit(pair.generate, p, NEW_TOKENS) for p in prompts]
            for number, delay_s in enumerate((0.0, 0.1, 0.3, 1.0)):
                rid = f"aborted-{number}"
                lost = threads.submit(pair.generate, prompts[-1], 4000, rid=rid)
                # The first may come before the request.
                while not lost.done():
                    time.sleep(delay_s or 0.05)
                    for server in (pair.decode, pair.prefill):
                        server._post("/abort_request", {"rid": rid})
                assert lost.exception() or len(lost.result().ids) < 4000
            assert [reply.result().ids for reply in asked] == expected
        leaks_nothing(pair)


def test_a_decode_server_alone_with_made_up_transfers(log_dir: Path) -> None:
    """SGLang's ``fake`` backend: nothing is sent, and the life cycle of requests is the same."""
    flags = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
    flags += (*FLAGS, *POOL)
    # SGLang's name for no prefill server.
    room = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
    with Server(tiny_model("llama"), log_dir / "fake.log", *flags, config=SPARSE) as server:
        for _ in range(2):
            answers = server.generate_many(PROMPTS.prompts, NEW_TOKENS, **room)
            assert [len(answer.ids) for answer in answers] == [NEW_TOKENS] * len(answers)
        assert_nothing_held(server)
