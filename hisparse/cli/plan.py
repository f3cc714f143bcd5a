"""``hisparse plan``: how many long requests fit, the command to start, and an estimate of time."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from rich.console import Console
from rich.text import Text

from hisparse.algorithms import build_algorithm
from hisparse.cli.arguments import names, numbers, ratios
from hisparse.cli.output import make_table, print_paragraph
from hisparse.config import KV_FORMATS, HiSparseConfig
from hisparse.engine.capabilities import check_indexer
from hisparse.engine.stages import divide_layers
from hisparse.errors import ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.plan.estimate import GPUS, estimate_token
from hisparse.plan.fit import Capacity, Machine, fit, refuse
from hisparse.sglang import features
from hisparse.sglang.start import Start
from hisparse.units import format_bytes, resolve_memory

#: Fraction of a GPU for weights and KV cache. The printed command sets it on the server.
_MEM_FRACTION = 0.85

_ASSUMPTIONS = (
    "A batch fits (see above), and every request has the whole context. hits: share of its "
    "selected pages that are on the device.",
    "Kernels reach 0.9 of the GPU's published bandwidth, and nvbandwidth's rates on the link. "
    "Steps are captured in CUDA graphs. What overlap and prefetch hide is left out.",
    "The rest of the model takes the time to read all weights of a GPU once. Arithmetic, which "
    "counts from a few hundred requests on, and exchanges between GPUs are left out.",
)
_PIPELINE = "Ranks of a pipeline follow each other; what they do for other requests is left out."


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = (
        "compute how many requests fit, dense and with hisparse, and the command to start; "
        "estimate the time per token"
    )
    parser = commands.add_parser("plan", help=text, description=text)
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        metavar="PATH|HUB_ID|NAME",
        help="the model; only its configuration is read (smollm2-135m)",
    )
    add(
        "--context",
        type=numbers,
        default=[],
        metavar="N[,N]",
        help="tokens of a request, prompt and answer (the longest that the model supports)",
    )
    add("--algorithm", type=names, default=[], metavar="NAME[,NAME]", help="algorithms, by name")
    add("--budget", type=numbers, default=[], metavar="N[,N]", help="tokens attended per step")
    add(
        "--config",
        action="append",
        default=[],
        metavar="JSON",
        help="a whole --hisparse-config, as JSON or @FILE; may be given more than once",
    )
    add("--device-memory", metavar="SIZE", help="memory of one GPU, such as 141GiB (this GPU's)")
    add("--host-memory", metavar="SIZE", help="free host memory, such as 1TiB (free here)")
    add("--weights", metavar="SIZE", help="size of the weights (computed from the configuration)")
    add("--kv-cache-dtype", type=_kv_dtype, metavar="NAME", help="how K and V are stored (auto)")
    add("--tp", type=int, default=1, metavar="N", help="GPUs that divide a layer, on one node (1)")
    add(
        "--pp", type=int, default=1, metavar="N", help="parts that divide the layers, each --tp (1)"
    )
    add("--dp", type=int, default=1, metavar="N", help="replicas, all on that node (1)")
    gpus = ", ".join(GPUS)
    add("--gpu", default="h100", metavar="NAME", help=f"GPU of the time estimate: {gpus} (h100)")
    text = "requests that run at once, in the estimate (1,8)"
    add("--batch", type=numbers, default=[1, 8], metavar="N[,N]", help=text)
    text = "fractions of the selected pages that are on the device (0.85,0.95,1)"
    add("--hit-ratio", type=ratios, default=[0.85, 0.95, 1.0], metavar="F[,F]", help=text)
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.eval.models import resolve

    if arguments.gpu not in GPUS:
        raise ConfigError(f"--gpu: got {arguments.gpu!r}, expected {', '.join(GPUS)}")
    folder = resolve(arguments.model, progress=lambda line: print(line, file=sys.stderr))
    try:
        import transformers
    except ImportError:
        raise ConfigError("hisparse plan needs transformers: pip install transformers") from None
    # An error in the model's configuration is one line of ours, without warnings before it.
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from hisparse.transformers.model_shape import read_model_config

    model = read_model_config(folder)
    capacities, machine = _fit_all(arguments, model)
    rows = [
        _describe(x, machine, folder) | {"estimates": _estimate(x, machine, arguments)}
        for x in capacities
    ]
    assumptions = (*_ASSUMPTIONS, _PIPELINE) if machine.stages else _ASSUMPTIONS
    if arguments.json:
        estimate = {"measured": False, "gpu": arguments.gpu, "assumptions": assumptions}
        about = _about(arguments, machine) | {"estimate": estimate}
        first = next(row for row in rows if row["hisparse"]["limit"] is not None)
        print(json.dumps(about | first | {"plans": rows}, indent=2))
        return 0
    console = Console(highlight=False)
    _print(console, rows, machine)
    _print_estimates(console, rows, arguments.gpu, assumptions)
    _print_commands(console, rows)
    return 0


def _about(arguments: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """What all rows are for."""
    return {
        "model": arguments.model,
        "tp": machine.tp,
        "pp": max(1, len(machine.stages)),
        "dp": machine.dp,
        "device_memory_bytes": machine.device_bytes,
        "host_memory_bytes": machine.host_bytes,
        "weight_bytes": machine.weight_bytes,
        "mem_fraction_static": machine.mem_fraction,
    }


def _fit_all(arguments: argparse.Namespace, model: Any) -> tuple[list[Capacity], Machine]:
    """One capacity for each configuration and context.

    Settings that this model or machine cannot serve get a capacity of no requests.

    Raises:
        ConfigError: an argument is wrong, or every configuration is refused.
    """
    from hisparse.transformers.model_shape import count_weight_bytes, shape_per_rank

    for flag, number in (("--tp", arguments.tp), ("--pp", arguments.pp), ("--dp", arguments.dp)):
        if number < 1:
            raise ConfigError(f"{flag}: got {number}, expected at least 1")
    shape = shape_per_rank(model, 1, arguments.tp)
    if arguments.pp > shape.num_layers:
        raise ConfigError(
            f"--pp: got {arguments.pp}, expected at most {shape.num_layers}, the model's layers"
        )
    contexts = _contexts(arguments.context, model)
    machine = Machine(
        device_bytes=_device_bytes(arguments.device_memory),
        host_bytes=_size("--host-memory", arguments.host_memory) or free_host_memory(),
        tp=arguments.tp,
        weight_bytes=_size("--weights", arguments.weights)
        or count_weight_bytes(model, shape.dtype),
        mem_fraction=_MEM_FRACTION,
        dp=arguments.dp,
        stages=divide_layers(shape.num_layers, arguments.pp) if arguments.pp > 1 else (),
    )
    has_indexer, capacities = shape.index_head_dim > 0, []
    for config in _configs(arguments, model, has_indexer=has_indexer):
        build_algorithm(config)
        spec = shape_per_rank(model, config.page_size, arguments.tp)
        for context in contexts:
            try:
                _check_served(config, arguments)
                check_indexer(model.model_type, config, has_indexer=has_indexer)
                capacity = fit(config, spec, machine, context)
            except ConfigError as error:
                capacity = refuse(config, spec, machine, context, str(error))
            capacities.append(capacity)
    if all(capacity.limit is None for capacity in capacities):
        raise ConfigError("; ".join(dict.fromkeys(c.message for c in capacities)))
    return capacities, machine


def _check_served(config: HiSparseConfig, arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` if the server would refuse the printed command."""
    flags = argparse.Namespace(
        tp_size=arguments.tp,
        dp_size=arguments.dp,
        pp_size=arguments.pp,
        attn_dp_size=1,
        enable_dp_attention=False,
        enable_unified_cache_external_linker=False,
        disaggregation_mode="null",
        speculative_algorithm=None,
    )
    features.check_start(Start(args=flags, config=config, device="cuda"))


