"""SGLang's attention backend: converts forward batches and calls the coordinator."""

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from torch import Tensor
from torch.nn.functional import pad

from hisparse.engine.batches import DecodeBatch, MixedBatch, PrefillBatch, StaticBatch
from hisparse.engine.prefill import PrefillChunk
from hisparse.errors import AlgorithmError, HiSparseError
from hisparse.sglang import features
from hisparse.sglang.metrics import MetricsReporter
from hisparse.sglang.session import require_session
from hisparse.sglang.setup import build_coordinator
from hisparse.types import IndexerInputs

logger = logging.getLogger("hisparse")


class HiSparseAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Computes exact attention in prefill, and attention over the selected pages in decode."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._session = session = require_session()
        self.coordinator = build_coordinator(session, model_runner)
        session.req_to_token_pool = model_runner.req_to_token_pool
        session.backend = self
        if session.begins_on_alloc:
            model_runner.req_to_token_pool.register_on_alloc_rows(self._begin_requests)
        self._spec = session.setup.spec
        self._scale = session.setup.policy.scale
        #: SGLang's number of a layer to that of the pool.
        self._layers = {layer: number for number, layer in enumerate(session.layer_ids)}
        self._last_layer = session.layer_ids[-1]
        self._req_to_token = model_runner.req_to_token_pool.req_to_token
        # SGLang's models read the pools from the backend.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.metrics = MetricsReporter(session, model_runner)
        self._features = features.enabled()
        #: The inputs of captured steps.
        self._static: StaticBatch | None = None
        self._in_graph = False
        #: Requests of failed forwards, until SGLang drops them.
        self._failed_requests: WeakSet[Any] = WeakSet()
        #: Tokens of this forward that attend; the others, which are padding, get zeros.
        self.num_tokens = 0
        for feature in self._features:
            feature.built(session, model_runner)

    def _begin_requests(self, slots: list[int]) -> None:
        for slot in slots:
            self.coordinator.on_request_begin(slot)

    def shared_read_ends(self, fm: Any) -> Any:
        """Tell SGLang that no layer reads its shared tables: they are copied before the layers."""
        return SharedReadEnds.PRE_REPLAY

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Copy the page tables from SGLang's tables and begin the forward.

        Raises:
            HiSparseError: the forward mode is none of EXTEND, DECODE and TARGET_VERIFY.
        """
        # SGLang relabels decode steps EXTEND where all ranks have to run one shape.
        mode = forward_batch.logical_forward_mode
        self._in_graph = False
        self.num_tokens = 0
        # SGLang's warm-ups build batches by hand, without requests. A rank without requests has
        # only padding, under any label, while other ranks of attention data parallelism work.
        if mode.is_idle() or not forward_batch.rids or self._all_have_failed():
            return
        batch = self._batch(forward_batch)
        self.num_tokens = batch.num_tokens
        self.coordinator.forward_begin(batch)

    def _batch(self, forward_batch: Any) -> Any:
        """The engine's batch of a forward with requests."""
        for feature in self._features:
            if (batch := feature.batch(self._session, forward_batch)) is not None:
                return batch
        mode = forward_batch.logical_forward_mode
        if mode.is_decode():
            return self._decode_batch(forward_batch)
        if mode.is_target_verify() or not mode.is_extend():
            raise HiSparseError(
                f"forward mode: got {mode.name}, expected EXTEND, DECODE or TARGET_VERIFY"
            )
        prefill = self._prefill_batch(forward_batch)
        if self._session.num_decoding:
            return self._with_decoding(prefill, forward_batch)
        return prefill

    def _all_have_failed(self) -> bool:
        """Whether SGLang runs another step of requests that have failed, before it ends them."""
        if not self._failed_requests:
            return False
        requests = self._session.requests
        return bool(requests) and all(each in self._failed_requests for each in requests)

    # SGLang's CUDA graph runner calls these in place of `init_forward_metadata`.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers that the graphs of all batch sizes read."""
        num_pages = self._session.setup.sizing.request.context_pages
        device = self._req_to_token.device
        self._static = StaticBatch(max_bs, num_pages, self._spec.page_size, device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a capture; before a replay, :meth:`can_replay` has prepared everything.

        SGLang also captures while it serves, after an update of the weights, and runs warm-up steps
        before each capture.
        """
        assert self._static is not None, "SGLang calls init_cuda_graph_state first"
        if in_capture:
            self.coordinator.prepare_capture()
            self._static.load(None)
        else:
            self.metrics.report()

    def can_replay(self, forward_batch: Any) -> bool:
        """Whether a graph serves this step. Fills the graph's buffers with the step's requests.

        SGLang asks at the start of the forward, on its stream. If none does, the step runs eagerly.
        """
        assert self._static is not None, "SGLang calls init_cuda_graph_state first"
        if self._all_have_failed():
            return False
        batch = self._decode_batch(forward_batch)
        can_replay = batch.begin_replay(self.coordinator)
        if can_replay:
            self._static.load(batch)
        return can_replay

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record the operations that run before the layers; called during a capture."""
        assert self._static is not None, "SGLang calls init_cuda_graph_state first"
        self._in_graph = True
        self.num_tokens = forward_batch.batch_size
        self.coordinator.forward_begin(self._static.first(forward_batch.batch_size))

    def slots_cpu(self) -> Tensor:
        """``[B] int64`` request slots, read on the host without a device sync.

        SGLang pads its own copy in the forward batch, where ranks exchange tokens of experts.
        """
        slots = self._session.slots_cpu
        assert slots is not None, "SGLang creates the forward batch before attention runs"
        return slots

    def page_table(self, slots: Tensor, num_tokens: int) -> Tensor:
        """``[B, pages] int32`` host pages, a copy: the scheduler rewrites its table.

        Args:
            slots: ``[B] int64`` request slots on the device.
            num_tokens: tokens of the longest request.
        """
        size = self._spec.page_size
        num_pages = -(-num_tokens // size)
        first_tokens: Tensor = self._req_to_token[slots, : num_pages * size : size]
        return first_tokens // size

    def _decode_batch(
        self, forward_batch: Any, first: int = 0, first_token: int = 0
    ) -> DecodeBatch:
        """The requests of a forward batch from ``first`` on, without its padding.

        Args:
            forward_batch: SGLang's.
            first: index of the first request that decodes.
            first_token: index of its token in the forward.
        """
        all_slots_cpu = self.slots_cpu().numpy()
        slots_cpu, requests = all_slots_cpu[first:], slice(first, len(all_slots_cpu))
        tokens = slice(first_token, first_token + len(slots_cpu))
        seq_lens_cpu = forward_batch.seq_lens_cpu[requests].numpy()
        slots = forward_batch.req_pool_indices[requests].long()
        return DecodeBatch(
            slots=slots,
            slots_cpu=slots_cpu,
            seq_lens=forward_batch.seq_lens[requests].long(),
            seq_lens_cpu=seq_lens_cpu,
            host_slots=forward_batch.out_cache_loc[tokens].long(),
            host_page_table=self.page_table(slots, int(seq_lens_cpu.max())),
        )

    def _with_decoding(
        self, prefill: PrefillBatch, forward_batch: Any
    ) -> PrefillBatch | MixedBatch:
        """Chunks and the requests that decode with them; each of those has a chunk of one token.

        Requests that have all failed only wait for their end. They get zeros, as padding does.
        """
        requests = self._session.requests
        first = len(requests) - self._session.num_decoding
        if all(request in self._failed_requests for request in requests[first:]):
            return prefill
        decode = self._decode_batch(forward_batch, first, prefill.num_tokens)
        return MixedBatch(prefill=prefill, decode=decode)

    def _prefill_batch(self, forward_batch: Any) -> PrefillBatch:
        """The chunks of a forward batch, without those of requests that decode."""
        chunks = []
        offset = 0
        slots = self.slots_cpu().tolist()
        for row, slot in enumerate(slots[: len(slots) - self._session.num_decoding]):
            start = int(forward_batch.extend_prefix_lens_cpu[row])
            length = int(forward_batch.extend_seq_lens_cpu[row])
            if length:
                slots_of_row = forward_batch.req_pool_indices[row : row + 1]
                table = self.page_table(slots_of_row, start + length)
                chunks.append(
                    PrefillChunk(
                        slot=slot,
                        start=start,
                        length=length,
                        offset=offset,
                        host_pages=table[0],
                        is_last=forward_batch.rids[row] != self._session.chunked_request_id,
                    )
                )
            offset += length
        return PrefillBatch(chunks=chunks, host_slots=forward_batch.out_cache_loc[:offset].long())

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of one layer: ``q [T, Hq * D]``, ``k, v [T, Hkv, D]`` -> ``[T, Hq * Dv]``.

        Raises:
            HiSparseError: the layer stores K/V itself, or passes arguments beyond q, k and v.
        """
        width = layer.tp_q_head_num * layer.v_head_dim
        if not self.num_tokens or forward_batch.forward_mode.is_idle():
            return q.new_zeros(q.shape[0], width)
        if not save_kv_cache or k is None:
            raise HiSparseError(
                f"layer {layer.layer_id}: got save_kv_cache={save_kv_cache} and "
                f"{'no K' if k is None else 'K'}, expected K and V to store; hisparse does not "
                "serve models that write K/V themselves or share it between layers"
            )
        if layer.scaling != self._scale:
            # SGLang's models that run with transformers' code get the scale in each forward.
            raise HiSparseError(
                f"layer {layer.layer_id}: got the softmax scale {layer.scaling}, expected "
                f"{self._scale} as when the model was loaded"
            )
        indexer, sinks = kwargs.pop("topk_indices", None), kwargs.pop("sinks", None)
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise HiSparseError(
                f"layer {layer.layer_id}: got attention with {', '.join(unknown)}, expected plain "
                "softmax attention over q, k and v"
            )
        try:
            out = self._attend(layer, q, k, v, indexer, sinks)
        except AlgorithmError as error:
            self._end_requests(error)
            return q.new_zeros(q.shape[0], width)
        if layer.layer_id == self._last_layer:
            self.coordinator.forward_end()
            if not self._in_graph:
                self.metrics.report()
        return out

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        """:meth:`forward`, as SGLang calls it for the layers of a hybrid that attend."""
        return self.forward(*args, **kwargs)

    #: For a hybrid's prompts.
    forward_extend = forward_decode

    def _attend(
        self,
        layer: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend the real tokens of ``q [T, Hq * D]`` -> ``[T, Hq * Dv]``; zeros for padding."""
        spec, padded, tokens = self._spec, q.shape[0], self.num_tokens
        latent = spec.attention == "MLA"
        if padded != tokens:
            q, k = q[:tokens], k[:tokens]
            v = v if latent else v[:tokens]
            indexer = indexer and indexer.take(slice(tokens))
        keys = k.reshape(tokens, spec.num_kv_heads, spec.head_dim)
        values = (
            keys[..., : spec.v_head_dim]
            if latent
            else v.reshape(tokens, spec.num_kv_heads, spec.v_head_dim)
        )
        queries = q.reshape(tokens, spec.num_q_heads, spec.head_dim)
        layer_id = self._layers[layer.layer_id]
        out = self.coordinator.attention(layer_id, queries, keys, values, indexer, sinks).flatten(1)
        return out if padded == tokens else pad(out, (0, 0, 0, padded - tokens))

    def _end_requests(self, error: AlgorithmError) -> None:
        """Answer the requests of this forward with an error and skip its other layers.

        Raises:
            AlgorithmError: the server cannot go on, which ends it.
        """
        if self._in_graph:
            # The hook on the capture says why the start ends.
            raise error
        requests = self._session.requests
        reason = _reason_to_stop(requests)
        if reason is not None:
            logger.error("hisparse: error: %s; the server stops, since %s", error, reason)
            raise error
        self.coordinator.forward_abort()
        _fail_requests(requests, f"hisparse: {error}")
        self._failed_requests.update(requests)
        self.num_tokens = 0
        logger.error("hisparse: error: %s; %d requests end with it", error, len(requests))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Sequence length that SGLang fills in for padding requests, in tokens."""
        return 1

    #: SGLang pads with it on a CPU.
    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value


def _reason_to_stop(requests: Sequence[Any]) -> str | None:
    """Why the server cannot go on after a forward of these requests failed; None: it can.

    Args:
        requests: SGLang's ``Req`` of the batch.
    """
    from sglang.srt.distributed.parallel_state import get_world_group

    if get_world_group().world_size > 1:
        return "other ranks go on with the batch"
    return None if requests else "the forward is not of requests"


def _fail_requests(requests: Sequence[Any], message: str) -> None:
    """End requests with HTTP 500, as SGLang ends aborted ones, and keep none of their pages.

    The radix cache must not get the K, V and representations that the failed forward has left out.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for request in requests:
        if request.finished():
            continue
        request.skip_radix_cache_insert = True
        # What the failed forward samples is not part of the answer.
        request.finished_len = len(request.output_ids)
        request.to_finish = FINISH_ABORT(
            message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
        )
