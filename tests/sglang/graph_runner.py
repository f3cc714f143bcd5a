"""SGLang's own ``DecodeCudaGraphRunner`` with the attention backend, over a simulator's engine.

Everything is SGLang's, from the sizes that are captured to the padding of a batch, but for four
things: a graph is the recorded operations of a capture, the device is a CPU, there is one rank, and
the model is attention over given q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as sglang_runner
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from hisparse.engine.batches import DecodeBatch
from hisparse.sglang import backend as hisparse_backend
from hisparse.sglang import install, session
from hisparse.sglang.features import cuda_graphs
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import Recording, record

__all__ = ["Runner", "server"]

CONTEXT = 192
_PARALLEL = {"tp_rank": 0, "tp_group": SimpleNamespace(barrier=lambda: None)}


class _Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    recording: Recording

    def replay(self) -> None:
        self.recording.replay()


@contextmanager
def _graph(*, cuda_graph: _Graph, pool: object, stream: object) -> Iterator[None]:
    """In place of ``torch.cuda.graph``."""
    with record("a decode step") as cuda_graph.recording:
        yield


@contextmanager
def _one_rank(stream: Any = None) -> Iterator[Any]:
    yield SimpleNamespace(stream=stream)


@contextmanager
def server(**arguments: Any) -> Iterator[Any]:
    """SGLang's arguments of a server, with a CPU in place of CUDA."""
    graphs = CudaGraphConfig(
        decode=PhaseConfig(backend=Backend.FULL), prefill=PhaseConfig(backend=Backend.DISABLED)
    )
    arguments |= {"device": "cpu", "cuda_graph_config": graphs}
    device = {
        "graph": _graph,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, value in device.items():
            stack.enter_context(patch.object(torch.cpu, name, value, create=True))
        stack.enter_context(patch.object(torch.cuda, "CUDAGraph", _Graph))
        stack.enter_context(patch.object(sglang_runner, "graph_capture", _one_rank))
        # The recorder has to find all tensors that there are.
        stack.enter_context(patch.object(sglang_runner, "freeze_gc", nullcontext))
        # It would import all of DeepSeek's models, to find that this is none of them.
        runner, no = sglang_runner.DecodeCudaGraphRunner, lambda runner: False
        stack.enter_context(patch.object(runner, "_forks_draft_metadata_prep", no))
        stack.enter_context(get_parallel().override(**_PARALLEL))
        yield stack.enter_context(get_context().override_server_args(**arguments))


class Runner:
    """Serves a simulator's requests by SGLang's runner of decode graphs.

    Attributes:
        sim: the simulator; its requests come from :meth:`request`.
        graphs: SGLang's runner.
        num_replays: steps that graphs have served.
        reports: how often the metrics were told of a step.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        server_args: Any,
        sizes: Sequence[int] = (1, 2, 4),
        **settings: Any,
    ) -> None:
        self.sim = sim = Simulator(checked=False, **settings)
        self.num_replays = self.reports = 0
        self.pool = ReqToTokenPool(sim.num_slots - 1, CONTEXT, "cpu", False)
        pages = -(-CONTEXT // sim.page_size)
        self.session = SimpleNamespace(
            setup=SimpleNamespace(
                spec=sim.spec,
                policy=sim.policy,
                sizing=SimpleNamespace(request=SimpleNamespace(context_pages=pages)),
            ),
            layer_ids=range(sim.layers),
            slots_cpu=None,
            requests=(),
            chunked_request_id=None,
            num_decoding=0,
            begins_on_alloc=True,
        )
        reporter = SimpleNamespace(report=lambda: setattr(self, "reports", self.reports + 1))
        monkeypatch.setattr(hisparse_backend, "build_coordinator", lambda *_: sim.coordinator)
        monkeypatch.setattr(hisparse_backend, "MetricsReporter", lambda *_: reporter)
        monkeypatch.setattr(session, "_session", self.session)
        install.install(cuda_graphs.FEATURE.hooks)
        # Token 0 is that of padding: its K and V may be anything.
        heads = (sim.q_heads, sim.kv_heads, sim.kv_heads)
        tokens = sim.num_slots * CONTEXT
        self.tokens = [torch.full((tokens, sim.layers, h, sim.head_dim), torch.nan) for h in heads]
        self.target = self._target(server_args)
        self.capture(sizes)

    def _target(self, server_args: Any) -> Any:
        """What the backend and SGLang's runner ask of SGLang's ``ModelRunner``."""
        width = self.sim.layers * self.sim.q_heads * self.sim.head_dim
        target = SimpleNamespace(
            device="cpu",
            gpu_id=0,
            server_args=server_args,
            is_draft_worker=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            model=SimpleNamespace(forward=self.forward, shared_experts_config=None),
            model_config=SimpleNamespace(
                is_encoder_decoder=False,
                hidden_size=8,
                vocab_size=width,
                dtype=torch.float32,
                hf_config=SimpleNamespace(architectures=[]),
                hf_text_config=SimpleNamespace(),
            ),
            req_to_token_pool=self.pool,
            token_to_kv_pool=SimpleNamespace(start_layer=0),
            graph_shared_output=GraphSharedOutput(device="cpu", max_rows=8),
            kv_index_translator=SimpleNamespace(bind_runner_slots=lambda batch: None),
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            decode_num_tokens_per_req=lambda **_: 1,
            attn_tp_sequence_sharded=lambda tokens: False,
            get_pp_proxy_topk_size=lambda: None,
            get_pp_proxy_residual_num_blocks=lambda: None,
            get_pp_proxy_dspark_hidden_size=lambda: 0,
            get_aux_hidden_states_width=lambda: 0,
            capture_head_hooks=[],
            capture_tail_hooks=[],
            _kernel_warmed_up=True,
            **dict.fromkeys(
                ("hisparse_coordinator", "lora_manager", "canary_manager", "device_timer")
            ),
        )
        target.attn_backend = hisparse_backend.HiSparseAttnBackend(target)
        return target

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs of these batch sizes, in place of those that there are."""
        get_exec().graph.cuda_graph_config.decode.bs = list(sizes)
        self.graphs = sglang_runner.DecodeCudaGraphRunner(self.target)

    def request(self, slot: int, seed: int) -> Request:
        """A request of 190 tokens, of which none is computed."""
        request = self.sim.request(slot, 190, seed=seed)
        for tokens, stream in zip(self.tokens, request.streams, strict=False):
            tokens[slot * CONTEXT :][: request.length] = stream.movedim(1, 0)
        return request

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Any) -> LogitsProcessorOutput:
        """The model: attention of each layer over the tokens' q, k and v."""
        sim, outs = self.sim, []
        q, k, v = (tokens[input_ids] for tokens in self.tokens)
        for number in range(sim.layers):
            layer = SimpleNamespace(
                layer_id=number,
                tp_q_head_num=sim.q_heads,
                v_head_dim=sim.head_dim,
                scaling=sim.policy.scale,
            )
            own = q[:, number].flatten(1), k[:, number], v[:, number]
            outs.append(self.target.attn_backend.forward(*own, layer, batch))
        return LogitsProcessorOutput(next_token_logits=torch.cat(outs, 1))

    def batch(
        self, mode: ForwardMode, given: DecodeBatch, host_slots: Tensor, positions: Tensor
    ) -> ForwardBatch:
        """SGLang's batch of these requests, whose page tables become those of SGLang's."""
        size, position = self.sim.page_size, torch.arange(CONTEXT)
        for slot, table in zip(given.slots.tolist(), given.host_page_table, strict=True):
            pages = table[position // size % len(table)]
            self.pool.req_to_token[slot] = pages * size + position % size
        self.session.slots_cpu = torch.from_numpy(np.array(given.slots_cpu))
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(given.slots),
            input_ids=given.slots.repeat_interleave(len(positions) // len(given.slots)) * CONTEXT
            + positions,
            positions=positions,
            req_pool_indices=given.slots,
            req_pool_indices_cpu=given.slots.clone(),
            seq_lens=given.seq_lens,
            seq_lens_cpu=given.seq_lens.clone(),
            orig_seq_lens=given.seq_lens,
            seq_lens_sum=None,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            out_cache_loc=host_slots,
            rids=[str(slot) for slot in given.slots.tolist()],
        )

    def prefill(self, request: Request, count: int, padding: int = 0) -> Tensor:
        """The next tokens of a request, ``[count, L * Hq * D]``."""
        start = request.done
        steps = [self.sim.next_tokens(request) for _ in range(count)]
        slots = torch.cat([step.host_slots for step in steps])
        batch = self.batch(ForwardMode.EXTEND, steps[-1], slots, torch.arange(start, start + count))
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [start], [count]
        return self._run(batch, padding)

    def decode(
        self, *requests: Request, eager: bool = False, padding: int = 0, graph_vote: bool = True
    ) -> Tensor:
        """One step, ``[B, L * Hq * D]``.

        Args:
            requests: those of the step.
            eager: no graph is asked for.
            padding: rows that SGLang adds to an eager batch.
            graph_vote: whether all ranks of the experts can replay.
        """
        given = self.sim.next_tokens(*requests)
        batch = self.batch(ForwardMode.DECODE, given, given.host_slots, given.seq_lens - 1)
        batch.global_num_tokens_cpu = batch.original_global_num_tokens_cpu = [len(requests)]
        batch.can_run_decode_cuda_graph = graph_vote
        if eager or not self.graphs.can_run_graph(batch):
            return self._run(batch, padding)
        self.num_replays += 1
        out = self.graphs.execute(batch).next_token_logits
        assert len(out) == len(requests)
        return out.clone()

    def _run(self, batch: ForwardBatch, padding: int) -> Tensor:
        """An eager forward with rows of padding, as if ranks exchanged tokens of experts."""
        count = len(batch.input_ids)
        if padding:
            requests = batch.batch_size + padding * batch.forward_mode.is_decode()
            batch._pad_inputs_to_size(self.target, count + padding, requests)
            batch.batch_size = requests
        self.target.attn_backend.init_forward_metadata(batch)
        out = self.forward(batch.input_ids, batch.positions, batch).next_token_logits
        assert not out[count:].any()
        return out[:count]
