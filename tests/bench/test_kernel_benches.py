"""``hisparse bench`` of ``diff-tables``, ``transfer``, ``swap-in``, ``decode``: small commands."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hisparse.algorithms import ALGORITHMS
from hisparse.kernels import sketch_score
from hisparse.types import PagedKV
from hisparse_bench import kernels, residency
from hisparse_bench.decode import DecodeBench, DecodeWorkload
from hisparse_bench.options import Options
from hisparse_bench.peers import flash_attention_decode, flash_mla_decode, reason_to_leave_out
from hisparse_bench.residency import DiffTablesBench, TransferBench, drifting_selections
from tests.command import Command
from tests.kernels.lru_oracle import LruOracle

SMALL = {
    "diff-tables": ["--rows", "2", "--width", "20", "--slots", "40"],
    "transfer": ["--pool-bytes", "1048576", "--page-bytes", "1024", "--pages", "16"],
    "swap-in": ["--batch", "2", "--width", "20", "--slots", "40", "--row-bytes", "656"],
    "decode": ["--context", "256", "--budget", "64", "--page-size", "8", "--head-dim", "16"],
}
OPTIONS = Options(device=torch.device("cpu"), num_steps=4)


@pytest.mark.parametrize("bench", SMALL)
def test_json_holds_the_gate_the_times_and_the_ratios(bench: str, command: Command) -> None:
    report = command.json("bench", bench, *SMALL[bench], "--steps", "4")
    (case,) = report["cases"]
    assert (report["command"], case["name"], case["gate"]) == (f"bench {bench}", bench, "passed")
    impls = [result["impl"] for result in case["results"]]
    peer = {"decode": "sdpa", "transfer": "memcpy"}.get(bench, "reference")
    assert peer in impls
    assert impls[-1] == "cpu"
    medians = {result["impl"]: result["median_us"] for result in case["results"]}
    assert case["ratios"][f"{peer}/cpu"] == pytest.approx(medians[peer] / medians["cpu"], rel=0.01)
    assert "cache" in case["params"]
    assert set(report["instruction_sets"]) == {"kernels", "torch"}
    assert_rates(case)


def assert_rates(case: dict[str, Any]) -> None:
    """GB/s is there for each implementation, and is the bytes of a step over its time."""
    for result in case["results"]:
        moved = case["params"]["bytes"]
        moved = moved[result["impl"]] if isinstance(moved, dict) else moved
        assert moved > 0
        assert result["gb_s"] == pytest.approx(moved / result["median_us"] / 1e3, rel=0.01)


@pytest.mark.parametrize("misses", ["0", "0.5"])
def test_bytes_of_a_decoded_layer(misses: str, command: Command) -> None:
    """Of 256 tokens: all K and V; or all keys, 7 pages of 8 tokens and a tail, misses twice."""
    flags = [*SMALL["decode"], "--misses", misses, "--algorithm", "oracle", "--steps", "5"]
    (case,) = command.json("bench", "decode", *flags)["cases"]
    params, key = case["params"], 16 * 4
    assert params["bytes"]["sdpa"] == 256 * 8 * 2 * key
    own = params["bytes"]["cpu"] - 256 * 8 * key
    tokens = own / (8 * 2 * key) - params["miss_ratio"] * 56
    assert 56 + 1 <= round(tokens, 1) <= 56 + 8
    assert (params["miss_ratio"] > 0) == (misses != "0")


def test_bytes_of_bookkeeping(command: Command) -> None:
    """A row's selection of 20, 40 slots and 3 misses."""
    (case,) = command.json("bench", "diff-tables", *SMALL["diff-tables"], "--steps", "4")["cases"]
    read, written = 20 + 40 + 40 + 20 + 3 + 3, 40 + 3 + 21 + 20 + 20 + 3
    assert case["params"]["bytes"] == 2 * 4 * (read + written)


@pytest.mark.parametrize(
    "algorithm", [name for name in ALGORITHMS if not ALGORITHMS.get(name).indexer]
)
def test_decode_with_every_algorithm(algorithm: str, command: Command) -> None:
    flags = [*SMALL["decode"], "--algorithm", algorithm, "--dtype", "bfloat16", "--steps", "5"]
    (case,) = command.json("bench", "decode", *flags)["cases"]
    assert (case["gate"], case["params"]["algorithm"]) == ("passed", algorithm)
    assert case["params"]["dtype"] == "bfloat16"


