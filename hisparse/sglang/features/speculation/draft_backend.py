"""Dense attention of a draft model over SGLang's own pool, in PyTorch.

SGLang's own attention backends of draft models need a GPU or AMX.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hisparse.sglang.install import DRAFT_BACKEND

#: Queries that attend at once, which bounds the mask.
_QUERIES = 512


@dataclass(frozen=True)
class _Chunk:
    """Tokens of one request in a forward.

    Attributes:
        tokens: their places in the forward.
        start: position of the first one.
        slots: ``[start + n] int64``, slots of all tokens up to the last one.
    """

    tokens: slice
    start: int
    slots: Tensor


class DraftAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Attends all tokens, or those in a layer's window. Caps of logits and sinks are left out.

    Args:
        model_runner: SGLang's ``ModelRunner`` of the draft model.
        step: in forwards of one token a request, how many drafted tokens come before it that
            SGLang's sequence lengths leave out.
    """

    #: SGLang's models read it.
    prefill_attention_backend_str = decode_attention_backend_str = DRAFT_BACKEND

    def __init__(self, model_runner: Any, step: int = 0) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._step = step
        self._chunks: list[_Chunk] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Copy the slots of the forward's requests."""
        if forward_batch.forward_mode.is_decode():
            starts = (forward_batch.seq_lens_cpu + self._step).tolist()
            lengths = [1] * len(starts)
        else:
            starts = list(forward_batch.extend_prefix_lens_cpu)
            lengths = list(forward_batch.extend_seq_lens_cpu)
        table, done = self.req_to_token_pool.req_to_token, 0
        self._chunks = []
        rows = forward_batch.req_pool_indices.tolist()
        for row, start, length in zip(rows, starts, lengths, strict=True):
            slots = table[row, : start + length].long()
            self._chunks.append(_Chunk(slice(done, done + length), start, slots))
            done += length

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> Tensor:
        """Attention of one layer: ``q [T, Hq * D]``, ``k, v [T, Hkv, D]`` -> ``[T, Hq * Dv]``."""
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        for chunk in self._chunks:
            # A checkpoint can ask for another dtype of its KV cache.
            k, v = (x[chunk.slots].to(queries.dtype) for x in (keys, values))
            out[chunk.tokens] = _attend(queries[chunk.tokens], k, v, chunk.start, layer)
        return out.flatten(1)


class DraftSteps:
    """The backends of the forwards that draft one token of each request after another.

    Args:
        model_runner: SGLang's ``ModelRunner`` of the draft model.
        count: number of forwards.
    """

    def __init__(self, model_runner: Any, count: int) -> None:
        #: SGLang chooses one for each forward.
        self.attn_backends = [DraftAttnBackend(model_runner, step) for step in range(count)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Copy the slots for all forwards; SGLang has allocated those of the drafts."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, layer: Any) -> Tensor:
    """``q [n, Hq, D]``, ``k, v [start + n, Hkv, D]`` -> ``[n, Hq, Dv]``, causal from the end."""
    window = layer.sliding_window_size
    parts = []
    for block in q.split(_QUERIES):
        end = start + len(block)
        own, seen = torch.arange(start, end)[:, None], torch.arange(end)
        mask = seen <= own
        if window is not None and window >= 0:
            mask &= seen >= own - window
        queries, keys, values = (x.transpose(0, 1)[None] for x in (block, k[:end], v[:end]))
        part = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=layer.scaling, enable_gqa=True
        )
        parts.append(part[0].transpose(0, 1))
        start = end
    return torch.cat(parts)
