"""A running server: what it uses, and how far its load is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import torch
from rich.progress import Progress

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse.eval import models
from hisparse_bench.server import ServerClient

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
        info: what it says of itself.
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
        except HTTPError as error:
            if not error.url.endswith("/metrics"):
                raise ConfigError(_NOT_A_SERVER.format(url, one_line(error))) from None
            raise ConfigError(
                f"--url: got {url!r}, a server of hisparse without metrics, expected one started "
                "with --enable-metrics, which has the bytes of its KV cache"
            ) from None
        except (HiSparseError, OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(_NOT_A_SERVER.format(url, one_line(error))) from None


_DEVICE = ("device_kv_bytes", "device_representation_bytes", "device_table_bytes")
_HOST = ("host_kv_bytes", "host_representation_bytes")
_MOVED = ("hit_pages", "miss_pages", "decode_read_bytes", "prefill_read_bytes", "written_bytes")
#: Metrics are published when a request ends, by another process than the one that answers.
_SETTLE_S = 0.5


def _metrics(server: ServerClient) -> dict[str, float]:
    """A server's metrics; none if it runs without ``--enable-metrics``."""
    try:
        return server.metrics()
    except HTTPError:
        return {}


@dataclass(frozen=True)
class Usage:
    """A server's state at one time.

    Attributes:
        metrics: Prometheus metrics, summed over label sets.
        kv_tokens: capacity of its KV cache.
    """

    metrics: Mapping[str, float]
    kv_tokens: int

    @classmethod
    def read(cls, server: ServerClient) -> Usage:
        """Ask an idle server."""
        time.sleep(_SETTLE_S)
        memory = server.info()["internal_states"][0]["memory_usage"]
        return cls(_metrics(server), int(memory["token_capacity"]))

    @property
    def is_hisparse(self) -> bool:
        """Whether hisparse serves."""
        return "hisparse:device_kv_bytes" in self.metrics

    def memory(self, kv_token_bytes: int) -> dict[str, int]:
        """Bytes of the KV cache; those of a dense one are tokens times ``kv_token_bytes``."""
        if not self.is_hisparse:
            device, host = self.kv_tokens * kv_token_bytes, 0
        else:
            device, host = (
                int(sum(self.metrics[f"hisparse:{name}"] for name in names))
                for names in (_DEVICE, _HOST)
            )
        return {"device_bytes": device, "host_bytes": host, "kv_tokens": self.kv_tokens}

    def moved_since(self, before: Usage) -> dict[str, float]:
        """Hits, misses, bytes moved and, if a page was selected, the hit ratio, since then."""
        if not self.is_hisparse:
            return {}
        found = {}
        for name in _MOVED:
            key = f"hisparse:{name}_total"
            found[name] = self.metrics.get(key, 0.0) - before.metrics.get(key, 0.0)
        selected = found["hit_pages"] + found["miss_pages"]
        return found | ({"hit_ratio": found["hit_pages"] / selected} if selected else {})


class Status:
    """The state of one run: a bar on a terminal, elsewhere a line for each change.

    Args:
        progress: shows the bar.
        run: which run of how many, such as "run 2 of 4"; empty for a single one.
    """

    def __init__(self, progress: Progress, run: str = "") -> None:
        self._progress = progress
        self._run = run
        self._servers = self._started = 0
        #: Work of each kind that is left; what was done, and the seconds that it took.
        self._work: dict[str, float] = {}
        self._done: dict[str, tuple[float, float]] = {}
        self._task = progress.add_task("reading the model", total=None)

    def expect(self, servers: int, work: Mapping[str, float]) -> None:
        """Set how many servers the run starts, and how much work of each kind it is."""
        self._servers, self._work = servers, dict(work)

    @contextmanager
    def work(self, kind: str, amount: float) -> Iterator[None]:
        """Time a part of the work, in the unit of :meth:`expect`."""
        began = time.monotonic()
        try:
            yield
        finally:
            done, seconds = self._done.get(kind, (0.0, 0.0))
            self._done[kind] = done + amount, seconds + time.monotonic() - began
            self._work[kind] = max(0.0, self._work.get(kind, 0.0) - amount)

    def start_server(self, name: str) -> None:
        """Say that the next server starts."""
        self._started += 1
        self.say(f"starting the server of {name}{self._left()}")

    def say(self, text: str, total: int | None = None) -> None:
        """Say what happens; ``total``: how often :meth:`advance` is called."""
        where = f"server {self._started} of {self._servers}" if self._started else ""
        text = ": ".join(filter(None, (", ".join(filter(None, (self._run, where))), text)))
        self._progress.reset(self._task, description=text, total=total)
        if not self._progress.console.is_terminal:
            self.show(text)

    def show(self, text: str) -> None:
        """Print a line that stays."""
        clock = time.strftime("%H:%M:%S")
        self._progress.console.print(
            f"{clock} {text}", highlight=False, markup=False, soft_wrap=True
        )

    def advance(self) -> None:
        """One of the total is done."""
        self._progress.advance(self._task)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.remove_task(self._task)

    def _left(self) -> str:
        """What the rest of the run takes, if work takes as long as that of its kind before."""
        if not self._done:
            return ""
        left = {kind: amount for kind, amount in self._work.items() if amount}
        known = left.keys() & self._done.keys()
        seconds = sum(left[kind] * self._done[kind][1] / self._done[kind][0] for kind in known)
        about = "about" if len(known) == len(left) else "more than"
        return f", {about} {seconds / 60:.0f} min left of this run"
