"""SGLang's own load client, ``sglang.benchmark.serving``, driven in this process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np

from hisparse.errors import ConfigError, one_line, quoted
from hisparse.eval.texts import TEXTS
from hisparse.eval.texts import read_text as read_built_in
from hisparse.options import read_text
from hisparse.trace.prefix import PrefixRequest, read_prefix

#: The client's metrics that a report keeps, under the client's names.
_RATES = ("request_throughput", "input_throughput", "output_throughput", "total_throughput")
_TIMES = tuple(
    f"{statistic}_{of}_ms"
    for of in ("ttft", "tpot", "itl", "e2e_latency")
    for statistic in ("mean", "median", "p90", "p99")
)
#: What SGLang's client reads from its command line.
_ARGUMENTS = Namespace(
    temperature=0.0,
    top_p=1.0,
    disable_ignore_eos=False,
    disable_stream=False,
    return_logprob=False,
    return_routed_experts=False,
    logprob_start_len=-1,
    top_logprobs_num=0,
    token_ids_logprob=None,
    cache_report=True,
    header=None,
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        ids: prompt, token ids.
        output: tokens to generate.
        arrival_ms: when it is sent, from the start of its trace; None without a trace.
        turns: how often it is sent, each time with more of the prompt, after the answer before.
    """

    ids: Sequence[int]
    output: int
    arrival_ms: float | None = None
    turns: int = 1


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """What one load measured.

    Attributes:
        fields: under the names of SGLang's client; times are milliseconds, rates per second.
        tpot_s: time per token of each completed request, seconds.
    """

    fields: dict[str, Any]
    tpot_s: list[float]


class _Progress:
    """Looks to the client like its progress bar."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def update(self, _: int) -> None:
        self._done()


def run_load(
    url: str,
    requests: Sequence[Request],
    tokenizer: Any,
    load: Mapping[str, float],
    slos_ms: Mapping[str, float],
    done: Callable[[], None],
) -> LoadRun:
    """Send requests and wait for all answers.

    Args:
        url: the server.
        requests: at least one.
        tokenizer: the model's; counts tokens as the client does.
        load: ``concurrency`` or ``rate``; neither: the arrivals of the requests.
        slos_ms: limits of the goodput: "ttft", "tpot".
        done: called after each turn of a request.
    """
    client = _client()
    client.set_global_args(_ARGUMENTS)
    # All contenders get the same arrivals.
    random.seed(0)
    np.random.seed(0)
    turns = [_turns(client, x) for x in requests]
    with contextlib.redirect_stdout(sys.stderr):
        outputs, seconds = asyncio.run(_send_all(client, url, turns, load, _Progress(done)))
        rows = [row for each in turns for row in each]
        return _summarise(client, rows, outputs, seconds, tokenizer, slos_ms)


def _turns(client: Any, request: Request) -> list[Any]:
    """The rows of a request: turn t of T has t/T of the prompt."""
    rows = []
    for turn in range(1, request.turns + 1):
        ids = list(request.ids[: -(-len(request.ids) * turn // request.turns)])
        rows.append(
            client.DatasetRow(
                prompt=ids,
                prompt_len=len(ids),
                output_len=request.output,
                timestamp=request.arrival_ms,
            )
        )
    return rows


async def _send_all(
    client: Any,
    url: str,
    turns: Sequence[Sequence[Any]],
    load: Mapping[str, float],
    progress: _Progress,
) -> tuple[list[Any], float]:
    """Send each request's turns one after the other; return outputs in the order of the rows."""
    concurrency = load.get("concurrency")
    slots = asyncio.Semaphore(int(concurrency)) if concurrency else contextlib.nullcontext()
    send = client.ASYNC_REQUEST_FUNCS["sglang"]

    async def answer(row: Any) -> Any:
        request = client.RequestFuncInput(
            model="",
            prompt=row.prompt,
            api_url=f"{url}/generate",
            prompt_len=row.prompt_len,
            output_len=row.output_len,
            lora_name=None,
            image_data=None,
            extra_request_body={},
        )
        return await send(request_func_input=request, pbar=progress)

    async def converse(rows: Sequence[Any]) -> list[Any]:
        async with slots:
            return [await answer(row) for row in rows]

    started, tasks = time.perf_counter(), []
    later = {id(rows[0]): rows for rows in turns}
    firsts = [rows[0] for rows in turns]
    async for row in client.get_request(firsts, load.get("rate", float("inf")), not load):
        tasks.append(asyncio.create_task(converse(later[id(row)])))
    outputs = [output for each in await asyncio.gather(*tasks) for output in each]
    return outputs, time.perf_counter() - started