DSA = ["--context", "256", "--budget", "64", "--q-heads", "4", "--algorithm", "dsa", "--steps", "4"]


@pytest.mark.parametrize("misses", ["0.15", "0"])
def test_decode_of_a_model_with_an_indexer(misses: str, command: Command) -> None:
    """With latents and an indexer of the widths of DeepSeek-V3.2."""
    flags = [*DSA, "--misses", misses, "--batch", "2"]
    (case,) = command.json("bench", "decode", *flags)["cases"]
    assert case["gate"] == "passed"
    params = case["params"]
    assert (params["kv_heads"], params["head_dim"], params["v_head_dim"]) == (1, 576, 512)
    assert (params["page_size"], params["index_dim"], params["q_heads"]) == (1, 128, 4)
    assert [result["impl"] for result in case["results"]] == ["sdpa", "cpu"]
    assert params["left_out"] == {"torch_native": "it is timed only for MHA and GQA"}
    assert (params["miss_ratio"] > 0) == (misses != "0")


def test_the_gate_of_a_model_with_an_indexer_sees_a_wrong_selection() -> None:
    bench = DecodeBench(context=256, budget=64, q_heads=4, algorithm="dsa")
    work = DecodeWorkload(bench._make_requests(OPTIONS, 32), 0.15)
    assert work.agrees()
    attend = work.requests.attend
    policy = work.requests.policy
    work.requests.policy = dataclasses.replace(policy, tail_below=None)
    assert not work.agrees(), "with the tail token twice, or one that is not attended"
    work.requests.policy = policy
    assert work.agrees()
    work.requests.attend = lambda layer, query: attend(layer, query.flip(1))
    assert not work.agrees()


@pytest.mark.parametrize("flag", ["--page-size", "--kv-heads", "--head-dim"])
def test_the_shape_of_a_model_with_an_indexer_is_given(flag: str, command: Command) -> None:
    line = command.refused("bench", "decode", *DSA, flag, "32")
    assert f"{flag}: got 32, expected " in line
    assert "DeepSeek-V3.2" in line


LIMITS = ["--context", "256", "--budget", "64", "--head-dim", "16", "--steps", "4"]
LIMITS += ["--footprint", "1"]


def test_kernels_beside_the_limits_of_the_processor(command: Command) -> None:
    before = torch.get_num_threads()
    cases = command.json("bench", "kernels", *LIMITS)["cases"]
    assert {case["gate"] for case in cases} == {"passed"}
    found = {(case["name"], case["params"]["dtype"], case["params"]["threads"]) for case in cases}
    works = {("page_score", x) for x in ("float8_e4m3fn", "bfloat16", "float32")}
    works |= {("sketch_score", "uint8")}
    works |= {
        (f"paged_attention{rows}", x)
        for rows in ("", ", misses")
        for x in ("float8_e4m3fn", "bfloat16", "float16", "float32")
    }
    assert found == {(*work, threads) for work in works for threads in {1, before}}
    for case in cases:
        assert [x["impl"] for x in case["results"]] == ["multiply_add", "read", case["name"]]
        params, (_, read, own) = case["params"], case["results"]
        assert own["gb_s"] == pytest.approx(params["bytes"] / own["median_us"] / 1e3, rel=0.01)
        needs = {
            "read": read["median_us"],
            "multiply_add": 2e-3 * params["multiply_adds"] / params["peak_gflop_s"],
        }
        assert params["limit"] == max(needs, key=lambda name: needs[name])
        share = 100 * needs[params["limit"]] / own["median_us"]
        assert params["percent_of_limit"] == pytest.approx(share, rel=0.02, abs=0.2)
    # 32 query heads, 4 ranges of 16 pages, 32 products; 8 KV heads of 64 tokens, K and V.
    by_name = {case["name"]: case["params"] for case in cases}
    assert by_name["page_score"]["multiply_adds"] == 32 * 4 * 16 * 32
    assert by_name["paged_attention"]["bytes"] == 8 * 64 * 16 * 2 * 4
    assert by_name["paged_attention"]["layers"] == 2**20 / by_name["paged_attention"]["bytes"]
    assert torch.get_num_threads() == before


