"""What a server's storage keeps of the model, and whether it may be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hisparse.sglang.features.storage.counters import StorageCounters

__all__ = ["StorageState"]

logger = logging.getLogger("hisparse")


@dataclass(kw_only=True)
class StorageState:
    """The state of one rank.

    Attributes:
        model: SGLang's model.
        model_config: the model's configuration, of transformers.
        model_settings: its settings that differ from defaults.
        counters: of what the storage does.
        adapter_key: takes SGLang's id of a LoRA adapter; the adapter's name in keys of pages.
        rests: whether the storage is not used: until a flush of all ranks, since the pages in host
            memory may be of other weights.
        fingerprint: of the model, taken at its last flush; "": an update began since.
        weight_updater: SGLang's manager of updates; None: none has begun.
    """

    model: Any
    model_config: Any
    model_settings: Mapping[str, object]
    counters: StorageCounters = field(default_factory=StorageCounters)
    adapter_key: Callable[[str], str] | None = None
    rests: bool = True
    fingerprint: str = ""
    weight_updater: Any = None

    def note_update(self, updater: Any) -> None:
        """Let the storage rest until a flush: host memory has K and V of the old weights.

        Args:
            updater: SGLang's ``SchedulerWeightUpdaterManager``, whose update begins, goes on or
                ends. It may fail midway, and weights may come by RDMA until it ends.
        """
        if self.fingerprint:
            logger.warning(
                "hisparse: storage: an update of the weights began; the store is not used until a "
                "flush after its end (/flush_cache, unless the update flushes itself)"
            )
        self.rests, self.fingerprint, self.weight_updater = True, "", updater

    @property
    def update_is_open(self) -> bool:
        """Whether SGLang waits for more weights: from ``begin`` to ``end_weight_update``."""
        return self.weight_updater is not None and self.weight_updater._session is not None
