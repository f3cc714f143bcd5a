"""Ranks beyond those that divide a model's heads: replicas, attention replicas and pipelines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_dense_layers
from hisparse.memory.host import free_host_memory
from hisparse.sglang import ranks
from hisparse.sglang.features.base import (
    ATTENTION_REPLICAS,
    CUDA_GRAPHS,
    EXTENSION_OF_ALL_LAYERS,
    PIPELINE,
    REPLICAS,
    REUSED_LAYERS,
    STORAGE,
    Feature,
    Start,
)
from hisparse.sglang.models import ModelShape
from hisparse.sglang.session import ServerSession
from hisparse.units import resolve_memory


class Replicas(Feature):
    """Host memory is divided among replicas, and layers among the stages of a pipeline."""

    name = "replicas"
    serves = (PIPELINE, ATTENTION_REPLICAS, REPLICAS)
    excludes = {
        PIPELINE: (STORAGE, EXTENSION_OF_ALL_LAYERS, REUSED_LAYERS),
        ATTENTION_REPLICAS: (STORAGE, CUDA_GRAPHS),
    }

    def prepare(self, start: Start) -> Mapping[str, Any]:
        """The settings that all replicas share."""
        changes = dict[str, Any]()
        if REPLICAS.given(start):
            # Replicas start at times of their own, and each finds less free than the one before it.
            changes["host_memory"] = resolve_memory(
                start.config.host_memory, free_host_memory(), "host_memory"
            )
        if ATTENTION_REPLICAS.given(start):
            # Whether a captured step can serve a step depends on its requests, and all ranks would
            # have to agree on it.
            changes["cuda_graph"] = False
        return changes

    def own_layers(
        self, config: HiSparseConfig, shape: ModelShape, configurator: Any
    ) -> Sequence[int] | None:
        """The layers of this rank's stage of a pipeline."""
        if ranks.pipeline_size() == 1:
            return None
        layers = configurator.model_config.num_hidden_layers
        check_dense_layers(config, replace(shape.spec, num_layers=layers, windows=()))
        first = configurator.layer_info.start_layer
        return range(first, first + shape.spec.num_layers)

    def sized(self, session: ServerSession, server_args: Any) -> None:
        """Agree with the other stages: those with fewer layers have room for more."""
        if ranks.pipeline_size() > 1:
            sizing = session.setup.sizing
            tokens, requests = ranks.least_of_ranks(sizing.kv_tokens, sizing.max_requests)
            session.resize(tokens, requests)


FEATURE = Replicas()
