"""Measure what drafts by n-grams do to the time of a token, with a text that repeats.

``python -m scripts.speculation_speed OUT.json --model NAME`` runs two servers, with drafts and
without. In each pair both continue the same prompt, in alternating order: a paragraph, other than
that of the pair before, as often as it fits. The time of a token is that from an answer's first
token to its last, divided by the tokens between. It exits with 1 if the servers differ in a token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hisparse.doctor import provenance
from hisparse.eval.models import resolve
from hisparse.eval.texts import TEXTS, read_text
from hisparse_bench.server import Generation, ServerProcess

__all__ = ["main"]


def _server(arguments: argparse.Namespace, folder: Path, *, drafts: bool) -> ServerProcess:
    config = {"budget": arguments.budget, "host_memory": "2GiB", "device_memory": "1GiB"}
    flags = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "hisparse"]
    flags += ["--hisparse-config", json.dumps(config | {"algorithm": arguments.algorithm})]
    flags += ["--skip-tokenizer-init", "--max-running-requests", "2", "--sleep-on-idle"]
    # SGLang turns it off for drafts on a CPU.
    flags += ["--disable-overlap-schedule", "--context-length", "8192"]
    if drafts:
        flags += ["--speculative-algorithm", "NGRAM"]
        flags += ["--speculative-num-draft-tokens", str(arguments.drafts)]
    log = folder / f"{'drafts' if drafts else 'plain'}.log"
    return ServerProcess(resolve(arguments.model), log, flags)


def _prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """One prompt for each pair, and one to warm up."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(arguments.model))
    ids = tokenizer("\n\n".join(map(read_text, TEXTS))).input_ids
    size = arguments.paragraph
    paragraphs = [ids[i * 500 : i * 500 + size] for i in range(arguments.pairs + 1)]
    return [(text * -(-arguments.tokens // size))[: arguments.tokens] for text in paragraphs]


def _token_ms(answer: Generation) -> float:
    return 1e3 * (answer.times_s[-1] - answer.times_s[0]) / (len(answer.ids) - 1)


def _measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    pairs = []
    with ExitStack() as stack:
        servers = [_server(arguments, folder, drafts=drafts) for drafts in (False, True)]
        for server in servers:
            stack.enter_context(server).start(ServerProcess.cpu_environment(arguments.threads))
        for number, prompt in enumerate(_prompts(arguments)):
            answers: dict[int, Generation] = {}
            for at in (0, 1) if number % 2 else (1, 0):
                answers[at] = servers[at].stream(prompt, arguments.output)
            if not number:  # The first pair warms up.
                continue
            plain, drafted = answers[0], answers[1]
            pair = {
                "plain_ms": _token_ms(plain),
                "drafts_ms": _token_ms(drafted),
                "tokens_per_forward": (len(drafted.ids) - 1) / drafted.verified,
                "same": plain.ids == drafted.ids,
            }
            print(json.dumps(pair), flush=True)
            pairs.append(pair)
    return pairs


def main(words: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--algorithm", default="sketch")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=7000, help="of a prompt")
    parser.add_argument("--paragraph", type=int, default=40, help="tokens that repeat")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, default=8, help="tokens of a verification")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=arguments.out.absolute().parent) as folder:
        pairs = _measure(arguments, Path(folder))
    same = all(pair["same"] for pair in pairs)
    result = {
        "command": "speculation-speed",
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "params": {k: v for k, v in vars(arguments).items() if k != "out"},
        "gate": "passed" if same else "failed",
        "speedup": statistics.median(pair["plain_ms"] / pair["drafts_ms"] for pair in pairs),
        "tokens_per_forward": statistics.median(pair["tokens_per_forward"] for pair in pairs),
        "pairs": pairs,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"speedup {result['speedup']:.2f}, {result['tokens_per_forward']:.2f} tokens a forward")
    return int(not same)


if __name__ == "__main__":
    raise SystemExit(main())
