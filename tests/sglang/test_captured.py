"""The backend under SGLang's runners, with padding and with recorded operations for CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from torch import Tensor
from torch.nn.functional import pad

from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.engine.batches import DecodeBatch
from hisparse.sglang import backend as module
from hisparse.sglang.backend import HiSparseAttnBackend
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import record

BATCH_SIZES = (1, 2, 4)
CONTEXT = 192


class Runner:
    """Makes the calls of SGLang's decode graph runner that reach an attention backend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.sim = Simulator(checked=False, **settings)
        sim = self.sim
        sizing = SimpleNamespace(
            request=SimpleNamespace(context_pages=-(-CONTEXT // sim.page_size))
        )
        self.session = SimpleNamespace(
            spec=sim.spec,
            layer_ids=range(sim.layers),
            policy=sim.policy,
            sizing=sizing,
            coordinator=None,
            slots_cpu=None,
            requests=(),
            chunked_request_id=None,
            num_decoding=0,
            begins_on_alloc=True,
        )
        self.reports = self.num_replays = 0
        reporter = SimpleNamespace(report=lambda: setattr(self, "reports", self.reports + 1))
        monkeypatch.setattr(module, "require_session", lambda: self.session)
        monkeypatch.setattr(module, "build_coordinator", lambda *_: sim.coordinator)
        monkeypatch.setattr(module, "MetricsReporter", lambda *_: reporter)
        self.req_to_token = torch.zeros(sim.num_slots, CONTEXT, dtype=torch.int32)
        pool = SimpleNamespace(
            req_to_token=self.req_to_token, register_on_alloc_rows=lambda begin: None
        )
        self.backend = HiSparseAttnBackend(
            SimpleNamespace(req_to_token_pool=pool, token_to_kv_pool=SimpleNamespace(start_layer=0))
        )
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        most = max(BATCH_SIZES)
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(most, dtype=torch.int64),
            positions=torch.zeros(most, dtype=torch.int64),
            req_pool_indices=torch.zeros(most, dtype=torch.int64),
            seq_lens=torch.full((most,), fill),
            seq_lens_cpu=torch.full((most,), fill),
            out_cache_loc=torch.zeros(most, dtype=torch.int64),
            mamba_track_indices=None,
        )
        self.streams = [
            torch.zeros(sim.layers, most, heads, sim.head_dim)
            for heads in (sim.q_heads, sim.kv_heads, sim.kv_heads)
        ]
        self.backend.init_cuda_graph_state(most, most)
        self.graphs = {size: self.capture(size) for size in reversed(BATCH_SIZES)}

    def capture(self, size: int) -> tuple[Any, Tensor]:
        """As SGLang's `capture_one_shape`: two warm-up runs, then the capture."""
        b = self.buffers
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            req_pool_indices=b.req_pool_indices[:size],
            seq_lens=b.seq_lens[:size],
            seq_lens_cpu=b.seq_lens_cpu[:size],
            out_cache_loc=b.out_cache_loc[:size],
        )
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)

        def run_once() -> Tensor:
            self.backend.init_forward_metadata_in_graph(batch)
            return self.layers(batch, [x[:, :size] for x in self.streams])

        run_once()
        run_once()
        with record("a decode step") as recording:
            out = run_once()
        return recording, out

    def layers(self, batch: Any, streams: list[Tensor]) -> Tensor:
        sim, outs = self.sim, []
        for number in range(sim.layers):
            layer = SimpleNamespace(
                layer_id=number,
                tp_q_head_num=sim.q_heads,
                v_head_dim=sim.head_dim,
                scaling=sim.policy.scale,
            )
            q, k, v = (x[number] for x in streams)
            outs.append(self.backend.forward(q.flatten(1), k, v, layer, batch))
        return torch.stack(outs)

    def batch(self, mode: ForwardMode, given: DecodeBatch, host_slots: Tensor) -> ForwardBatch:
        """SGLang's batch of these requests, whose page tables become those of SGLang's."""
        sim, position = self.sim, torch.arange(CONTEXT)
        for row, slot in enumerate(given.slots.tolist()):
            pages = given.host_page_table[row][
                position // sim.page_size % len(given.host_page_table[row])
            ]
            self.req_to_token[slot] = pages * sim.page_size + position % sim.page_size
        self.session.slots_cpu = torch.from_numpy(np.array(given.slots_cpu))
        tokens = len(host_slots)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(given.slots),
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=torch.zeros(tokens, dtype=torch.int64),
            req_pool_indices=given.slots,
            req_pool_indices_cpu=given.slots.clone(),
            seq_lens=given.seq_lens,
            seq_lens_cpu=given.seq_lens.clone(),
            seq_lens_sum=None,
            out_cache_loc=host_slots,
            rids=[str(slot) for slot in given.slots.tolist()],
        )

    def run(self, batch: ForwardBatch, streams: list[Tensor], padding: int) -> Tensor:
        """An eager forward with rows of padding, as if ranks exchanged tokens of experts.

        Args:
            batch: without padding.
            streams: q, k and v, ``[L, T, H, D]`` each.
            padding: tokens; SGLang pads the requests of decode steps with them.
        """
        count = streams[0].shape[1]
        if padding:
            requests = batch.batch_size + padding * batch.forward_mode.is_decode()
            runner = SimpleNamespace(attn_backend=self.backend)
            batch._pad_inputs_to_size(runner, count + padding, requests)
            batch.batch_size = requests
            # K and V of padding may be anything.
            streams = [pad(x, (0, 0, 0, 0, 0, padding), value=torch.nan) for x in streams]
        self.backend.init_forward_metadata(batch)
        out = self.layers(batch, streams)
        assert not out[:, count:].any()
        return out[:, :count]

    def prefill(self, request: Request, count: int, padding: int) -> Tensor:
        """The next tokens of a request, ``[L, count, Hq * D]``."""
        start = request.done
        steps = [self.sim.next_tokens(request) for _ in range(count)]
        slots = torch.cat([step.host_slots for step in steps])
        batch = self.batch(ForwardMode.EXTEND, steps[-1], slots)
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = [start], [count]
        return self.run(batch, [x[:, start : request.done] for x in request.streams[:3]], padding)

    def decode(self, *requests: Request, eager: bool = False, padding: int = 0) -> Tensor:
        """One step, ``[L, B, Hq * D]``."""
        b, count = self.buffers, len(requests)
        given = self.sim.next_tokens(*requests)
        fresh = self.batch(ForwardMode.DECODE, given, given.host_slots)
        tokens = [
            torch.stack([x[:, r.done - 1] for r, x in zip(requests, own, strict=True)], 1)
            for own in zip(*(r.streams[:3] for r in requests), strict=True)
        ]
        if eager or not self.backend.can_replay(fresh):
            return self.run(fresh, tokens, padding)
        self.num_replays += 1
        size = min(size for size in BATCH_SIZES if size >= count)
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            kept = getattr(b, name)
            kept[:count] = getattr(fresh, name)
            kept[count:] = self.backend.get_cuda_graph_seq_len_fill_value() * ("seq" in name)
        for kept, new in zip(self.streams, tokens, strict=True):
            kept[:, :count] = new
        view = build_replay_fb_view(
            forward_batch=fresh,
            buffers=b,
            bs=size,
            raw_bs=count,
            num_tokens=size,
            global_num_tokens_cpu=None,
            seq_len_fill_value=1,
            capture_forward_mode=ForwardMode.DECODE,
            is_encoder_decoder=False,
        )
        self.backend.init_forward_metadata_out_graph(view)
        recording, out = self.graphs[size]
        recording.replay()
        return out[:, :count].clone()