def _contexts(asked: list[int], model: Any) -> list[int]:
    from hisparse.transformers.model_shape import text_config

    longest: int | None = getattr(text_config(model), "max_position_embeddings", None)
    contexts = asked or ([longest] if longest else [])
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


def _configs(
    arguments: argparse.Namespace, model: Any, *, has_indexer: bool
) -> list[HiSparseConfig]:
    """Every algorithm with every budget, and each ``--config``; without these, the defaults."""
    from hisparse.transformers.model_shape import text_config

    # As in the server, the flag and the key are one setting; "auto" leaves the key as it is.
    flag = arguments.kv_cache_dtype
    stored = {"kv_cache_dtype": flag} if flag not in (None, "auto") else {}
    whole = [replace(HiSparseConfig.parse(text), **stored) for text in arguments.config]
    if whole and not (arguments.algorithm or arguments.budget):
        return whole
    defaults: dict[str, Any] = {}
    if has_indexer:
        # The selection that the model was trained with.
        defaults = {"algorithm": "dsa", "page_size": 1, "num_sink_pages": 0}
        defaults |= {"num_recent_pages": 0, "budget": text_config(model).index_topk}
    configs = []
    for pair in product(arguments.algorithm or [None], arguments.budget or [None]):
        asked = {k: v for k, v in zip(("algorithm", "budget"), pair, strict=True) if v is not None}
        configs.append(HiSparseConfig.from_dict(defaults | asked | stored))
    return configs + whole


