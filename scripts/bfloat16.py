"""Measure how tokens and log-probabilities depend on the backend, the radix cache and the dtype.

``python -m scripts.bfloat16 OUT.json --model NAME`` serves a real model in bfloat16 with
``torch_native`` and with hisparse (budget beyond the context), and in float32 with
``torch_native``. In bfloat16 each prompt is answered twice: first cold, then with its prefix in the
radix cache. Reported are, over the prompts:

- equal: answers with all tokens equal, and the first token that differs in the others;
- difference: mean absolute difference of log-probabilities, over tokens before the first that
  differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from hisparse.doctor import provenance
from hisparse.eval.models import resolve
from hisparse.eval.texts import TEXTS, read_text
from hisparse_bench.fork_server import ForkServer
from hisparse_bench.server import ServerProcess

__all__ = ["main"]

#: Backend, dtype, and whether each prompt is answered once or twice.
_SERVERS = (
    ("torch_native", "float32", ("cold",)),
    ("torch_native", "bfloat16", ("cold", "cached")),
    ("hisparse", "bfloat16", ("cold", "cached")),
)
#: What is compared: answers, and those that they are held against.
_PAIRS = (
    ("hisparse bfloat16 cold", "torch_native bfloat16 cold"),
    ("hisparse bfloat16 cold", "torch_native float32 cold"),
    ("torch_native bfloat16 cold", "torch_native float32 cold"),
    ("hisparse bfloat16 cached", "hisparse bfloat16 cold"),
    ("torch_native bfloat16 cached", "torch_native bfloat16 cold"),
)


class Answer(NamedTuple):
    """Tokens of an answer and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]


def compare(answers: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """How much answers differ from others to the same prompts."""
    first: list[int] = []
    differences: list[float] = []
    for (ids, logprobs), (other_ids, other_logprobs) in zip(answers, others, strict=True):
        pairs = enumerate(zip(ids, other_ids, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(ids))
        if same < len(ids):
            first.append(same)
        pairs_of_logprobs = zip(logprobs[:same], other_logprobs[:same], strict=True)
        differences += [abs(a - b) for a, b in pairs_of_logprobs]
    return {
        "equal": len(answers) - len(first),
        "of": len(answers),
        "first_different": sorted(first),
        "difference": statistics.fmean(differences),
        "largest": max(differences),
    }


def _answers(server: ServerProcess, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    """Each prompt alone."""
    found = []
    for prompt in prompts:
        (reply,) = server.generate([prompt], tokens, top_logprobs_num=1)
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        found.append(Answer(reply["output_ids"], logprobs))
    return found


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Answer]]:
    model = resolve(arguments.model)
    text = "\n\n".join(map(read_text, TEXTS)) * 4
    ids = AutoTokenizer.from_pretrained(model)(text).input_ids
    size = arguments.tokens
    prompts = [ids[i * size : (i + 1) * size] for i in range(arguments.prompts)]
    budget = -(-(size + arguments.output) // 16) * 16
    config = {"budget": budget, "host_memory": "2GiB", "device_memory": "1GiB"}
    env = ServerProcess.cpu_environment(1) | {"TORCHDYNAMO_DISABLE": "1"}
    forks = ForkServer(os.environ | env, folder / "forks.log")
    found = {}
    for backend, dtype, states in _SERVERS:
        flags = ["--device", "cpu", "--dtype", dtype, "--attention-backend", backend]
        flags += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
        flags += ["--max-total-tokens", "32768", "--max-running-requests", "2"]
        if backend == "hisparse":
            flags += ["--hisparse-config", json.dumps(config)]
        with ServerProcess(model, folder / f"{backend}-{dtype}.log", flags, forks) as server:
            server.start(env)
            for state in states:
                name = f"{backend} {dtype} {state}"
                found[name] = _answers(server, prompts, arguments.output)
    forks.stop()
    return found


def main() -> int:
    """Measure, print and write the comparisons."""
    parser = argparse.ArgumentParser(prog="bfloat16", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of an answer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(arguments, Path(folder))
    rows = [{"answers": a, "others": b, **compare(found[a], found[b])} for a, b in _PAIRS]
    result = {
        "command": "bfloat16",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "params": {k: v for k, v in vars(arguments).items() if k != "out"},
        "comparisons": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(
            f"{row['answers']} against {row['others']}: {row['equal']} of {row['of']} equal, "
            f"difference {row['difference']:.2e}, at most {row['largest']:.2e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