def test_a_wrong_kernel_has_no_share_of_a_limit(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def wrong(*args: object, impl: str) -> tuple[torch.Tensor, object]:
        scores, lse = sketch_score(*args, impl=impl)
        return scores + (1.0 if impl == "cpu" else 0), lse

    monkeypatch.setattr(kernels, "sketch_score", wrong)
    cases = command.json("bench", "kernels", *LIMITS, code=1)["cases"]
    failed = [x for x in cases if x["gate"] == "failed"]
    assert {case["name"] for case in failed} == {"sketch_score"}
    assert all(case["results"] == [] for case in failed)
    assert not any("percent_of_limit" in case["params"] for case in failed)
    shown = command("bench", "kernels", *LIMITS, code=1)
    assert "the check failed" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_each_selection_misses_what_was_asked_for() -> None:
    """An ``OrderedDict`` that follows the chain misses a quarter of each selection."""
    options = dataclasses.replace(OPTIONS, num_steps=27, seed=3)
    chain = drifting_selections(1, 20, 40, 0.25, options)
    oracle = LruOracle(40)
    steps = [oracle.step(selection[0].tolist(), list(range(200))) for selection in chain]
    assert [step["misses"] for step in steps] == [20] + [5] * 29


def test_misses_of_the_decode_bench_settle_where_asked() -> None:
    bench = DecodeBench(context=1024, budget=128, page_size=8, head_dim=32, misses=0.1)
    case = bench.run(dataclasses.replace(OPTIONS, num_steps=24))
    assert case.params["miss_ratio"] == pytest.approx(0.1, abs=0.05)
    resident = dataclasses.replace(bench, misses=0.0).run(OPTIONS)
    assert resident.params["miss_ratio"] == 0


def test_the_decode_bench_times_both_ways_with_misses() -> None:
    bench = DecodeBench(context=1024, budget=128, page_size=8, head_dim=32, miss="host")
    case = bench.run(OPTIONS)
    assert case.gate == "passed"
    assert [each.impl for each in case.results[-2:]] == ["cpu_host", "cpu"]
    moved, away = (case.params[name] for name in ("bytes", "away"))
    same = moved["cpu_host"] + away["bytes"]
    assert moved["cpu"] == pytest.approx(same, abs=1), "the same pages are missing"
    assert away["bytes"] > 0


def test_the_decode_bench_times_all_ways_with_nothing_resident() -> None:
    """All but the tail page of a budget of 16 pages, in 8 heads; a step attends, then loads."""
    sizes = {"context": 1024, "budget": 128, "page_size": 8, "head_dim": 32, "layers": 1}
    case = DecodeBench(**sizes, misses=1, miss="auto").run(OPTIONS)
    assert (case.gate, case.params["miss_ratio"]) == ("passed", 1)
    assert [each.impl for each in case.results[-3:]] == ["cpu_host", "cpu_auto", "cpu"]
    moved, away = (case.params[name] for name in ("bytes", "away"))
    assert away["bytes"] == 15 * 8 * (2 * 8 * 32 * 4)
    assert moved["cpu_auto"] == moved["cpu"] == moved["cpu_host"] + away["bytes"], "auto copies"
    assert min(away.values()) > 0


def test_a_wrong_kernel_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One index, one page and one output that are wrong, in one implementation each."""
    right_diff, right_gather = residency.diff_tables, residency.gather_pages

    def wrong_diff(*args: object, impl: str, **kwargs: object) -> object:
        diff = right_diff(*args, impl=impl, **kwargs)
        if impl == "cpu":
            diff.load_host_pages[0, 0] += 1
        return diff

    def wrong_gather(*args: object, **kwargs: object) -> None:
        right_gather(*args, **kwargs)
        args[2].v[3, 0, 0, 0] += 1

    monkeypatch.setattr(residency, "diff_tables", wrong_diff)
    monkeypatch.setattr(residency, "gather_pages", wrong_gather)
    right_decode = DecodeWorkload.decode
    monkeypatch.setattr(
        DecodeWorkload, "decode", lambda self, step: right_decode(self, step) * 1.01
    )
    assert DiffTablesBench(rows=1, width=8, slots=16).run(OPTIONS).gate == "failed"
    pages = TransferBench(pool_bytes=1 << 20, page_bytes=1024, pages=16)
    assert pages.run(OPTIONS).gate == "failed"
    heads = DecodeBench(context=256, budget=64, page_size=8, head_dim=16)
    assert heads.run(OPTIONS).gate == "failed"


def test_a_peer_is_left_out_with_the_reason() -> None:
    def missing() -> bool:
        import no_such_package  # noqa: F401

        return True

    def broken() -> bool:
        raise RuntimeError("wrong shape\nand more")

    assert reason_to_leave_out(lambda: True) == ""
    assert reason_to_leave_out(lambda: False) == "its results differ"
    assert reason_to_leave_out(missing) == "not installed"
    assert reason_to_leave_out(broken) == "RuntimeError: wrong shape"


def test_libraries_of_a_gpu_get_whole_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch stands in for FlashAttention 3 and FlashMLA, with the layouts that they document."""

    def attend(q: Any, k: Any, v: Any, scale: float) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2)

    def flash_attention(q: Any, k: Any, v: Any, *, cache_seqlens: Any, softmax_scale: float) -> Any:
        assert cache_seqlens.tolist() == [k.shape[1]] * len(q)
        return attend(q, k, v, softmax_scale)

    def flash_mla(
        q: Any, pages: Any, table: Any, lengths: Any, width: int, plan: Any, **how: Any
    ) -> Any:
        assert plan == "plan" and how["use_legacy"] and pages.shape[1:3] == (64, 1)
        k = pages[table.long()].flatten(1, 2)
        assert lengths.tolist() == [k.shape[1]] * len(q)
        return attend(q, k, k[..., :width], how["softmax_scale"]), None

    three = SimpleNamespace(flash_attn_with_kvcache=flash_attention)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", three)
    mla = SimpleNamespace(flash_mla_with_kvcache=flash_mla, get_mla_metadata=lambda: ("plan", None))
    monkeypatch.setitem(sys.modules, "flash_mla", mla)
    torch.manual_seed(0)
    k, v, q = torch.randn(2, 2, 128, 16), torch.randn(2, 2, 128, 16), torch.randn(2, 6, 16)
    expected = attend(q[:, None], k.transpose(1, 2), v.transpose(1, 2), 0.3)[:, 0]
    torch.testing.assert_close(flash_attention_decode(PagedKV(k, v), 0.3)(q), expected)
    latents = k[:, :1].contiguous()
    expected = attend(q[:, None], latents.transpose(1, 2), latents[..., :8].transpose(1, 2), 0.3)
    found = flash_mla_decode(PagedKV(latents, latents[..., :8]), 0.3)(q)
    torch.testing.assert_close(found, expected[:, 0])
    with pytest.raises(ValueError, match="got 100 tokens, expected a multiple of 64"):
        flash_mla_decode(PagedKV(latents[:, :, :100], latents[:, :, :100]), 0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--device", "tpu"], "unknown --device 'tpu'"),
        (["decode", "--algorithm", "best"], "unknown algorithm 'best'"),
        (
            ["kernels", "--budget", "100"],
            "--budget: got 100, expected a multiple of --page-size 16",
        ),
        (["decode", "--dtype", "int4"], "unknown --dtype 'int4'"),
        (["decode", "--budget", "100"], "--budget: got 100, expected a multiple of --page-size 16"),
        (["decode", "--context", "64"], "--budget: got 2048, expected at most the context"),
        (["decode", "--misses", "1.5"], "--misses: got '1.5', expected a fraction from 0 to 1"),
        (
            ["diff-tables", "--width", "9", "--slots", "8"],
            "--width: got 9, expected at most --slots",
        ),
        (["diff-tables", "--rows", "0"], "--rows: got '0', expected a number of at least 1"),
        (["swap-in", "--row-bytes", "655"], "--row-bytes: got 655, expected a multiple of 8"),
        (["transfer", "--pool-bytes", "4096"], "--pool-bytes: got 4096, expected"),
        (["transfer", "--steps", "0"], "--steps: got '0', expected a number of at least 1"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_bad_sizes_are_one_line(arguments: list[str], message: str, command: Command) -> None:
    assert message in command.refused("bench", *arguments)
