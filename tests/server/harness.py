"""Starts the real SGLang server as a subprocess and talks to it over HTTP.

Most servers are forks of a process that has imported SGLang (``fork_server.py``). A server with
``forked=False`` is ``python -m sglang.launch_server``: each way of serving has one test of those.

What makes a start of either quick:
``--skip-server-warmup`` sends no warm-up request; ``--skip-tokenizer-init`` loads no tokenizer,
prompts and answers are token ids; ``--max-total-tokens`` (given by the tests) keeps a dense server
from filling all memory with zeros; ``OMP_NUM_THREADS=1`` and ``--sleep-on-idle`` keep SGLang's
processes from fighting for the cores.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from fork_server import fork_server
from prometheus_client.parser import text_string_to_metric_families

from hisparse.errors import HiSparseError
from hisparse_bench.server import ServerProcess

_REQUEST_TIMEOUT_S = 400
_LOG_END = 6000


class Refused(Exception):
    """The server answered with an error.

    Attributes:
        status: HTTP status code.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


@dataclass(frozen=True)
class Answer:
    """What a request got.

    Attributes:
        ids: output token ids.
        cached: prompt tokens taken from the radix cache.
        retractions: how often the request lost its place and was prefilled again.
        logprobs: of each output token.
        top_logprobs: for each output token, token id to logprob of the best ones.
        text: output text, where the server has a tokenizer.
        finish: why it ended.
        verified: forwards that verified drafts; 0 without speculation.
    """

    ids: list[int]
    cached: int
    retractions: int
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    text: str
    finish: dict[str, Any]
    verified: int = 0


class Metrics(Mapping[str, float]):
    """SGLang's Prometheus page: name to value, summed over label sets."""

    def __init__(self, page: str) -> None:
        self._values: dict[str, float] = {}
        families = text_string_to_metric_families(page)
        self._series = [sample for family in families for sample in family.samples]
        for sample in self._series:
            self._values[sample.name] = self._values.get(sample.name, 0.0) + sample.value

    def by(self, label: str, name: str) -> dict[str, float]:
        """Values of a metric by one of its labels."""
        names = (name, f"{name}_total")
        return {x.labels[label]: x.value for x in self._series if x.name in names}

    def __getitem__(self, name: str) -> float:
        for key in (name, f"{name}_total"):
            if key in self._values:
                return self._values[key]
        shown = ", ".join(n for n in self._values if n.startswith("hisparse")) or "none of hisparse"
        raise KeyError(f"{name} is not among the metrics ({shown})")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _environment(python_path: Sequence[Path], env: Mapping[str, str]) -> dict[str, str]:
    paths = [str(p) for p in python_path]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    quick = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return ServerProcess.cpu_environment(1) | quick | dict(env)


