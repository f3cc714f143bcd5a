"""What ``make gpu-check`` runs: correctness first, then speed, on a machine with a CUDA GPU.

Needs PyTorch with CUDA and nvcc; pytest, hypothesis, apache-tvm-ffi, rich and psutil are taken from
where they are installed, or from wheels (see --wheels). What is missing is said and left out. The
parts run one after the other, ``--part NAME`` runs one alone; each takes less than 8 minutes, and a
part that fails stops no other. In a run of all parts a benchmark of a kernel whose tests failed is
not run; alone, its own check decides. Writes one JSON file and prints one table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"tvm_ffi": "apache-tvm-ffi", "pytest": "pytest", "hypothesis": "hypothesis"} | {
    name: name for name in ("numpy", "psutil", "rich")
}
#: What CUDA's name of a GPU begins with, and its name in ``hisparse plan``.
ESTIMATED = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GB200": "gb200",
}
#: Part of the suite to the benchmarks that stand on it.
SUITES = {
    "lru": ["test_lru.py", "test_diff_tables.py", "test_rebalance.py"],
    "transfer": ["test_transfer.py", "test_transfer_layers.py", "test_append_tokens.py"],
    "attention": [
        "test_attention.py",
        "test_chunk_attention.py",
        "test_splits.py",
        "test_select.py",
        "test_select_inputs.py",
        "test_index_score.py",
        "test_page_summary.py",
        "test_raw_queries.py",
        "test_host_call.py",
        "test_page_sketch.py",
        "test_outline.py",
        "test_out_of_range.py",
    ],
    "fp8": ["test_quantize.py", "test_latents.py", "test_quantized_transfer.py"],
    "adapters": ["../adapters/test_against_torch.py", "../adapters/test_attend_chosen.py"],
    "graphs": ["gpu/test_graphs.py", "gpu/test_algorithm_graphs.py", "gpu/test_step_graphs.py"],
}
_KERNELS = ["lru", "transfer", "attention"]
_SWAP_IN = ["swap-in", "--pool-bytes", str(20 << 30)]
_HOST = ["--context", "131072", "--miss", "host", "--misses", "0.05"]
_DECODE = ["decode", "--dtype", "bfloat16", "--steps", "40"]
#: Latents, pages of one token and an indexer, as in DeepSeek-V3.2.
_DSA = ["--algorithm", "dsa", "--q-heads", "128"]
#: By name: the parts of the suite that a benchmark stands on, and its flags.
BENCHES = {
    "diff-tables": (["lru"], ["diff-tables", "--rows", "32"]),
    "transfer": (
        ["transfer"],
        ["transfer", "--pool-bytes", str(20 << 30), "--page-bytes", "4096", "--pages", "4096"],
    ),
    # Tokens of DeepSeek's sparse attention, stored in eight bits and in bfloat16.
    **{
        f"swap-in {size} B x {batch}": (
            ["lru", "transfer"],
            [*_SWAP_IN, "--row-bytes", str(size), "--batch", str(batch)],
        )
        for batch in (1, 64)
        for size in (656, 1152)
    },
    **{
        f"decode {k}k x {batch}": (
            _KERNELS,
            [*_DECODE, *f"--context {k << 10} --batch {batch} --layers {layers}".split()],
        )
        # What runs once a token weighs little in 8 layers; one of 32 requests is 32 GiB with peers.
        for k, batch, layers in ((8, 1, 8), (32, 1, 8), (128, 1, 8), (128, 8, 2), (128, 32, 1))
    },
    # Both ways in turns: missing pages are loaded, or the CPU attends them.
    **{
        f"decode 128k x {batch} host": (
            _KERNELS,
            [*_DECODE, *_HOST, "--batch", str(batch), "--layers", str(layers)],
        )
        for batch, layers in ((1, 8), (8, 2), (32, 1))
    },
    **{
        f"decode 128k x {batch} dsa": (
            _KERNELS,
            [*_DECODE, *_DSA, "--context", "131072", "--batch", str(batch)],
        )
        for batch in (1, 8)
    },
    **{
        f"decode 128k x {batch} {name}": (
            _KERNELS,
            [*_DECODE, "--context", "131072", "--batch", str(batch), "--algorithm", name],
        )
        for name, batch in (("quest", 8), ("dipr", 1), ("dipr", 8))
    },
}
#: Parts that run alone: what of SUITES, BENCHES and the rest belongs to each.
PARTS = {
    "kernels": ["lru", "transfer", "attention", "fp8"],
    "engine": ["adapters", "graphs"],
    "bench-kernels": ["diff-tables", "transfer", *(n for n in BENCHES if n.startswith("swap-in"))],
    "bench-decode": [
        n for n in BENCHES if n.startswith("decode") and not n.endswith(("x 32", " host"))
    ],
    "bench-batch": ["decode 128k x 32"],
    "bench-host": [n for n in BENCHES if n.endswith(" host")],
    "serve": ["served"],
    "serve-load": ["served load"],
    "sanitizers": ["memcheck", "racecheck"],
}
#: Triton and PyTorch warn of what is theirs, which pyproject.toml would make errors.
_PYTEST = ["--maxfail=5", "-p", "no:cacheprovider", "-W", "ignore::Warning"]
SANITIZED = "tests/kernels/gpu/small_case.py"


class Check:
    """Runs the steps of a part within a time limit and keeps what came of them.

    Args:
        limit_s: for all steps together.
        env: environment of the steps.
        steps: what came of earlier parts; steps are added to it.
    """

    def __init__(
        self, limit_s: float, env: dict[str, str], steps: list[dict[str, Any]] | None = None
    ) -> None:
        self._end = time.monotonic() + limit_s
        self._env = env
        self.steps = [] if steps is None else steps

    def run(self, name: str, command: Sequence[str], limit_s: float) -> dict[str, Any]:
        """One step; it fails if it ends badly or not in time."""
        left = min(limit_s, self._end - time.monotonic())
        if left <= 1:
            return self.skip(name, "no time is left")
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=left
            )
            status = "passed" if done.returncode == 0 else "failed"
            out, err = done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            status, out, err = "failed", _text(late.stdout), f"not done in {left:.0f} s"
        step = {"step": name, "status": status, "seconds": round(time.monotonic() - start, 1)}
        step["output"] = out[-20000:] if status == "passed" else (out + err)[-6000:]
        return self._keep(step)

    def skip(self, name: str, why: str) -> dict[str, Any]:
        """A step that cannot run here."""
        return self._keep({"step": name, "status": "skipped", "seconds": 0.0, "output": why})

    def _keep(self, step: dict[str, Any]) -> dict[str, Any]:
        self.steps.append(step)
        first = step["output"].strip().splitlines()[-1:] if step["status"] != "passed" else []
        print(f"{step['status']:8}{step['seconds']:7.1f} s  {step['step']}", *first, flush=True)
        return step

    def failed(self, name: str) -> bool:
        """Whether the step ``name`` was asked for and did not pass."""
        return any(s["step"] == name and s["status"] != "passed" for s in self.steps)


def main() -> int:
    """Exit code 0 if whatever could run passed, 1 if not, 2 if there is nothing to check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", metavar="NAME", help="one part alone (all)")
    parser.add_argument("--out", type=Path, help="JSON file (bench/results/DATE-gpu-check-COMMIT)")
    parser.add_argument("--limit", type=float, default=480, help="seconds for each part (480)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels")
    arguments = parser.parse_args()
    if arguments.part is not None and arguments.part not in PARTS:
        return _refuse(f"--part: got {arguments.part!r}, expected one of {', '.join(PARTS)}")
    if importlib.util.find_spec("torch") is None:
        return _refuse(
            f"{sys.executable} has no PyTorch; expected a Python that has it, such as "
            "make gpu-check GPU_PYTHON=/path/to/python"
        )
    import torch

    if not torch.cuda.is_available():
        return _refuse("PyTorch finds no CUDA GPU here, expected one")
    env = _environment(arguments.wheels)
    missing = _missing()
    if missing:
        return _refuse(
            f"not installed: {', '.join(missing)}; install them, or put their wheels into "
            f"{arguments.wheels} (make gpu-wheels)"
        )
    sys.path.insert(0, str(ROOT))
    parts = [arguments.part] if arguments.part else list(PARTS)
    report = describe(torch) | {"parts": parts, "steps": []}
    out = arguments.out or _default_out(report)
    steps: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        run_part(part, Check(arguments.limit, env, steps))
        # After each part, for a machine may be lent for minutes.
        out.write_text(json.dumps(report | {"steps": steps}, indent=1) + "\n")
    report |= {"steps": steps, "estimated_us": estimate_speeds(steps, report["device"])}
    out.write_text(json.dumps(report, indent=1) + "\n")
    print_speeds(steps, report["estimated_us"])
    print(f"wrote {out}")
    return 1 if any(step["status"] == "failed" for step in steps) else 0


