"""What MiniCPM (InfLLM-V2) attends, written from the meaning of SGLang's code.

SGLang 0.5.23, ``layers/attention/minicpm``: means of keys in ``sparse_kernels.py``, line 148; the
softmax, its sum over query heads, the pooling and the forced blocks in ``fuse_kernel.py``, lines
196 to 383; ``dense_len`` in ``sparse_utils.py``, line 672. There a prefill sees a mean when its
first half is before the query, which decoding and ``infllmv2_attn_stage1`` do not: here a mean
counts when all its tokens are. There a prompt is dense or not as a whole: here each query is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface


def selected(q: Tensor, k: Tensor, scale: float, sparse: Mapping[str, int]) -> Tensor:
    """The tokens that each of the last queries attends, query by query.

    Args:
        q: ``[T, Hq, D]``, the queries of the last T of n tokens.
        k: ``[n, Hkv, D]``.
        scale: softmax scale.
        sparse: ``sparse_config`` of the model.

    Returns:
        ``[Hkv, T, n] bool``.
    """
    size, kernel, stride = (sparse[x] for x in ("block_size", "kernel_size", "kernel_stride"))
    local = sparse["window_size"] // size
    means = k.float().unfold(0, kernel, stride).mean(-1) if len(k) >= kernel else k[:0].float()
    found = torch.zeros(k.shape[1], len(q), len(k), dtype=torch.bool)
    for row, position in enumerate(range(len(k) - len(q), len(k))):
        own = position // size
        # The page of the first sparse query begins at dense_len.
        dense = own < -(-sparse["dense_len"] // size) or own < sparse["topk"] + local
        for head, mine in enumerate(q[row].float().unflatten(0, (k.shape[1], -1))):
            blocks = set(range(own + 1)) if dense else set()
            blocks |= {b for b in range(own + 1) if b < sparse["init_blocks"] or b >= own - local}
            count = max(0, (position + 1 - kernel) // stride + 1)
            weights = (mine @ means[:count, head].T * scale).softmax(-1).sum(0)
            score = torch.zeros(own + 1)
            for mean, weight in enumerate(weights.tolist()):
                for block in range(mean * stride // size, (mean * stride + kernel - 1) // size + 1):
                    score[block] = max(score[block].item(), weight)
            for block in score.argsort(descending=True, stable=True).tolist():
                if len(blocks) < sparse["topk"] + local:
                    blocks.add(block)
            for block in blocks:
                found[head, row, block * size : min(position + 1, (block + 1) * size)] = True
    return found


def attend_as(sparse: Mapping[str, int]) -> str:
    """The name of an attention of transformers that attends what :func:`selected` says."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        seen = selected(q[0].transpose(0, 1), k[0].transpose(0, 1), scaling, sparse)
        k, v, seen = (x.repeat_interleave(q.shape[1] // k.shape[1], -3) for x in (k, v, seen))
        weights = (q @ k.mT * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("infllm", attend)
    return "infllm"