def _summarise(
    client: Any,
    rows: Sequence[Any],
    outputs: Sequence[Any],
    seconds: float,
    tokenizer: Any,
    slos_ms: Mapping[str, float],
) -> LoadRun:
    for row, output in zip(rows, outputs, strict=True):
        # An answer that broke off, or an error inside of the stream, counts as a success there.
        if output.success and (not output.ttft or output.output_len < row.output_len):
            output.success = False
            got = len(output.itl) + bool(output.ttft)
            output.error = f"refused or broken off: got {got} of {row.output_len} tokens"
    good = [output for output in outputs if output.success]
    fields: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outputs) - len(good),
        "errors": sorted({_reason(x.error) for x in outputs if not x.success}),
    }
    if good:
        metrics, _ = client.calculate_metrics(list(rows), outputs, seconds, tokenizer, "sglang")
        found = asdict(metrics)
        fields["total_input_tokens"] = found["total_input"]
        fields["total_output_tokens"] = found["total_output"]
        fields["cached_tokens"] = sum(x.cached_tokens for x in good)
        fields |= {name: float(found[name]) for name in (*_RATES, *_TIMES, "concurrency")}
        fields["max_concurrent_requests"] = int(found["max_concurrent_requests"])
    if slos_ms:
        goodput = client.calculate_goodput(outputs, dict(slos_ms), seconds)
        names = ("goodput_slos_ms", "request_goodput", "slo_attainment")
        fields |= {name: getattr(goodput, name) for name in names}
    tpot = [(x.latency - x.ttft) / (x.output_len - 1) for x in good]
    return LoadRun(fields=fields, tpot_s=tpot)


def _reason(text: str) -> str:
    """The line of an error that says what happened: the last one of a traceback."""
    return (text.strip().splitlines() or ["no message"])[-1][:200]


def _client() -> Any:
    """SGLang's client as a module.

    Raises:
        ConfigError: it cannot be imported.
    """
    absent = find_spec("datasets") is None and "datasets" not in sys.modules
    if absent:
        # One of the client's data sets, which is not used here, imports this from a large package.
        stand_in = ModuleType("datasets")
        stand_in.__dict__["load_dataset"] = None
        sys.modules["datasets"] = stand_in
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sglang.benchmark import serving
    except ImportError as error:
        raise ConfigError(
            f"bench serve needs SGLang's client sglang.benchmark.serving: got {one_line(error)}, "
            "expected SGLang 0.5.23"
        ) from None
    finally:
        if absent:
            del sys.modules["datasets"]
    return serving


#: Fewest tokens of a text.
_SHORTEST = 512


@dataclass(frozen=True)
class Prompts:
    """Makes prompts from the tokens of a text, which starts again at its end.

    Attributes:
        tokenizer: the model's.
        ids: tokens of the text.
    """

    tokenizer: Any
    ids: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Any, file: str | None) -> Prompts:
        """Prompts from a text file, or from the two built-in texts.

        Raises:
            ConfigError: the file cannot be read or is too short.
        """
        text = "\n\n".join(map(read_built_in, TEXTS)) if file is None else read_text(file, "--text")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < _SHORTEST:
            raise ConfigError(f"--text: got {len(ids)} tokens, expected {_SHORTEST} or more")
        return cls(tokenizer, ids)

    def equal(self, count: int, context: int, shared: float, output: int) -> list[Request]:
        """Requests of ``context`` tokens; the share ``shared`` at their beginning is the same."""
        prefix = int(shared * context)
        # The parts that differ begin at different places of the text.
        step = max(1, len(self.ids) // (count + 1))
        return [
            Request(
                ids=[*self._slice(0, prefix), *self._slice(prefix + i * step, context - prefix)],
                output=output,
            )
            for i in range(count)
        ]

    def trace(self, file: str, count: int, longest: int) -> list[Request]:
        """Requests of a trace: those that have hash ids in common share as many tokens.

        Args:
            file: Mooncake's JSONL, or a prefix trace of ``hisparse trace convert``.
            count: requests, the earliest ones; 0 for all.
            longest: tokens that the model takes, prompt and output.

        Raises:
            ConfigError: the file cannot be read, or a request cannot be made.
        """
        trace = read_prefix(Path(file))
        return [
            self._request(f"--trace {quoted(file)} request {i}", x, trace.block_size, longest)
            for i, x in enumerate(trace.requests[: count or None], 1)
        ]

    def _request(self, where: str, request: PrefixRequest, size: int, longest: int) -> Request:
        length, output, hashes = request.input_length, request.output_length, request.hash_ids
        where += f" (at {request.timestamp:g} ms)"
        if min(length, output) < 1 or length + output > longest:
            raise ConfigError(
                f"{where}: got {length} and {output} tokens, expected 1 or more, and at most "
                f"{longest} in all, which the model takes"
            )
        # SGLang's export has only whole blocks.
        if len(hashes) < length // size:
            raise ConfigError(
                f"{where}: got {len(hashes)} hash_ids for {length} tokens, expected one for each "
                f"{size} tokens"
            )
        ids = [token for each in hashes for token in self._block(f"Part {each}", size, where)]
        # Another place of the text for each request: they have no block in common there.
        ids += self._slice(crc32(where.encode()), max(0, length - len(ids)))
        return Request(ids=ids[:length], output=max(2, output), arrival_ms=request.timestamp)

    def _block(self, title: str, size: int, where: str) -> list[int]:
        """The tokens of a block: its title, which no other block has, then a part of the text."""
        head = self.tokenizer(f"\n\n{title}.\n\n", add_special_tokens=False)["input_ids"]
        if len(head) > size:
            raise ConfigError(f"{where}: got blocks of {size} tokens, expected {len(head)} or more")
        # Only the title decides where the text begins.
        return [*head, *self._slice(crc32(title.encode()), size - len(head))]

    def _slice(self, start: int, length: int) -> list[int]:
        size = len(self.ids)
        return [self.ids[(start + i) % size] for i in range(length)]
