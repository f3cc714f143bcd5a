"""What ``hisparse plan`` shows: a row for each configuration and context."""

import json
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_indexer
from hisparse.errors import ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.model_config import count_weight_bytes, text_config
from hisparse.plan.estimate import GPUS, estimate_token
from hisparse.plan.fit import STATES, Capacity, Machine, fit
from hisparse.plan.shapes import shape_per_rank, state_bytes
from hisparse.sglang import features
from hisparse.sglang.features.base import Start
from hisparse.sglang.features.hybrids import check_options
from hisparse.sglang.models import Trained, check_trained
from hisparse.units import format_bytes, resolve_memory

#: Fraction of a GPU for weights and KV cache. The printed command sets it on the server.
_MEM_FRACTION = 0.85

_ASSUMPTIONS = (
    "A batch fits (see above), and every request has the whole context. hits: share of its "
    "selected pages that are on the device.",
    "Kernels reach about 0.9 of the GPU's published bandwidth; 46.8 GB/s over PCIe 5 was measured. "
    "Their instructions take what a model of an H100 computes from the machine code. Steps are "
    "captured in CUDA graphs.",
    "The rest of the model takes the time to read all weights of a GPU once. Arithmetic, which "
    "counts from a few hundred requests on, and exchanges between GPUs are left out.",
)
_STATES = (
    f"Layers of linear attention keep {STATES} states of a request on the device, SGLang's default "
    "with a radix cache; their time is left out."
)
_MISS = 'Times are of "miss": "transfer": no GPU has run "host" yet.'


def make_plan(asked: Namespace, model: Any, folder: str) -> tuple[dict[str, Any], Machine]:
    """What ``--json`` prints, but for the name of the model, and the machine.

    Args:
        asked: the flags of ``hisparse plan``; sizes are texts such as "141GiB", None where they are
            found.
        model: configuration of transformers.
        folder: of the model, for the command to start.

    Returns:
        The machine's sizes, the fields of the first row, ``plans`` with all rows, and the machine.

    Raises:
        ConfigError: a flag is wrong, or a configuration is refused.
    """
    capacities, machine = _fit_all(asked, model)
    rows = [
        _describe(x, machine, folder) | {"estimates": _estimate(x, machine, asked)}
        for x in capacities
    ]
    assumptions = (
        *_ASSUMPTIONS,
        *((_MISS,) if any(x.config.miss != "transfer" for x in capacities) else ()),
        *((_STATES,) if machine.state_bytes else ()),
    )
    sizes = {
        "tp": machine.tp,
        "device_memory_bytes": machine.device_bytes,
        "host_memory_bytes": machine.host_bytes,
        "weight_bytes": machine.weight_bytes,
        "mem_fraction_static": machine.mem_fraction,
        "estimate": {"measured": False, "gpu": asked.gpu, "assumptions": assumptions},
    }
    return sizes | rows[0] | {"plans": rows}, machine


def _fit_all(asked: Namespace, model: Any) -> tuple[list[Capacity], Machine]:
    """One capacity for each configuration and context.

    Raises:
        ConfigError: an argument is wrong, or the server would refuse a configuration.
    """
    shape = shape_per_rank(model, 1, asked.tp)
    contexts = _contexts(asked.context, model)
    machine = Machine(
        device_bytes=_device_bytes(asked.device_memory),
        host_bytes=_size("--host-memory", asked.host_memory) or free_host_memory(),
        tp=asked.tp,
        weight_bytes=_size("--weights", asked.weights) or count_weight_bytes(model, shape.dtype),
        mem_fraction=_MEM_FRACTION,
        state_bytes=state_bytes(model, asked.tp),
    )
    kind, trained = features.trained_indexer(text_config(model))
    capacities = []
    for config in _configs(asked, trained):
        build_algorithm(config)
        _check_served(config, asked, model.model_type if machine.state_bytes else "")
        check_indexer(model.model_type, config, kind.feature if kind else "")
        if trained:
            check_trained(model.model_type, config, trained, pp_size=1)
        spec = shape_per_rank(model, config.page_size, asked.tp)
        capacities += [fit(config, spec, machine, context) for context in contexts]
    return capacities, machine


def _check_served(config: HiSparseConfig, asked: Namespace, hybrid: str) -> None:
    """Raise ``ConfigError`` if the server would refuse the printed command.

    Args:
        asked: the flags of ``hisparse plan``.
        hybrid: name of a model with layers that keep a state; "": it is none.
    """
    flags = SimpleNamespace(
        tp_size=asked.tp,
        dp_size=1,
        pp_size=1,
        attn_dp_size=1,
        enable_dp_attention=False,
        enable_unified_cache_external_linker=False,
        disaggregation_mode="null",
        speculative_algorithm=None,
    )
    start = Start(args=flags, config=config, device="cuda")
    features.check_start(start)
    if hybrid:
        check_options(hybrid, start)
        if config.dense_layers:
            raise ConfigError(
                f"dense_layers: got {list(config.dense_layers)} in the plan of {hybrid}, some of "
                "whose layers do not attend, expected none"
            )


