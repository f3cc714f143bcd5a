"""Run the SGLang server as a child process, for the demo and the benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse.eval import models
from hisparse_bench.fork_server import ForkedProcess, ForkServer

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0

#: Below the ports of outgoing connections (Linux: from 32768 on), one of which could take the port
#: while the server still starts.
_PORTS = range(20000, 32000)


def free_port() -> int:
    """A loopback port on which no process listens."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Generation:
    """A streamed answer.

    Attributes:
        text: the generated text.
        ids: its token ids, if the request had token ids.
        times_s: arrival of each event, seconds since the request was sent.
        prompt_tokens, cached_tokens: tokens of the prompt, and those found in the radix cache.
    """

    text: str
    ids: list[int]
    times_s: list[float]
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to first token, seconds."""
        return self.times_s[0]

    @property
    def time_per_token_s(self) -> float:
        """Median time between two events, seconds; 0 if there was one."""
        gaps = [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]
        return median(gaps) if gaps else 0.0


class ServerClient:
    """Requests to an SGLang server.

    Args:
        url: its address, such as "http://127.0.0.1:30000".
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True
    ) -> Generation:
        """Continue a text or token ids greedily, and time each event."""
        body: dict[str, Any] = {
            "stream": True,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": ignore_eos,
            },
        }
        body |= {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        started, times, last = time.perf_counter(), [], {}
        with self._open("/generate", body) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter() - started)
                    last = json.loads(line[len(b"data: ") :])
        meta = last["meta_info"]
        return Generation(
            last.get("text") or "",
            last.get("output_ids") or [],
            times,
            meta["prompt_tokens"],
            meta["cached_tokens"],
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **logprobs: Any
    ) -> list[dict[str, Any]]:
        """Continue token ids greedily; return SGLang's answers.

        Args:
            prompts: token ids of each.
            max_new_tokens: tokens of each answer.
            logprobs: ``top_logprobs_num`` or ``token_ids_logprob``, if wanted.
        """
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": bool(logprobs),
            **logprobs,
        }
        with self._open("/generate", body) as reply:
            answers: list[dict[str, Any]] = json.load(reply)
        return answers

    def info(self) -> dict[str, Any]:
        """The server's report of its flags and its memory."""
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=30) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def flush_cache(self) -> None:
        """Wait until the server is idle and empty its radix cache."""
        end = time.monotonic() + 60
        while True:
            try:
                self._open("/flush_cache", {}).close()
                return
            except HiSparseError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def metrics(self) -> dict[str, float]:
        """Prometheus metrics, summed over label sets."""
        found: dict[str, float] = {}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            for line in reply.read().decode().splitlines():
                match = re.match(r"([^#{\s]+)(?:\{.*\})?\s+(\S+)$", line)
                if match:
                    found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def _open(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=600)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise HiSparseError(
                f"{path}: got {error.code} from the server, expected 200: {text}"
            ) from error


#: SGLang's names; "auto" is the model's.
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

_NOT_A_SERVER = "--url: got {!r}, expected a running SGLang server: {}"


class RunningServer(ServerClient):
    """Requests to a running SGLang server.

    Args:
        url: its address.
        info: its report, from :meth:`ServerClient.info`.
        config: hisparse's settings; None if hisparse does not serve.
    """

    def __init__(self, url: str, info: dict[str, Any], config: HiSparseConfig | None) -> None:
        super().__init__(url)
        self._config = config
        self.model = str(info["model_path"])
        self.device = str(info["device"])
        names = str(info["kv_cache_dtype"]), str(info["dtype"])
        #: Of its KV cache; None: the model's.
        self.dtype = next((_DTYPES[name] for name in names if name in _DTYPES), None)

    @property
    def budget(self) -> int | None:
        """Tokens that hisparse attends per step; None without hisparse."""
        return None if self._config is None else self._config.budget

    @property
    def exact_tokens(self) -> int | None:
        """Tokens within which hisparse attends to all; None without hisparse."""
        config = self._config
        return None if config is None else max(config.budget, config.min_sparse_context)

    def check_model(self, given: str) -> str:
        """The model to read the tokenizer from: ``given``, or the server's if that is empty.

        Raises:
            ConfigError: the server has another one.
        """
        if not given:
            return self.model
        known = {Path(x).name.lower() for x in (given, models.resolve(given))}
        if Path(self.model).name.lower() not in known:
            raise ConfigError(f"--model: got {given!r}, expected {self.model!r}, as at {self.url}")
        return given

    @classmethod
    def connect(cls, url: str) -> RunningServer:
        """Ask a server for its settings.

        Raises:
            ConfigError: no SGLang server answers there, or one of hisparse has no metrics.
        """
        try:
            info = ServerClient(url).info()
            hisparse = info["attention_backend"] == "hisparse"
            config = HiSparseConfig.parse(info["hisparse_config"] or "{}") if hisparse else None
            found = cls(url, info, config)
            if hisparse:
                found.metrics()
            return found
        except urllib.error.HTTPError as error:
            if not error.url.endswith("/metrics"):
                raise ConfigError(_NOT_A_SERVER.format(url, one_line(error))) from None
            raise ConfigError(
                f"--url: got {url!r}, a server of hisparse without metrics, expected one started "
                "with --enable-metrics, which has the bytes of its KV cache"
            ) from None
        except (HiSparseError, OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(_NOT_A_SERVER.format(url, one_line(error))) from None


class ServerProcess(ServerClient):
    """A context manager for SGLang on a free loopback port, in its own process group.

    Args:
        model: folder or hub id.
        log: file for the server's output.
        flags: SGLang's flags, without model, address and metrics.
        forks: forks the server, so that it need not import SGLang; None: a new interpreter.
        path: folders in front of the module path of a forked server.
    """

    def __init__(
        self,
        model: str,
        log: Path,
        flags: Sequence[str],
        forks: ForkServer | None = None,
        path: Sequence[Path] = (),
    ) -> None:
        port = free_port()
        super().__init__(f"http://127.0.0.1:{port}")
        self._log = log
        self._command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--enable-metrics", *flags]
        self._forks = forks
        self._path = path
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @staticmethod
    def cpu_environment(num_threads: int) -> dict[str, str]:
        """Environment variables for SGLang on a CPU."""
        return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(num_threads)}

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the server and wait until it answers.

        Raises:
            HiSparseError: the server did not start; the message has the end of its log.
        """
        env = os.environ | dict(environment)
        with self._log.open("wb") as log:
            if self._forks is not None:
                line = self._command[2:]
                self._process = self._forks.start(line, env, self._path, self._log, self._log)
            else:
                self._process = subprocess.Popen(
                    self._command, stdout=log, stderr=log, env=env, start_new_session=True
                )
        end = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.2)
        self.stop()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        raise HiSparseError(
            f"SGLang: got no answer from {self.url}, expected a server that came up; the end of "
            f"{self._log}:\n{tail}"
        )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGKILL to its process group: SGLang looks for SIGTERM every 5 s.

        Waits until all of its processes have given their memory back, which the next server needs.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        children = []
        try:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
        finally:
            # Whatever interrupts: `timeout` sends SIGTERM twice, to a process and its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end = time.monotonic() + _STOP_TIMEOUT_S
        while any(map(_runs, children)) and time.monotonic() < end:
            time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    """False for a process that has ended, also for a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