@pytest.mark.parametrize(
    "settings",
    [{"algorithm": Quest()}, {"algorithm": Sketch(), "min_sparse_context": 64}],
    ids=["quest", "sketch-and-dense-contexts"],
)
def test_graphs_of_several_sizes_and_eager_steps_give_the_eager_tokens(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, expected = Runner(monkeypatch, **settings), Simulator(checked=False, **settings)
    pairs = []
    for sim in (runner.sim, expected):
        requests = [sim.request(slot, 190, seed=slot) for slot in (1, 2, 3)]
        for request, prompt in zip(requests, (101, 30, 59), strict=True):
            sim.prefill((request, prompt))
        pairs.append(requests)
    mine, theirs = pairs
    for step in range(40):
        # One, two or three requests; a graph of four serves three.
        some = [(0,), (2, 0), (0, 1, 2)][step % 3]
        out = runner.decode(*(mine[i] for i in some), eager=step % 7 == 6)
        wanted = expected.decode(*(theirs[i] for i in some)).flatten(2)
        assert torch.equal(out, wanted), f"step {step}"
    assert runner.sim.coordinator.stats() == expected.coordinator.stats()
    assert runner.reports == 40


def test_padding_of_eager_batches_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang pads the batches of a forward if ranks exchange tokens (--moe-a2a-backend)."""
    runner, expected = Runner(monkeypatch), Simulator(checked=False)
    mine, theirs = (
        [sim.request(slot, 190, seed=slot) for slot in (1, 2)] for sim in (runner.sim, expected)
    )
    for one, other in zip(mine, theirs, strict=True):
        for count, padding in ((37, 3), (63, 0), (20, 5)):
            (wanted,) = expected.prefill((other, count))
            assert torch.equal(runner.prefill(one, count, padding), wanted.flatten(2))
    for step in range(20):
        out = runner.decode(*mine, eager=True, padding=step % 3)
        assert torch.equal(out, expected.decode(*theirs).flatten(2)), f"step {step}"
    assert runner.sim.coordinator.stats() == expected.coordinator.stats()


@pytest.mark.parametrize(
    "settings",
    [
        {"min_sparse_context": 120, "device_buffer": 64, "max_row": 96},
        {"dense_layers": (1,), "max_row": 128},
    ],
    ids=["dense-contexts", "dense-layers"],
)
def test_steps_that_a_graph_cannot_serve_run_eagerly(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense context that is too long for its row is read in tiles, in that layer."""
    runner, expected = Runner(monkeypatch, **settings), Simulator(checked=False, **settings)
    pairs = []
    for sim in (runner.sim, expected):
        pairs.append([sim.request(slot, 190, seed=slot) for slot in (1, 2)])
        sim.prefill((pairs[-1][0], 80), (pairs[-1][1], 105))
    mine, theirs = pairs
    for step in range(40):
        some = slice(step % 4 == 3, 2)
        out = runner.decode(*mine[some])
        assert torch.equal(out, expected.decode(*theirs[some]).flatten(2)), f"step {step}"
    assert 0 < runner.num_replays < 40
    assert runner.sim.coordinator.stats() == expected.coordinator.stats()
