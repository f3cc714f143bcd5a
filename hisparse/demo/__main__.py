"""Run both servers of the demo, one after the other, and measure them; ``make demo`` does."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from hisparse.config import HiSparseConfig
from hisparse.demo.document import HARBOUR, make_prompt
from hisparse.errors import HiSparseError
from hisparse.eval.models import load, resolve
from hisparse.units import format_bytes
from hisparse_bench.server import ServerProcess

#: The value of ``--hisparse-config``.
CONFIG: Final[Mapping[str, Any]] = {
    "budget": 512,
    "device_buffer_size": 1024,
    "max_row_capacity": 1024,
    "host_memory": "2GiB",
    "device_memory": "512MiB",
}
#: Capacity of both servers' KV pools, so that their bytes can be compared.
_KV_TOKENS: Final = 32768
_MAX_NEW_TOKENS: Final = 48
#: Place of the planted sentence, from 0 (beginning) to 1 (end).
_DEPTH = 0.8


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hisparse.demo", description=__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="packaged model, folder or hub id (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    console = Console(markup=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        model = resolve(options.model, progress=lambda line: console.print(line, style="dim"))
        question = [{"role": "user", "content": make_prompt(HARBOUR, _DEPTH)}]
        prompt = load(AutoTokenizer, model).apply_chat_template(
            question, add_generation_prompt=True, return_dict=False
        )
        columns = [measure(x, model, prompt, options.threads, console) for x in server_setups()]
    except KeyboardInterrupt:
        console.print("\nstopped; no server is left running")
        return 128 + signal.SIGINT
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 1
    print_report(console, columns, len(prompt))
    return 0


class ServerSetup(NamedTuple):
    """One of the two servers to compare: the head of its column, and SGLang's flags."""

    title: str
    flags: tuple[str, ...]


def server_setups() -> tuple[ServerSetup, ServerSetup]:
    """The dense server and hisparse, on the GPU if there is one."""
    common = ["--max-total-tokens", str(_KV_TOKENS), "--chunked-prefill-size", "8192"]
    common += ["--skip-server-warmup", "--sleep-on-idle"]
    if not torch.cuda.is_available():
        common += ["--device", "cpu", "--dtype", "float32"]
    sparse = (*common, "--attention-backend", "hisparse", "--hisparse-config", json.dumps(CONFIG))
    config = HiSparseConfig.from_dict(CONFIG)
    return (
        ServerSetup("dense (torch_native)", (*common, "--attention-backend", "torch_native")),
        ServerSetup(f"hisparse ({config.algorithm}, budget {config.budget})", sparse),
    )


def measure(
    setup: ServerSetup, model: str, prompt: Sequence[int], num_threads: int, console: Console
) -> dict[str, str]:
    """Start a server, ask about the document, read its memory use, and stop it.

    Args:
        model: folder or hub id.
        prompt: token ids of the document and the question.
        num_threads: CPU threads of the server.
        console: shows the progress and the answer.

    Returns:
        The cells of the server's column, by label.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hisparse-demo-") as folder,
        ServerProcess(model, Path(folder) / "sglang.log", setup.flags) as server,
    ):
        with _spinner(console, f"{setup.title}: starting SGLang"):
            on_cpu = not torch.cuda.is_available()
            server.start(ServerProcess.cpu_environment(num_threads) if on_cpu else {})
            server.stream("Hello!", 2)
        before = server.metrics()
        with _spinner(console, f"{setup.title}: reading the document and answering"):
            answer = server.stream(prompt, _MAX_NEW_TOKENS, ignore_eos=False)
        console.print(f"{setup.title}: {answer.text.strip()}", highlight=False)
        memory = server.info()["internal_states"][0]["memory_usage"]
        cells = {
            "answer": answer.text.strip(),
            "correct": "yes" if HARBOUR.is_found_in(answer.text) else "no",
            "time to first token": f"{answer.ttft_s:.1f} s",
            "time per token": f"{1000 * answer.time_per_token_s:.0f} ms",
            "KV capacity, tokens": f"{memory['token_capacity']:,}",
            # SGLang reports GiB, rounded to 1 MiB here.
            "device memory for KV": format_bytes(round(memory["kvcache"] * 1024) * 2**20),
            "summaries and tables": "none",
            "host memory for KV": "none",
            "hit ratio": "",
        }
        return cells | (_hisparse_cells(server, before) if "hisparse" in setup.flags else {})


def _hisparse_cells(server: ServerProcess, before: Mapping[str, float]) -> dict[str, str]:
    """Cells from hisparse's metrics, which are published when the request ends."""
    end = time.monotonic() + 5
    while True:
        metrics = server.metrics()
        names = ("hisparse:hit_pages_total", "hisparse:miss_pages_total")
        hits, misses = (metrics[name] - before.get(name, 0.0) for name in names)
        if hits + misses or time.monotonic() > end:
            break
        time.sleep(0.2)
    kv, representations, tables, host = (
        int(metrics[f"hisparse:{name}_bytes"])
        for name in ("device_kv", "device_representation", "device_table", "host_kv")
    )
    return {
        "device memory for KV": format_bytes(kv),
        "summaries and tables": format_bytes(representations + tables),
        "host memory for KV": format_bytes(host),
        "hit ratio": f"{hits / (hits + misses):.3f}" if hits + misses else "",
    }


def print_report(console: Console, columns: Sequence[Mapping[str, str]], num_tokens: int) -> None:
    """Print a table with a column for each server.

    Args:
        console: where.
        columns: what :func:`measure` returned for each of :func:`server_setups`.
        num_tokens: tokens of the prompt.
    """
    table = Table(title=f"{num_tokens:,} tokens, then: {HARBOUR.question}")
    table.add_column()
    for setup in server_setups():
        table.add_column(setup.title)
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    console.print(table)
    if not torch.cuda.is_available():
        console.print(
            "This machine has no GPU: device memory is a part of host memory, and transfers are "
            "copies within it.",
            style="dim",
        )


@contextmanager
def _spinner(console: Console, text: str) -> Iterator[None]:
    """Show a spinner, then the time; two lines if the output is not a terminal."""
    started = time.monotonic()
    if not console.is_terminal:
        console.print(text)
    with console.status(text):
        yield
    console.print(f"{text}: {time.monotonic() - started:.0f} s", style="dim")


if __name__ == "__main__":
    sys.exit(main())
