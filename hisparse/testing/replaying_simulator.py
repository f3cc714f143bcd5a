"""A simulator that replays its decode steps, as a server with CUDA graphs does."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.engine.graphs import StaticBatch
from hisparse.testing.simulator import Request, Simulator
from hisparse.testing.step_recording import record
from hisparse.types import IndexerInputs


class ReplayingSimulator(Simulator):
    """Records one step of padding at its start and replays it for later steps.

    A step that cannot be replayed runs eagerly.

    Attributes:
        batch_size: rows of the recorded step; rows without a request are padding.
        num_pages: pages of the longest context.
        recording: the recorded step.
        static: the input tensors of the recorded step.
        num_replayed: steps that were replayed so far.
    """

    batch_size = 4
    num_pages = 192

    def __post_init__(self) -> None:
        self.checked = False
        super().__post_init__()
        self.num_replayed = 0
        self.static = StaticBatch(
            self.batch_size, self.num_pages, self.page_size, torch.device("cpu")
        )
        example = self.request(1, 1, seed=0)
        self.end(example)
        self.streams = [
            torch.randn(x.shape[0], self.batch_size, *x.shape[2:]) for x in example.streams
        ]
        if self.spec.latent:
            self.streams[2] = self.streams[1][..., : self.spec.v_head_dim]
        self.capture()

    def decode(self, *requests: Request) -> Tensor:
        """Decode one token of each request; returns the outputs ``[L, B, Hq, D]``."""
        batch = self.next_tokens(*requests)
        if not self.coordinator.prepare_replay(batch):
            self.coordinator.forward_begin(batch)
            return self._forward([(r, r.done - 1, r.done) for r in requests])
        self.static.load(batch)
        for static, streams in zip(
            self.streams, zip(*(r.streams for r in requests), strict=True), strict=True
        ):
            # Padding rows may hold any values.
            static.fill_(torch.nan)
            for row, (request, stream) in enumerate(zip(requests, streams, strict=True)):
                static[:, row] = stream[:, request.done - 1]
        self.recording.replay()
        self.num_replayed += 1
        return self.out[:, : len(requests)].clone()

    def capture(self) -> None:
        """Run a step of padding twice and record the second run, for all later replays."""
        self.coordinator.prepare_capture()
        self.static.load(None)
        self.run()
        with record("a decode step") as self.recording:
            self.out = self.run()

    def run(self) -> Tensor:
        """Run a step with the static tensors; returns the outputs ``[L, B, Hq, D]``."""
        self.coordinator.forward_begin(self.static.first(self.batch_size))
        outs = []
        for layer in range(self.layers):
            q, k, v, *indexer = (x[layer] for x in self.streams)
            inputs = IndexerInputs(*indexer) if self.algorithm.indexer else None
            outs.append(self.coordinator.attention(layer, q, k, v, inputs))
        self.coordinator.forward_end()
        return torch.stack(outs)
