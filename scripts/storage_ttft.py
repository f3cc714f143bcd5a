"""Measure the time to the first token of a document: computed, and loaded from a store.

``python -m scripts.storage_ttft OUT.json --model NAME`` starts two servers in turn, for each pair
anew: the first computes a document and stores it in an empty folder, the second loads it. The
document's pages are in the system's page cache unless ``--cold``, which drops them from it. Both
have to give the same tokens, and the second all pages from the store.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hisparse.doctor import provenance
from hisparse.eval.models import resolve
from hisparse.eval.texts import read_text
from hisparse_bench.server import Generation, ServerProcess

__all__ = ["main"]

_PAGE = 16
_NEW_TOKENS = 16


def _drop_from_page_cache(store: Path) -> None:
    for path in store.glob("segments/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _serve(
    arguments: argparse.Namespace, model: str, store: Path, prompt: Sequence[int], pages: int
) -> tuple[Generation, dict[str, float]]:
    """Ask a new server twice: a short text that warms it up, then the document."""
    config = {"budget": arguments.budget, "host_memory": arguments.host_memory}
    config |= {"device_memory": "2GiB", "storage": {"path": str(store), "timeout_s": 30.0}}
    flags = ["--device", "cpu", "--dtype", arguments.dtype, "--attention-backend", "hisparse"]
    flags += ["--hisparse-config", json.dumps(config), "--skip-tokenizer-init"]
    flags += ["--max-total-tokens", str(2 * len(prompt)), "--max-running-requests", "2"]
    log = store.parent / "server.log"
    with ServerProcess(model, log, [*flags, "--skip-server-warmup"]) as server:
        server.start(ServerProcess.cpu_environment(os.cpu_count() or 1))
        server.stream(prompt[64:0:-1], 4)
        answer = server.stream(prompt, _NEW_TOKENS)
        end = time.monotonic() + 60
        while (found := server.metrics())["hisparse:storage_offloaded_pages_total"] < pages:
            if time.monotonic() > end:
                lines = [x for x in log.read_text().splitlines() if "hisparse" in x]
                raise SystemExit("\n".join(["the document was not stored:", *lines[-20:]]))
            time.sleep(0.2)
        return answer, found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pairs and write their times; 1 if a pair differs in its tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args(argv)
    model = resolve(arguments.model)
    text = read_text("moby_dick") * 8
    prompt = AutoTokenizer.from_pretrained(model)(text).input_ids[: arguments.tokens]
    pages, pairs, same = (len(prompt) - 1) // _PAGE, [], True
    for _ in range(arguments.pairs):
        with tempfile.TemporaryDirectory(dir=arguments.out.parent) as folder:
            store = Path(folder) / "store"
            computed, _ = _serve(arguments, model, store, prompt, pages)
            if arguments.cold:
                _drop_from_page_cache(store)
            loaded, counters = _serve(arguments, model, store, prompt, 0)
        same &= computed.ids == loaded.ids and loaded.cached_tokens == pages * _PAGE
        pairs.append(
            {
                "computed_s": computed.ttft_s,
                "loaded_s": loaded.ttft_s,
                "load_s": counters["hisparse:storage_load_ms_total"] / 1000,
                "loaded_bytes": counters["hisparse:storage_loaded_bytes_total"],
            }
        )
        print(json.dumps(pairs[-1]), flush=True)
    ratio = statistics.median(x["computed_s"] / x["loaded_s"] for x in pairs)
    found: dict[str, Any] = {
        "command": "storage-ttft",
        "model": arguments.model,
        "tokens": len(prompt),
        "dtype": arguments.dtype,
        "cold": arguments.cold,
        "gate": "passed" if same else "failed",
        "ratio": ratio,
        "pairs": pairs,
        "date": provenance.now(),
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{ratio:.1f} times faster from the store, gate {found['gate']}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
