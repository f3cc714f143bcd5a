"""Updates of a running server's weights, by SGLang's own code but for the processes beside it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.weight_checker import WeightChecker
from torch import Tensor

__all__ = ["CheckpointEngine", "Updates"]


class Updates:
    """SGLang's own updater of a server's weights, with a scheduler that flushes when it is idle.

    Args:
        server: has a ``linker`` and a ``model``, to whose weights each update adds 1.
        path: an empty folder.

    Attributes:
        idle: whether no request runs.
    """

    def __init__(self, server: Any, path: Path) -> None:
        self.server, self.path, self.idle = server, path, True
        weights: Any = SimpleNamespace(
            model=server.model, check_weights=WeightChecker(get_model=lambda: server.model).handle
        )
        weights.weight_updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=SimpleNamespace(
                model_path="", revision=None, dtype=torch.float32, hf_config=None, quantization=None
            ),
            custom_weight_loaders={},
            get_model=lambda: server.model,
            update_model_fields=lambda *args, **fields: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: weights,
            _model_update_group={"group": torch.distributed.group.WORLD},
        )
        worker = SimpleNamespace(
            model_runner=weights,
            weight_update_runners=lambda: [("target", weights)],
            deserialize_own_rank=lambda tensors: tensors,
        )
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self.flush,
            is_fully_idle=lambda: self.idle,
            scheduler=SimpleNamespace(record_weight_version_change=lambda new_version: None),
        )

    def flush(self, empty_cache: bool = True) -> bool:
        if self.idle:
            self.server.linker.reset()
        return self.idle

    def begin(self) -> None:
        assert self.manager.begin_weight_update(SimpleNamespace(selector="all")).success

    def end(self) -> None:
        assert self.manager.end_weight_update(None).success

    def new_weights(self) -> dict[str, Tensor]:
        return {name: value + 1 for name, value in self.server.model.state_dict().items()}

    def request(self, *, flush: bool, **fields: Any) -> Any:
        fields |= {"flush_cache": flush, "torch_empty_cache": False, "weight_version": None}
        return SimpleNamespace(selector="all", load_format=None, **fields)

    def from_disk(self, *, flush: bool) -> Any:
        save_file(self.new_weights(), self.path / "model.safetensors")
        request = self.request(flush=flush, model_path=str(self.path), recapture_cuda_graph=False)
        request.load_format = "auto"
        return self.manager.update_weights_from_disk(request)

    def from_distributed(self, *, flush: bool) -> Any:
        shapes = {name: value.shape for name, value in self.new_weights().items()}
        return self.manager.update_weights_from_distributed(
            self.request(
                flush=flush,
                group_name="group",
                names=list(shapes),
                dtypes=["float32"] * len(shapes),
                shapes=list(shapes.values()),
            )
        )

    def from_tensor(self, *, flush: bool) -> Any:
        tensors = list(self.new_weights().items())
        return self.manager.update_weights_from_tensor(
            self.request(flush=flush, serialized_named_tensors=tensors)
        )

    def from_ipc(self, *, flush: bool) -> Any:
        return self.manager.update_weights_from_ipc(
            self.request(flush=flush, zmq_handles={"a GPU": "a socket"})
        )


class CheckpointEngine:
    """Stands for SGLang's receiver of weights, which needs the package checkpoint-engine."""

    def __init__(self, model_runner: Any) -> None:
        self.model = model_runner.model

    def update_weights_from_ipc(self, zmq_handles: dict[str, str]) -> None:
        self.model.load_weights(
            (name, value + 1) for name, value in self.model.state_dict().items()
        )
