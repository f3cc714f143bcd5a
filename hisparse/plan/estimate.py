"""Time per token, dense and with hisparse: an estimate, not a measurement.

A kernel takes the time in which it moves its bytes, or the time of its instructions if that is
longer, and a constant for its launch. The kernels of a step, which is captured in a CUDA graph, run
one after the other, but for those of full tail pages: only their fork counts, as one launch, unless
the algorithm reads a model's indexer.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from hisparse.algorithms import entry_bytes
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.build import choose_selection
from hisparse.engine.capabilities import row_tokens
from hisparse.engine.modes import AttentionModes
from hisparse.plan.kernel_costs import gather_us, instructions_us
from hisparse.types import KVSpec


class Hardware(NamedTuple):
    """What a GPU and its link to the host do.

    Attributes:
        hbm: GB/s at which kernels read device memory.
        read: GB/s at which kernels read host memory.
        write: GB/s at which kernels write host memory.
    """

    hbm: float
    read: float
    write: float


#: ``hbm`` is 0.9 of the bandwidth in NVIDIA's data sheets (B200: pytorch/ao, pull request 4002), as
#: FlashInfer reaches 3.0 of 3.35 TB/s on an H100. The H200's was measured on 26 November 2026, 17.2
#: GB in 3,826 us by FlashInfer 0.7.2, and ``read`` over PCIe 5 too: gather_pages moved 13.4 MB in
#: 287 us on an H100. ``write``, and GH200's ``read``: NVIDIA/nvbandwidth, issues 24 (PCIe 5) and 23
#: (writes: arXiv 2407.07850).
GPUS: Final[Mapping[str, Hardware]] = {
    "h100": Hardware(hbm=3000, read=46.8, write=52.8),
    "h100-pcie": Hardware(hbm=1800, read=46.8, write=52.8),
    "h200": Hardware(hbm=4500, read=46.8, write=52.8),
    "b200": Hardware(hbm=6900, read=46.8, write=52.8),
    "gh200": Hardware(hbm=3000, read=342, write=297),
    "gb200": Hardware(hbm=6900, read=342, write=297),
}
#: us from the start of an empty kernel to the next one ("Look Ma, No Bubbles", 2025), and of the
#: smallest dense attention (vllm-project/flash-attention, pull request 63).
_LAUNCH_US, _ATTENTION_US = 2.0, 11.0
#: Launches that a layer without a selection saves, and launches of dense attention.
_SELECT_LAUNCHES, _DENSE_LAUNCHES = 2, 2


class TokenEstimate(NamedTuple):
    """Estimated time of a decode step, which gives each request one token.

    Attributes:
        hit_ratio: fraction of the selected pages that are on the device.
        dense_ms: with the whole KV cache on the device.
        hisparse_ms: with hisparse.
    """

    hit_ratio: float
    dense_ms: float
    hisparse_ms: float


def estimate_token(
    config: HiSparseConfig,
    spec: KVSpec,
    hardware: Hardware,
    *,
    context: int,
    batch: int,
    hit_ratio: float,
    weight_bytes: int,
) -> TokenEstimate:
    """Estimate the time per token on one GPU.

    Args:
        spec: shapes of the model on one rank, as K and V are stored.
        hardware: the GPU and its host.
        context: tokens of each request.
        batch: requests.
        hit_ratio: fraction of the selected pages that are on the device; 1 is taken where the
            smallest device buffer holds all of the context.
        weight_bytes: weights of a GPU; 0: only the time of attention.
    """
    step = _StepTimes(config, spec, hardware, context, batch, hit_ratio)
    layers, weights_us = range(spec.num_layers), _us(weight_bytes, hardware.hbm)
    dense_us = weights_us + sum(map(step.dense_layer_us, layers))
    ours_us = weights_us + sum(map(step.layer_us, layers))
    return TokenEstimate(step.hit_ratio, dense_us / 1000, ours_us / 1000)


class _StepTimes:
    """Times of the layers of one step."""

    def __init__(
        self,
        config: HiSparseConfig,
        spec: KVSpec,
        hardware: Hardware,
        context: int,
        batch: int,
        hit_ratio: float,
    ) -> None:
        algorithm, policy, kept = choose_selection(config, spec, spec.head_dim**-0.5)
        self._config, self._spec, self._hardware = config, spec, hardware
        self._format = format_of(spec)
        self._context, self._batch = context, batch
        self._modes = AttentionModes(
            policy,
            min_sparse_context=config.min_sparse_context,
            dense_layers=frozenset(config.dense_layers or ()),
            reuse_layers=config.reuse_layers,
        )
        pages = (context - 1) // spec.page_size
        self._resident = pages <= row_tokens(config, spec) // spec.page_size
        self.hit_ratio = 1.0 if self._resident else hit_ratio
        self._selected = min(policy.max_pages, pages)
        # With a selection per query head, each head reads its K, V and candidates separately.
        heads = spec.num_kv_heads if policy.heads == 1 else policy.heads
        self._row_bytes = batch * heads * self._format.head_bytes
        candidates = self._selected * max(1, policy.heads // spec.num_kv_heads)
        candidates *= algorithm.host_candidates
        self._score_bytes = batch * pages * entry_bytes(kept, "page")
        self._host_bytes = batch * min(pages, candidates) * entry_bytes(kept, "page", "host")
        self._kernels, self._pages = algorithm.kernels, pages
        more = algorithm.host_launches if self._host_bytes else 0
        # Full tail pages are promoted and stored beside the model's kernels, after one fork.
        self._launches = algorithm.captured_launches + more - len(self._kernels[1:])
        self._launches += self._format.captured_launches
        self._appends = algorithm.appends(policy)
        # With an indexer in order: each request fills a page in S steps.
        promoted = min(1.0, batch / spec.page_size) if algorithm.indexer else 0.0
        self._promote_us = promoted * self._kernel_us("promote_tail")

    def layer_us(self, layer: int) -> float:
        """Time of a layer with hisparse."""
        spec, context = self._spec, self._context
        token_bytes = self._batch * self._format.layer_token_bytes
        write = max(_us(token_bytes, self._hardware.write), self._kernel_us("append_tokens"))
        kernels, selecting, gather = self._launches - _SELECT_LAUNCHES, 0.0, 0.0
        if window := spec.window(layer):
            attended = min(window, context)
        elif layer in self._modes.dense_layers or self._modes.is_dense(np.array([context]))[0]:
            attended = context
            if not self._resident:
                gather = _us(context * token_bytes, self._hardware.read)
        else:
            attended = min(context, (self._selected + 1) * spec.page_size)
            gather = self._gather_us(1 - self.hit_ratio)
            if self._modes.selects(layer):
                kernels, selecting = self._launches, self._selecting_us()
                if self._appends:  # Beside the scores, in one launch.
                    kernels, write = kernels - 1, 0.0
        attention = self._kernel_us("paged_attention", attended / spec.page_size)
        attention = max(attention, _us(attended * self._row_bytes, self._hardware.hbm))
        tables = self._kernel_us("diff_tables") + self._promote_us
        return kernels * _LAUNCH_US + write + selecting + tables + gather + attention

    def dense_layer_us(self, layer: int) -> float:
        """Time of a layer without hisparse."""
        spec = self._spec
        tokens = self._batch * min(spec.window(layer) or self._context, self._context)
        num_bytes = tokens * self._format.dense_token_bytes // spec.num_layers
        attention = max(_ATTENTION_US, _us(num_bytes, self._hardware.hbm))
        return _DENSE_LAUNCHES * _LAUNCH_US + attention

    def _selecting_us(self) -> float:
        """Scores and the choice among them."""
        us = _us(self._score_bytes, self._hardware.hbm)
        if self._kernels:
            us = max(us, self._kernel_us(self._kernels[0])) + self._kernel_us("select")
        return us + _us(self._host_bytes, self._hardware.read)

    def _gather_us(self, missing: float) -> float:
        """Pages that are missing, a share of those that are selected."""
        tokens = missing * self._selected * self._spec.page_size
        link = _us(tokens * self._row_bytes, self._hardware.read)
        return max(link, gather_us(missing, self._spec.head_dim, self._batch))

    def _kernel_us(self, name: str, pages: float | None = None) -> float:
        pages = self._pages if pages is None else pages
        spec = self._spec
        return instructions_us(name, spec.head_dim, pages, self._batch, spec.page_size)


def _us(num_bytes: float, gb_s: float) -> float:
    return num_bytes / (gb_s * 1000)
