"""Time of a decode step's attention, dense and with hisparse: an estimate from bytes and launches.

A kernel takes the time in which it reads its bytes, and a constant for its launch. Kernels of a
layer run one after the other. Nothing here was measured: ``ASSUMPTIONS`` and ``UNKNOWNS`` say in
words what the formula takes for granted, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from hisparse.algorithms import SelectionPolicy, build_algorithm, entry_bytes
from hisparse.config import HiSparseConfig
from hisparse.engine.build import kept_tensors, make_policy
from hisparse.engine.capabilities import choose_scope, fit_windows
from hisparse.engine.modes import AttentionModes
from hisparse.plan.hardware import Hardware
from hisparse.types import KVSpec

__all__ = [
    "ASSUMPTIONS",
    "UNKNOWNS",
    "LayerCode",
    "StepBytes",
    "StepEstimate",
    "estimate_step",
    "is_resident",
]

ASSUMPTIONS: Final = (
    "Every request of the batch has the whole context, and the stated share of its selected pages "
    "is on the device.",
    "Dense attention reads all K and V from device memory, by two kernels a layer.",
    "hisparse reads all representations, the attended K and V, and missing pages over the link; it "
    "writes each new token's K and V to host memory.",
    "Kernels of a layer run one after the other. Without overlap nothing runs beside a transfer. "
    "With overlap, and reuse_layers above 1, the transfers of layers that reuse a selection run "
    "beside attention of their group; those of the layer that selects do not.",
    "Steps are captured in CUDA graphs; with cuda_graph false, a step takes at least the host's "
    "time for its launches.",
    "Layers with a sliding window attend its tokens alone, dense and with hisparse; these are on "
    "the device.",
    "Dense layers read the whole context over the link, if it is longer than device_buffer_size. "
    "Algorithms that select as many pages as they need attend device_buffer_size.",
)
UNKNOWNS: Final = (
    "The share of hits. It depends on text and model; idle device memory raises it.",
    "Whether kernels reach these rates. Instructions are counted for quest's scores alone, and the "
    "times of a launch and of the smallest attention are taken to be the same on every GPU.",
    "The link under load. Several GPUs, host memory on another NUMA node, pages of few bytes and "
    "pools of many GiB slow it down.",
    "Pages that prefetch brings in early.",
    "The rest of the model, which is the same without hisparse.",
)

#: Candidates for each attended page whose entries lie in host memory (``sketch`` with ``economy``).
_HOST_CANDIDATES: Final = 8
_DENSE_LAUNCHES: Final = 2
#: Launches that a layer without a selection of its own saves: scores and selection.
_SELECT_LAUNCHES: Final = 2


@dataclass(frozen=True, kw_only=True)
class LayerCode:
    """What was counted in the kernels of a layer that selects.

    Attributes:
        launches: kernels in a captured step.
        score_instructions: instructions that scoring starts for each KiB of representations, over
            all warps; 0: not counted, so that only bytes take time.
    """

    launches: int
    score_instructions: float = 0.0


#: By algorithm; docs/kernels.md has the counts, and tests/fake_cuda/test_launches.py holds them.
BUILT_IN: Final[Mapping[str, LayerCode]] = MappingProxyType(
    {
        "quest": LayerCode(launches=8, score_instructions=89),
        "sketch": LayerCode(launches=8, score_instructions=1300),
        "streaming": LayerCode(launches=6),
        "dsa": LayerCode(launches=8),
        "oracle": LayerCode(launches=12),
        "snapkv": LayerCode(launches=18),
        "topp": LayerCode(launches=189),
    }
)
#: An algorithm that has only ``summarize`` and ``score``.
OTHERS: Final = LayerCode(launches=11)
#: ``sketch`` with ``economy``, whose candidates PyTorch's operators collect.
ECONOMY: Final = LayerCode(launches=44)
#: Launches more with K and V in fp8, most of them to decode full tail pages.
_FP8_LAUNCHES: Final = 16


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes that a step moves in a layer that selects, on one GPU, for the whole batch.

    Attributes:
        dense: K and V that dense attention reads.
        scores: representations read on the device.
        host_scores: representations read from host memory.
        misses: K and V of missing pages, read from host memory.
        attended: K and V that attention reads.
        written: K and V written to host memory.
    """

    dense: int
    scores: int
    host_scores: int
    misses: int
    attended: int
    written: int


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Estimated time of attention in a decode step, which gives each request one token.

    Attributes:
        batch: requests.
        hit_ratio: fraction of the selected pages that are on the device.
        num_layers: L.
        dense_us: a layer of dense attention, mean over the layers.
        hisparse_us: a layer with hisparse, mean over the layers.
        parts_us: parts of a layer that selects, by name.
        bytes: bytes that this layer moves.
        launches: kernels of this layer.
        host_bound: whether the host's time for its launches is what a step takes.
    """

    batch: int
    hit_ratio: float
    num_layers: int
    dense_us: float
    hisparse_us: float
    parts_us: Mapping[str, float]
    bytes: StepBytes
    launches: int
    host_bound: bool

    @property
    def dense_ms(self) -> float:
        """Dense attention in all layers."""
        return self.num_layers * self.dense_us / 1000

    @property
    def hisparse_ms(self) -> float:
        """Attention with hisparse in all layers."""
        return self.num_layers * self.hisparse_us / 1000

    @property
    def ratio(self) -> float:
        """Dense time over that of hisparse: above 1, hisparse takes less."""
        return self.dense_us / self.hisparse_us


def estimate_step(
    config: HiSparseConfig,
    spec: KVSpec,
    hardware: Hardware,
    *,
    context: int,
    batch: int,
    hit_ratio: float,
    code: LayerCode | None = None,
) -> StepEstimate:
    """Estimate the time of a decode step's attention on one GPU.

    Args:
        config: the settings.
        spec: shapes of the model on one rank, as K and V are stored.
        hardware: the GPU and its host.
        context: tokens of each request.
        batch: requests.
        hit_ratio: fraction of the selected pages that are on the device; 1 is taken where all of
            the context is there, see :func:`is_resident`.
        code: what was counted in the kernels; None: the constants of the algorithm.
    """
    step = _Step(config, spec, hardware, code)
    hit_ratio = 1.0 if is_resident(config, spec, context) else hit_ratio
    moved = step.bytes(context, batch, hit_ratio)
    total_us, launches = step.run(context, batch, moved)
    host_us = launches * hardware.gpu.host_launch_us.value if config.cuda_graph is False else 0.0
    dense_us = _DENSE_LAUNCHES * hardware.gpu.launch_us.value + step.dense_us(context, moved)
    sparse = not step.attends_all(context)
    return StepEstimate(
        batch=batch,
        hit_ratio=hit_ratio,
        num_layers=spec.num_layers,
        dense_us=dense_us,
        hisparse_us=max(total_us, host_us) / spec.num_layers,
        parts_us=step.parts_us(moved, selects=True)
        if sparse
        else step.dense_parts_us(context, batch),
        bytes=moved,
        launches=step.launches(selects=sparse),
        host_bound=host_us > total_us,
    )


def is_resident(config: HiSparseConfig, spec: KVSpec, context: int) -> bool:
    """Whether the smallest device buffer of a request holds all of its full pages."""
    rows = fit_windows(config, spec).min_row_tokens
    return (context - 1) // spec.page_size <= rows // spec.page_size


class _Step:
    """Bytes and times of a step with one configuration on one GPU."""

    def __init__(
        self, config: HiSparseConfig, spec: KVSpec, hardware: Hardware, code: LayerCode | None
    ) -> None:
        algorithm = build_algorithm(config)
        scope = choose_scope(config, latent=spec.latent)
        config = fit_windows(config, spec)
        self._config, self._spec = config, spec
        self._gpu, self._host = hardware
        self._policy: SelectionPolicy = make_policy(
            config, algorithm, spec, spec.head_dim**-0.5, scope
        )
        self._kept = kept_tensors(config, algorithm, self._policy)
        on_device = entry_bytes(self._kept, "page", "host") == 0
        counted = BUILT_IN.get(config.algorithm, OTHERS) if on_device else ECONOMY
        launches = counted.launches + _FP8_LAUNCHES * spec.fp8
        self._code = code or replace(counted, launches=launches)
        self._modes = AttentionModes(
            self._policy,
            algorithm,
            min_sparse_context=config.min_sparse_context,
            dense_layers=frozenset(config.dense_layers or ()),
            reuse_layers=config.reuse_layers,
        )

    def attends_all(self, context: int) -> bool:
        """Whether a context is attended densely in every layer."""
        num_pages = (context - 1) // self._spec.page_size
        short = context <= self._config.min_sparse_context
        return short or num_pages <= self._policy.budget_pages

    def bytes(self, context: int, batch: int, hit_ratio: float) -> StepBytes:
        """What a layer that selects moves, or each layer if all of the context is attended."""
        spec, policy = self._spec, self._policy
        scales = spec.scale_bytes // spec.num_layers  # SGLang's own fp8 cache has none.
        dense = batch * context * (spec.token_bytes_per_layer - scales)
        written = batch * spec.token_bytes_per_layer
        row_bytes = batch * self._row_token_bytes
        num_pages = (context - 1) // spec.page_size
        selected = min(policy.max_pages, num_pages)
        if self.attends_all(context):
            return StepBytes(
                dense=dense,
                scores=0,
                host_scores=0,
                misses=0,
                attended=context * row_bytes,
                written=written,
            )
        # With query heads as rows, each of them has candidates of its own.
        candidates = _HOST_CANDIDATES * selected * max(1, policy.heads // spec.num_kv_heads)
        read = batch * min(num_pages, candidates)
        attended = min(context, (selected + 1) * spec.page_size)
        return StepBytes(
            dense=dense,
            scores=batch * num_pages * entry_bytes(self._kept, "page"),
            host_scores=read * entry_bytes(self._kept, "page", "host"),
            misses=round((1 - hit_ratio) * selected * spec.page_size * row_bytes),
            attended=attended * row_bytes,
            written=written,
        )

    @property
    def _row_token_bytes(self) -> int:
        """K and V of a token in all rows of a request: query heads as rows read them apart."""
        heads = self._policy.heads
        stored_heads = self._spec.num_kv_heads if heads == 1 else 1
        return heads * stored_heads * self._spec.head_bytes

    def launches(self, *, selects: bool) -> int:
        """Kernels of a layer."""
        return self._code.launches - (0 if selects else _SELECT_LAUNCHES)

    def attention_us(self, num_bytes: int) -> float:
        """An attention kernel, without its launch."""
        return max(self._gpu.attention_us.value, _us(num_bytes, self._gpu.hbm_gb_s.value))

    def dense_us(self, context: int, moved: StepBytes) -> float:
        """Dense attention kernels, mean over the layers: with a window they read a part."""
        spec = self._spec
        if not spec.windows:
            return self.attention_us(moved.dense)
        layers = [min(spec.window(x) or context, context) for x in range(spec.num_layers)]
        by_tokens = {n: self.attention_us(moved.dense * n // context) for n in set(layers)}
        return sum(by_tokens[tokens] for tokens in layers) / len(layers)

    def parts_us(self, moved: StepBytes, *, selects: bool) -> dict[str, float]:
        """Parts of a layer, one after the other."""
        parts = {"launches": self.launches(selects=selects) * self._gpu.launch_us.value}
        if selects:
            parts["scores"] = self._scores_us(moved)
        parts["gather"] = self._read_us(moved.misses)
        parts["attention"] = self.attention_us(moved.attended)
        parts["write"] = _us(moved.written, self._host.write_gb_s.value)
        return parts

    def run(self, context: int, batch: int, moved: StepBytes) -> tuple[float, int]:
        """Time in us and kernels of all layers."""
        total, launches = 0.0, 0
        dense_layers = self._modes.dense_layers
        for layer in range(self._spec.num_layers):
            if window := self._spec.window(layer):
                total += self._window_us(min(window, context), batch)
                launches += self.launches(selects=False)
            elif self.attends_all(context) or layer in dense_layers:
                total += sum(self.dense_parts_us(context, batch).values())
                launches += self.launches(selects=False)
            elif self._modes.selects(layer):
                followers = len(self._modes.followers(layer))
                total += self._group_us(followers, moved)
                launches += self.launches(selects=True)
                launches += followers * self.launches(selects=False)
        return total, launches

    def _group_us(self, followers: int, moved: StepBytes) -> float:
        """A layer that selects, and ``followers`` layers that reuse its selection."""
        first, other = (self.parts_us(moved, selects=selects) for selects in (True, False))
        transfers = followers * other["gather"]
        beside = first["attention"] + followers * (sum(other.values()) - other["gather"])
        both = max(transfers, beside) if self._config.overlap else transfers + beside
        return sum(first.values()) - first["attention"] + both

    def _window_us(self, tokens: int, batch: int) -> float:
        """A layer that attends its last tokens, which are on the device."""
        moved = StepBytes(
            dense=0,
            scores=0,
            host_scores=0,
            misses=0,
            attended=tokens * batch * self._row_token_bytes,
            written=batch * self._spec.token_bytes_per_layer,
        )
        return sum(self.parts_us(moved, selects=False).values())

    def dense_parts_us(self, context: int, batch: int) -> dict[str, float]:
        """Parts of a layer that attends the whole context, from device pages or by staging."""
        written = batch * self._spec.token_bytes_per_layer
        gather_us, attended = 0.0, batch * context * self._row_token_bytes
        if not is_resident(self._config, self._spec, context):
            attended = context * written
            gather_us = _us(attended, self._host.copy_gb_s.value) + self._host.latency_us.value
        attention_us = self.attention_us(attended)
        if self._config.overlap:
            gather_us -= min(gather_us, attention_us)
        return {
            "launches": self.launches(selects=False) * self._gpu.launch_us.value,
            "gather": gather_us,
            "attention": attention_us,
            "write": _us(written, self._host.write_gb_s.value),
        }

    def _scores_us(self, moved: StepBytes) -> float:
        # Four instructions start in an SM's clock.
        starts = moved.scores / 1024 * self._code.score_instructions
        issue_us = starts / (4 * self._gpu.sm_ghz.value * 1000)
        on_device = max(_us(moved.scores, self._gpu.hbm_gb_s.value), issue_us)
        return on_device + self._read_us(moved.host_scores)

    def _read_us(self, num_bytes: int) -> float:
        """A kernel's read over the link."""
        if num_bytes == 0:
            return 0.0
        return self._host.latency_us.value + _us(num_bytes, self._host.read_gb_s.value)


def _us(num_bytes: int, gb_s: float) -> float:
    return num_bytes / (gb_s * 1000)
