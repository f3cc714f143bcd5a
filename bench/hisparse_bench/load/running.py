"""A server that somebody else started."""

from __future__ import annotations

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse_bench.server import ServerClient

__all__ = ["RunningServer"]


class RunningServer(ServerClient):
    """Requests to a running SGLang server.

    Args:
        url: its address.
        budget: tokens within which it attends to all, as far as known.
    """

    def __init__(self, url: str, budget: int) -> None:
        super().__init__(url)
        self.budget = budget

    @classmethod
    def connect(cls, url: str) -> RunningServer:
        """Ask a server for its settings.

        Raises:
            ConfigError: no SGLang server answers there.
        """
        try:
            info = ServerClient(url).info()
            settings = info["hisparse_config"] if info["attention_backend"] == "hisparse" else None
            config = HiSparseConfig.parse(settings or "{}")
        except (HiSparseError, OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"--url: got {url!r}, expected a running SGLang server: {one_line(error)}"
            ) from None
        return cls(url, max(config.budget, config.min_sparse_context))