class Server(ServerProcess):
    """A running server; use it as a context manager.

    Args:
        model: folder of the model.
        log: file that gets what the server prints.
        flags: more of SGLang's flags.
        backend: attention backend.
        config: value of ``--hisparse-config``.
        tokenizer: let the server load the model's tokenizer.
        python_path: folders in front of the module path, for test-only plugins.
        env: more environment variables.
        forked: False for ``python -m sglang.launch_server``.
        line: a whole command line without its port, in place of all that the others would give.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *flags: str,
        backend: str = "hisparse",
        config: Mapping[str, Any] | None = None,
        tokenizer: bool = False,
        python_path: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
        forked: bool = True,
        line: Sequence[str] = (),
    ) -> None:
        given = ["--device", "cpu", "--dtype", "float32", "--attention-backend", backend]
        given += ["--skip-server-warmup", "--sleep-on-idle"]
        given += [] if tokenizer else ["--skip-tokenizer-init"]
        given += [] if config is None else ["--hisparse-config", json.dumps(config)]
        super().__init__(str(model), log, [*given, *flags], path=python_path)
        if line:
            self._command = [*line, "--port", self.url.rpartition(":")[2]]
        self._forked = forked
        self._env = _environment(python_path, env or {})
        self._exit_code: int | None = None

    def __enter__(self) -> Server:
        self._forks = fork_server() if self._forked else None
        self.start(self._env)
        return self

    def stop(self) -> None:
        process = self._process
        super().stop()
        if process is not None:
            self._exit_code = process.returncode

    def _end(self) -> str:
        return f"; its log ends:\n{self.log()[-_LOG_END:]}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._process.pid

    def log(self) -> str:
        """What the server has printed."""
        return self._log.read_text(errors="replace")

    def wait_until_gone(self) -> None:
        """Wait for a server that was told to end, until no process of its group is left."""
        end = time.monotonic() + _REQUEST_TIMEOUT_S
        self._process.wait(_REQUEST_TIMEOUT_S)
        with suppress(ProcessLookupError):
            while True:
                os.killpg(self.pid, 0)
                if time.monotonic() > end:
                    raise RuntimeError(f"the server left processes behind{self._end()}")
                time.sleep(0.05)

    def _post(self, path: str, body: Mapping[str, Any], **options: Any) -> requests.Response:
        try:
            reply = requests.post(
                f"{self.url}{path}", json=body, timeout=_REQUEST_TIMEOUT_S, **options
            )
        except requests.RequestException as error:
            raise RuntimeError(f"{path}: {error}{self._end()}") from error
        if reply.status_code != 200:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended while it served {path}{self._end()}")
            raise Refused(reply.status_code, reply.text)
        return reply

    def generate(
        self,
        prompt: Sequence[int] | str,
        max_new_tokens: int = 32,
        *,
        top_logprobs: int = 0,
        ignore_eos: bool = True,
        **body: Any,
    ) -> Answer:
        """Greedy continuation of token ids, or of a text where the server has a tokenizer."""
        request = _request(prompt, max_new_tokens, ignore_eos) | body
        if top_logprobs:
            request |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
        return _answer(self._post("/generate", request).json())

    def samples(
        self, prompt: Sequence[int], max_new_tokens: int, count: int, **body: Any
    ) -> list[Answer]:
        """Several greedy continuations of one prompt, asked for in one request."""
        request = _request(prompt, max_new_tokens, True) | body
        request["sampling_params"] |= {"n": count}
        return [_answer(reply) for reply in self._post("/generate", request).json()]

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, ignore_eos: bool
    ) -> list[Answer]:
        """Greedy continuations of prompts that are sent in one request."""
        request = _request([], max_new_tokens, ignore_eos) | {"input_ids": prompts}
        return [_answer(reply) for reply in self._post("/generate", request).json()]

    def generate_many(
        self,
        prompts: Sequence[Sequence[int] | str],
        max_new_tokens: int | Sequence[int] = 32,
        *,
        delay_s: float = 0.0,
        **options: Any,
    ) -> list[Answer]:
        """Continuations of all prompts at the same time, each a request of its own.

        Args:
            prompts: one per request.
            max_new_tokens: for all, or one per request.
            delay_s: time between two sends.
            options: as for :meth:`generate`.
        """
        many = isinstance(max_new_tokens, int)
        lengths = [max_new_tokens] * len(prompts) if many else max_new_tokens
        with ThreadPoolExecutor(len(prompts)) as threads:
            waiting = []
            for prompt, length in zip(prompts, lengths, strict=True):
                waiting.append(threads.submit(self.generate, prompt, length, **options))
                time.sleep(delay_s)
            return [reply.result() for reply in waiting]

    @contextmanager
    def stream(
        self, prompt: Sequence[int] | str, max_new_tokens: int, **body: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Events of a streamed answer; leaving the block early aborts the request."""
        request = _request(prompt, max_new_tokens, True) | {"stream": True} | body
        reply = self._post("/generate", request, stream=True)
        try:
            yield _events(reply)
        finally:
            reply.close()

    def abort_after(
        self, prompt: Sequence[int], num_tokens: int, max_new_tokens: int, **body: Any
    ) -> list[int]:
        """Start a request and abort it by its id once it has so many tokens; what it got."""
        rid = f"abort-{time.monotonic_ns()}"
        ids: list[int] = []
        with self.stream(prompt, max_new_tokens, rid=rid, **body) as events:
            for event in events:
                if len(ids) < num_tokens <= len(event["output_ids"]):
                    self._post("/abort_request", {"rid": rid})
                ids = event["output_ids"]
        return ids

    def metrics(self) -> Metrics:
        """The Prometheus page as of now."""
        return Metrics(requests.get(f"{self.url}/metrics", timeout=30).text)

    def counted(self, *names: str) -> tuple[float, ...]:
        """``hisparse:`` metrics."""
        metrics = self.metrics()
        return tuple(metrics[f"hisparse:{name}"] for name in names)

    def counted_by(self, label: str, name: str) -> dict[str, float]:
        """A ``hisparse:`` metric by one of its labels, such as the rank."""
        return self.metrics().by(label, f"hisparse:{name}")

    def refusal(self) -> str:
        """Start a server that should not come up: hisparse's one line in its log."""
        with pytest.raises(HiSparseError):
            self.__enter__()
        assert self._exit_code != 0
        (line,) = [x for x in self.log().splitlines() if "hisparse: error: " in x]
        return line

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter under a name."""
        self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter."""
        self._post("/unload_lora_adapter", {"lora_name": name})


def _request(prompt: Sequence[int] | str, max_new_tokens: int, ignore_eos: bool) -> dict[str, Any]:
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
    }
    return given | {"sampling_params": sampling}


def _answer(reply: dict[str, Any]) -> Answer:
    meta = reply["meta_info"]
    return Answer(
        ids=reply["output_ids"],
        cached=meta["cached_tokens"],
        retractions=meta.get("num_retractions") or 0,
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or ()],
        top_logprobs=[
            {entry[1]: entry[0] for entry in step} for step in meta.get("output_top_logprobs") or ()
        ],
        text=reply.get("text") or "",
        finish=meta["finish_reason"],
        verified=meta.get("spec_verify_ct") or 0,
    )


def _events(reply: requests.Response) -> Iterator[dict[str, Any]]:
    for line in reply.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])