def _contexts(asked: Sequence[int], model: Any) -> list[int]:
    longest: int | None = getattr(text_config(model), "max_position_embeddings", None)
    contexts = list(asked) or ([longest] if longest else [])
    if not contexts:
        raise ConfigError(
            "--context: got nothing, and the model's configuration has no max_position_embeddings; "
            "expected numbers such as 4096 or 256,512"
        )
    if longest and max(contexts) > longest:
        raise ConfigError(
            f"--context: got {max(contexts)}, expected at most {longest}, "
            f"max_position_embeddings of this {model.model_type} model"
        )
    return contexts


def _configs(asked: Namespace, trained: Trained | None) -> list[HiSparseConfig]:
    """Every algorithm with every budget, and each ``--config``; without these, the defaults."""
    whole = list(map(HiSparseConfig.parse, asked.config))
    if whole and not (asked.algorithm or asked.budget):
        return whole
    defaults: Mapping[str, Any] = trained.settings if trained else {}
    configs = []
    algorithms: Sequence[str | None] = asked.algorithm or [None]
    budgets: Sequence[int | None] = asked.budget or [None]
    for pair in product(algorithms, budgets):
        given = {k: v for k, v in zip(("algorithm", "budget"), pair, strict=True) if v is not None}
        configs.append(HiSparseConfig.from_dict({**defaults, **given}))
    return configs + whole


def _size(flag: str, text: str | None) -> int | None:
    return None if text is None else resolve_memory(text, 2**63, flag)


def _device_bytes(text: str | None) -> int:
    import torch

    if text is not None:
        return resolve_memory(text, 2**63, "--device-memory")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device-memory: got nothing, and PyTorch finds no CUDA GPU here; expected the memory "
            "of one GPU, such as 80GiB or 141GiB"
        )
    total: int = torch.cuda.mem_get_info()[1]
    return total


def _describe(capacity: Capacity, machine: Machine, folder: str) -> dict[str, Any]:
    sizing, config = capacity.sizing, capacity.config
    return {
        "algorithm": config.algorithm,
        "budget": config.budget,
        "context": capacity.context,
        "bytes_per_token": capacity.token_bytes,
        "dense": {"max_requests": capacity.dense_max_requests},
        "hisparse": {
            "max_requests": capacity.max_requests,
            "device_bytes_per_request": capacity.device_bytes_per_request,
            "host_bytes_per_request": capacity.host_bytes_per_request,
            "device_bytes_per_token": capacity.device_bytes_per_token,
            "host_bytes_per_token": capacity.host_bytes_per_token,
            "kv_tokens": 0 if sizing is None else sizing.kv_tokens,
            "limit": capacity.limit,
            "message": capacity.message,
        },
        "command": _launch_line(capacity, machine, folder) if capacity.max_requests else None,
    }


def _estimate(capacity: Capacity, machine: Machine, asked: Namespace) -> list[dict[str, Any]]:
    """Times per token for each batch and hit ratio."""
    found = {}
    for batch, hits in product(asked.batch, asked.hit_ratio):
        estimate = estimate_token(
            capacity.config,
            capacity.spec,
            GPUS[asked.gpu],
            context=capacity.context,
            batch=batch,
            hit_ratio=hits,
            weight_bytes=-(-machine.weight_bytes // machine.tp),
        )
        # If the whole context is on the device, the hit ratio is always 1.
        found[batch, estimate.hit_ratio] = {
            "batch": batch,
            "hit_ratio": estimate.hit_ratio,
            "dense_ms_per_token": float(f"{estimate.dense_ms:.4g}"),
            "hisparse_ms_per_token": float(f"{estimate.hisparse_ms:.4g}"),
        }
    return list(found.values())


def _launch_line(capacity: Capacity, machine: Machine, folder: str) -> str:
    default = HiSparseConfig().effective()
    chosen = capacity.config.effective() | {"host_memory": capacity.host_memory}
    settings = {k: v for k, v in chosen.items() if v != default[k]}
    words = ["python", "-m", "sglang.launch_server", "--model-path", folder]
    words += ["--tp", str(machine.tp)] if machine.tp > 1 else []
    words += ["--context-length", str(capacity.context)]
    words += ["--mem-fraction-static", f"{machine.mem_fraction:g}"]
    words += ["--max-running-requests", str(capacity.max_requests)]
    if machine.state_bytes:
        words += ["--max-mamba-cache-size", str(capacity.max_requests * STATES)]
    words += ["--attention-backend", "hisparse", "--hisparse-config", json.dumps(settings)]
    return shlex.join(words)


def explain(rows: Sequence[dict[str, Any]], machine: Machine) -> str:
    """What the columns of the table mean, with sizes of this machine and model."""
    gpus = f"each of {machine.tp} GPUs" if machine.tp > 1 else "a GPU"
    return (
        "dense, hisparse: requests that run at once. device, host: bytes that one takes "
        f"with hisparse, on {gpus} of {format_bytes(machine.device_bytes)} and in host memory. "
        "limit: the memory that is too small for one more request. K and V of a token take "
        f"{format_bytes(rows[0]['bytes_per_token'])}, all weights "
        f"{format_bytes(machine.weight_bytes)}. Weights and KV cache get "
        f"{machine.mem_fraction:.0%} of a GPU, activations and CUDA graphs the rest."
    )