def _kv_dtype(name: str) -> str:
    try:
        KV_FORMATS.get(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


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


def _estimate(
    capacity: Capacity, machine: Machine, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times per token for each batch and hit ratio; none if the settings are refused."""
    if capacity.limit is None:
        return []
    found = {}
    for batch, hits in product(arguments.batch, arguments.hit_ratio):
        estimate = estimate_token(
            capacity.config,
            capacity.spec,
            GPUS[arguments.gpu],
            context=capacity.context,
            batch=batch,
            hit_ratio=hits,
            weight_bytes=-(-machine.weight_bytes // machine.tp),
        )
        # A context that is on the device as a whole has one hit ratio, 1.
        found[batch, estimate.hit_ratio] = {
            "batch": batch,
            "hit_ratio": estimate.hit_ratio,
            "dense_ms_per_token": float(f"{estimate.dense_ms:.4g}"),
            "hisparse_ms_per_token": float(f"{estimate.hisparse_ms:.4g}"),
        }
    return list(found.values())


def _launch_line(capacity: Capacity, machine: Machine, folder: str) -> str:
    default = HiSparseConfig().effective()
    settings = {k: v for k, v in capacity.config.effective().items() if v != default[k]}
    words = ["python", "-m", "sglang.launch_server", "--model-path", folder]
    words += ["--tp", str(machine.tp)] if machine.tp > 1 else []
    words += ["--pp-size", str(len(machine.stages))] if machine.stages else []
    words += ["--dp-size", str(machine.dp)] if machine.dp > 1 else []
    words += ["--context-length", str(capacity.context)]
    words += ["--mem-fraction-static", f"{machine.mem_fraction:g}"]
    words += ["--max-running-requests", str(capacity.max_requests)]
    words += ["--attention-backend", "hisparse", "--hisparse-config", json.dumps(settings)]
    return shlex.join(words)


def _print(console: Console, rows: list[dict[str, Any]], machine: Machine) -> None:
    """How many requests fit, and notes; a row without a request has its reason in a note."""
    figures = ("budget", "context", "dense", "hisparse", "device", "host")
    table = make_table("algorithm", *figures, "limit", right=figures)
    notes: list[str] = []
    for row in rows:
        ours = row["hisparse"]
        settings = (row["algorithm"], f"{row['budget']:,}", f"{row['context']:,}")
        dense, limit = f"{row['dense']['max_requests']:,}", (ours["limit"] or "").split("_")[0]
        if ours["message"]:
            if ours["message"] not in notes:
                notes.append(ours["message"])
            limit = f"{limit} [{notes.index(ours['message']) + 1}]".strip()
        if ours["limit"] is None:
            table.add_row(*settings, dense, "-", "-", "-", Text(limit))
            continue
        sizes = (ours["device_bytes_per_request"], ours["host_bytes_per_request"])
        count = f"{ours['max_requests']:,}"
        table.add_row(*settings, dense, count, *map(format_bytes, sizes), Text(limit))
    console.print(table)
    for number, note in enumerate(notes, 1):
        print_paragraph(console, note, indent=f"[{number}] ")
    if notes:
        console.print()
    print_paragraph(console, _explain(rows, machine))
    console.print()


def _print_estimates(
    console: Console, rows: list[dict[str, Any]], gpu: str, assumptions: Sequence[str]
) -> None:
    figures = ("budget", "context", "batch", "hits", "dense", "hisparse")
    title = f"Estimated, not measured: ms per token, {gpu}"
    table = make_table("algorithm", *figures, right=figures, title=title)
    for row in rows:
        for step in row["estimates"]:
            table.add_row(
                row["algorithm"],
                f"{row['budget']:,}",
                f"{row['context']:,}",
                f"{step['batch']:,}",
                f"{step['hit_ratio']:.0%}",
                f"{step['dense_ms_per_token']:,.1f}",
                f"{step['hisparse_ms_per_token']:,.1f}",
            )
    console.print(table)
    console.print("Assumed:")
    for line in assumptions:
        print_paragraph(console, line, indent="- ")


def _print_commands(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["command"]:
            title = f"{row['algorithm']}, budget {row['budget']:,}, context {row['context']:,}:"
            console.print(f"\n{title}", markup=False)
            # One line, however long, so that it can be copied.
            console.print(row["command"], markup=False, soft_wrap=True)


def _explain(rows: list[dict[str, Any]], machine: Machine) -> str:
    count = machine.tp * max(1, len(machine.stages))
    gpus = f"each of {count} GPUs" if count > 1 else "a GPU"
    if machine.stages:
        gpus += f" (with {max(machine.stages)} layers, the most of a rank)"
    where = f" in each of {machine.dp} replicas" if machine.dp > 1 else ""
    return (
        f"dense, hisparse: requests that run at once{where}. device, host: bytes that one takes "
        f"with hisparse, on {gpus} of {format_bytes(machine.device_bytes)} and in host memory. "
        "limit: the memory that is too small for one more request. K and V of a token take "
        f"{format_bytes(rows[0]['bytes_per_token'])}, all weights "
        f"{format_bytes(machine.weight_bytes)}. Weights and KV cache get "
        f"{machine.mem_fraction:.0%} of a GPU, activations and CUDA graphs the rest."
    )