def _refuse(line: str) -> int:
    """Print in one line why nothing is checked; the parser would print its usage first."""
    print(f"gpu-check: error: {line}", file=sys.stderr)
    return 2


def run_part(part: str, check: Check) -> None:
    """The steps of one part; the build comes first and takes no time if the cache has it."""
    check.run(f"{part}: build", [sys.executable, "-m", "hisparse", "build"], 150)
    for name in PARTS[part]:
        if part in ("kernels", "engine"):
            run_suite(name, check)
        elif part == "sanitizers":
            run_sanitizer(name, check)
        elif part.startswith("serve"):
            run_served(name, check)
        else:
            run_bench(name, check)


def run_suite(name: str, check: Check) -> None:
    """Tests of one part of the suite. Warnings of the libraries there are no errors."""
    flags = [*_PYTEST, *(f"tests/kernels/{file}" for file in SUITES[name])]
    if importlib.util.find_spec("xdist") is not None:
        # All tests took 92 s with 14 processes on an H100.
        flags += ["-n", str(min(14, max(1, (os.cpu_count() or 1) - 2)))]
    check.run(name, [sys.executable, "-m", "pytest", "-q", *flags], 240)


def run_sanitizer(tool: str, check: Check) -> None:
    """A few small steps under compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        check.skip(tool, "compute-sanitizer is not installed")
        return
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, SANITIZED]
    check.run(tool, command, 200)


def run_served(name: str, check: Check) -> None:
    """SGLang with hisparse: eager and captured, or under load."""
    if importlib.util.find_spec("sglang") is None:
        check.skip(f"bench {name}", "sglang is not installed")
        return
    command = [sys.executable, "-m", "tests.kernels.gpu.served", *name.split()[1:]]
    check.run(f"bench {name}", command, 440)


def run_bench(name: str, check: Check) -> None:
    """A benchmark, unless tests that it stands on have failed in this run."""
    parts, arguments = BENCHES[name]
    if wrong := [part for part in parts if check.failed(part)]:
        check.skip(f"bench {name}", f"the tests of {', '.join(wrong)} did not pass")
        return
    command = [sys.executable, "-m", "hisparse", "bench", *arguments]
    check.run(f"bench {name}", [*command, "--device", "cuda", "--json"], 150)


def estimate_speeds(steps: Sequence[dict[str, Any]], device: str) -> dict[str, dict[str, float]]:
    """Estimates of ``hisparse plan``, in us by step and implementation, where there are any."""
    from hisparse.plan.estimate import GPUS

    name = next((gpu for prefix, gpu in ESTIMATED.items() if device.startswith(prefix)), None)
    if name is None:
        return {}
    return {
        step["step"]: _estimate_case(case["params"], GPUS[name])
        for step in _passed_benches(steps)
        for case in json.loads(step["output"])["cases"]
        if case["name"] == "decode"
    }


def _estimate_case(params: Mapping[str, Any], gpu: Any) -> dict[str, float]:
    import torch

    from hisparse.config import HiSparseConfig
    from hisparse.plan.estimate import estimate_token
    from hisparse.types import KVSpec

    spec = KVSpec(
        num_layers=1,
        num_q_heads=params["q_heads"],
        num_kv_heads=params["kv_heads"],
        head_dim=params["head_dim"],
        v_head_dim=params.get("v_head_dim", params["head_dim"]),
        dtype=getattr(torch, params["dtype"]),
        page_size=params["page_size"],
        attention="MLA" if "v_head_dim" in params else "GQA",
        index_head_dim=params.get("index_dim", 0),
    )
    settings = {name: params[name] for name in ("algorithm", "budget", "page_size")}
    sizes = {"context": params["context"], "batch": params["batch"], "weight_bytes": 0}
    hits = 1 - params["miss_ratio"]
    found = estimate_token(HiSparseConfig(**settings), spec, gpu, **sizes, hit_ratio=hits)
    peers = ("sdpa", "flashinfer", "flashinfer_tensor_cores")
    return dict.fromkeys(peers, 1000 * found.dense_ms) | {"cuda": 1000 * found.hisparse_ms}


def print_speeds(
    steps: Sequence[dict[str, Any]], estimated_us: Mapping[str, Mapping[str, float]]
) -> None:
    """A line for each implementation in each benchmark that passed its own check."""
    for step in _passed_benches(steps):
        for case in json.loads(step["output"])["cases"]:
            for result in case["results"]:
                speed = "" if result["gb_s"] is None else f"{result['gb_s']:8.1f} GB/s"
                name, impl = step["step"], result["impl"]
                guess = estimated_us.get(name, {}).get(impl)
                speed += "" if guess is None else f"  estimated {guess:10.1f} us"
                print(f"{name:26} {impl:14} {result['median_us']:10.1f} us {speed}")


def _passed_benches(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [s for s in steps if s["step"].startswith("bench ") and s["status"] == "passed"]


def describe(torch: Any) -> dict[str, Any]:
    """The machine and the versions."""
    from hisparse.kernels.build.cuda import find_nvcc

    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    for package in (
        "triton",
        "apache-tvm-ffi",
        "sglang",
        "sglang-kernel",
        "sgl-flash-mla",
        "flashinfer-python",
    ):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # Without it, kernels that were built elsewhere may do.
    compiler = ""
    if (nvcc := find_nvcc()) is not None:
        compiler = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    return {
        "command": "gpu-check",
        "date": datetime.now(UTC).isoformat("T", "seconds"),
        "device": torch.cuda.get_device_name(),
        "commit": os.environ.get("HISPARSE_COMMIT", commit),
        "versions": versions | {"cuda": torch.version.cuda},
        "nvcc": compiler.strip().splitlines()[-1:],
    }


def _environment(wheels: Path) -> dict[str, str]:
    """The steps' environment; wheels are unpacked, for pip may have no index to ask."""
    env = os.environ | {"HISPARSE_TEST_CUDA": "1", "PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT)]
    found = sorted(wheels.glob("*.whl"))
    if found:
        site = wheels / "site"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*command, "--upgrade", "--target", str(site), *map(str, found)], check=True)
        paths.append(str(site))
        sys.path.append(str(site))
    env["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [env.get("PYTHONPATH")])])
    return env


def _missing() -> list[str]:
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def _default_out(report: dict[str, Any]) -> Path:
    day = report["date"][:10]
    return ROOT / "bench" / "results" / f"{day}-gpu-check-{report['commit']}.json"


def _text(out: object) -> str:
    return out.decode(errors="replace") if isinstance(out, bytes) else str(out or "")


if __name__ == "__main__":
    sys.exit(main())
