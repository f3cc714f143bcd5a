"""A server that somebody else started."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import torch

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
