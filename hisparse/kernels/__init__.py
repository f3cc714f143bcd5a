# ruff: noqa: F403, F405
"""The operations on pages. Each family has a folder, whose ``op.py`` says what it offers here.

Every operation takes ``impl``: "auto", which is the fastest implementation that can run on the
tensors' devices, or the name of one (``IMPLEMENTATIONS`` in ``operation.py``). Before a launch it
raises ``KernelError`` if a tensor has another shape, dtype or device than its docstring says, if a
tensor to write has rows that are not dense, or if that implementation cannot run there. On a CPU an
index or a length that no tensor has is an error; on a GPU see ``verify_indices``. A docstring names
only what else is refused.

``drop_pages``, ``page_outline`` and ``cap_logits`` have no implementations to choose from: they are
PyTorch's operations.
"""

from hisparse.kernels.arguments import verify_indices as verify_indices
from hisparse.kernels.attention.op import *
from hisparse.kernels.attention.reference import cap_logits as cap_logits
from hisparse.kernels.index.op import *
from hisparse.kernels.keys.op import *
from hisparse.kernels.lru.op import *
from hisparse.kernels.quantize.op import *
from hisparse.kernels.rows.op import *
from hisparse.kernels.select.op import *
from hisparse.kernels.sketch.op import *
from hisparse.kernels.sketch.reference import page_outline as page_outline
from hisparse.kernels.summary.op import *
from hisparse.kernels.threads import *
from hisparse.kernels.transfer.op import *

__all__ = [
    "QUANTIZED", "DecodeRows", "DiffTables", "HostAttentionCalls", "HostKeys", "LatentRow",
    "NewTokens", "RowState", "SelectRule", "SketchLayout", "TailPages", "TailPools",
    "append_tokens", "cap_logits", "chunk_attention", "chunk_index_score", "decode_latents",
    "dequantize", "diff_tables", "drop_pages", "encode_latents", "gather_pages", "gather_tokens",
    "index_score", "key_score", "merge_attention", "outline_bytes", "outline_score", "page_outline",
    "page_score", "page_sketch", "page_summary", "paged_attention", "promote_tail", "quantize",
    "rebalance", "reset_rows", "scatter_tokens", "scores_new_tokens", "select", "serial_operators",
    "sketch_score", "store_index_keys", "upload", "verify_capacity", "verify_diff",
    "verify_indices",
]  # fmt: skip
