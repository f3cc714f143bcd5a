"""Every variant of a Triton kernel that the engine launches: constants, dtypes and alignments.

A variant is what Triton compiles apart. It is derived from launches on the fake device, so no list
has to follow the code.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from hisparse.algorithms import BaseSparseAlgorithm, build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.types import AttentionRule, SelectionScope
from tests.fake_cuda.custom import Custom
from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.engine import FakeEngine, model
from tests.fake_cuda.launches import Launch

__all__ = ["SHORT", "WHOLE", "Setting", "Variant", "variant_of", "variants"]


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants.

    Attributes:
        module, name: of the kernel.
        signature: type of each parameter, "constexpr" for constants; in a tuple, too.
        constants: values by position, of parameters and in tuples; of a kernel's struct of
            constants, one named tuple.
        attributes: what is known of others, by position.
        options: warps and stages.
    """

    module: str
    name: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    attributes: tuple[tuple[tuple[int, ...], int], ...]
    options: tuple[tuple[str, int], ...]

    @property
    def kernel(self) -> Any:
        """The function, to be compiled."""
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def named(self) -> dict[str, Any]:
        """The constants that the code names: the fields of the kernel's struct."""
        structs = [value for _, value in self.constants if isinstance(value, tuple)]
        return {name: value for each in structs for name, value in each._asdict().items()}

    def __str__(self) -> str:
        """The kernel, the dtypes of its tensors, and the constants that its code names."""
        named = [f"{name}={int(v)}" for name, v in self.named.items() if v not in (False, None)]
        types = tree_leaves(tuple(given for _, given in self.signature))
        dtypes = dict.fromkeys(t[1:] for t in types if t[:1] == "*" and t != "*i32")
        title = f"{self.module.split('.')[-2]}.{self.name.strip('_')}"
        return " ".join([title, ",".join(dtypes), *named])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine whose launches are looked at.

    Attributes:
        algorithm: name; "custom" for one that has only ``summarize`` and ``score``.
        options: of the algorithm.
        kind: of model, a key of ``MODELS`` or ``MORE_MODELS``.
        page_size: S, tokens.
        dtype: of keys, values and queries.
        kv_cache_dtype: how keys and values are stored.
        scope: selection scope.
        batch: requests.
        context: tokens of a request.
        extensions: names.
        rule: how layers attend; None: only by the scale.
        miss: the setting.
        sinks: whether heads have sinks.
    """

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "GQA"
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_cache_dtype: str = "auto"
    scope: SelectionScope = "layer"
    batch: int = 4
    context: int = 6000
    extensions: tuple[str, ...] = ()
    rule: AttentionRule | None = None
    miss: str = "transfer"
    sinks: bool = False

    def build(self) -> BaseSparseAlgorithm:
        """The algorithm."""
        if self.algorithm == "custom":
            return Custom()
        config = HiSparseConfig(algorithm=self.algorithm, algorithm_config=dict(self.options))
        return build_algorithm(config)


def _models(algorithm: str, *page_sizes: int, **changes: Any) -> Iterator[Setting]:
    for size in page_sizes:
        for scope in ("layer", "kv_head"):
            yield Setting(algorithm=algorithm, page_size=size, scope=scope, **changes)
        yield Setting(algorithm=algorithm, page_size=size, kind="MLA", **changes)


#: As in Gemma 2: layers that attend everything, and those with a window, here a shorter one.
_CAPPED, _WINDOW = AttentionRule(0.1, 50.0), AttentionRule(0.1, 50.0, 512)

#: What ``make test`` compiles.
SHORT = (
    Setting(algorithm="quest"),
    Setting(algorithm="quest", kind="MLA", page_size=64),
    Setting(algorithm="quest", options={"summary_dtype": "bfloat16"}, kv_cache_dtype="fp8_e4m3",
            scope="kv_head"),
    Setting(algorithm="sketch", kv_cache_dtype="int8", scope="kv_head"),
    Setting(algorithm="sketch", scope="kv_head"),
    Setting(algorithm="sketch", kind="MLA", page_size=64),
    Setting(algorithm="dsa", kind="MLA", page_size=1),
    Setting(algorithm="quest", rule=_WINDOW),
    Setting(algorithm="quest", miss="host"),
    Setting(algorithm="quest", miss="host", sinks=True),
)  # fmt: skip
#: What ``make test-all PART=compile`` compiles.
WHOLE = (
    *(s for name in ("quest", "sketch") for dtype in ("auto", "fp8_e4m3") for s in
      _models(name, 1, 16, 64, kv_cache_dtype=dtype)),
    *(Setting(algorithm=name, kv_cache_dtype="int8") for name in ("quest", "sketch")),
    *(s for dtype in ("bfloat16", "float32") for s in
      _models("quest", 16, options={"summary_dtype": dtype})),
    *(s for dtype in (torch.float16, torch.float32) for name in ("quest", "sketch") for s in
      _models(name, 16, dtype=dtype)),
    *_models("quest", 16, options={"ranges": 1}),
    *_models("sketch", 16, options={"detail": 0.0}),
    *_models("sketch", 16, options={"economy": True}, context=50000),
    *(s for name in ("streaming", "oracle", "snapkv", "custom") for s in _models(name, 16)),
    *(Setting(algorithm="dsa", kind="MLA", page_size=1, options={"index_dtype": dtype})
      for dtype in ("float8_e4m3fn", "bfloat16", "float32")),
    Setting(algorithm="qsa", kind="Qwen4-Exp", page_size=4),
    Setting(algorithm="msa", kind="MiniMax-M3", page_size=128, scope="kv_head", context=6144),
    Setting(algorithm="infllm", kind="MiniCPM", page_size=64, scope="kv_head"),
    *(s for batch in (1, 32) for s in _models("sketch", 16, batch=batch, context=131072)),
    *_models("sketch", 16, extensions=("tail_estimate",)),
    *(s for rule in (_CAPPED, _WINDOW) for dtype in (torch.bfloat16, torch.float32) for s in
      _models("quest", 16, dtype=dtype, rule=rule)),
    *_models("quest", 16, kv_cache_dtype="fp8_e4m3", rule=_WINDOW),
    *(Setting(algorithm="quest", kind="Gemma 2", rule=rule) for rule in (_CAPPED, _WINDOW)),
    *(s for miss in ("transfer", "host") for dtype in (torch.bfloat16, torch.float32) for s in
      _models("quest", 16, dtype=dtype, miss=miss, sinks=True)),
)  # fmt: skip


def variants(settings: tuple[Setting, ...], capability: tuple[int, int]) -> list[Variant]:
    """The variants that engines launch on a GPU of a compute capability; each once.

    Each engine runs a prefill, eager steps and a captured step.
    """
    arch = 10 * capability[0] + capability[1]
    found: dict[Variant, None] = {}
    for setting in settings:
        with fake_cuda(capability) as launches:
            algorithm = setting.build()
            engine = FakeEngine(
                launches,
                algorithm,
                model(
                    setting.kind,
                    setting.page_size,
                    dtype=setting.dtype,
                    kv_cache_dtype=setting.kv_cache_dtype,
                ),
                setting.scope,
                batch=setting.batch,
                context=setting.context,
                settings={
                    "extensions": {name: True for name in setting.extensions},
                    "miss": setting.miss,
                },
                rule=setting.rule,
                sinks=setting.sinks,
            )
            size = setting.page_size
            # A dense context, full tail pages, and widths that are no multiples of 16.
            lengths = (engine.policy.budget_pages * size, setting.context // 64 * 64, None)
            forwards = [partial(engine.decode, length) for length in lengths]
            forwards += [engine.prefill, engine.captured]
            for forward in forwards:
                forward()
                found |= {
                    variant_of(each, arch): None for each in launches.all if each.kernel is not None
                }
    return list(found)


def variant_of(launch: Launch, arch: int) -> Variant:
    """As ``triton.JITFunction.run`` finds it."""
    kernel, arguments = launch.kernel, dict(launch.arguments)
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**arguments)
    _, signature, constants, attributes = kernel._pack_args(
        backend, arguments, bound, specialization, None
    )
    return Variant(
        kernel.__module__,
        kernel.__name__,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple((at, 16) for at, given in attributes.items() if given),
        tuple((name, value) for name, value in arguments.items() if name not in signature),
    )
