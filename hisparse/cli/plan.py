"""``hisparse plan``: how many long requests fit a machine, how fast, and the command to start."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from dataclasses import replace
from itertools import product
from typing import Any

from rich.console import Console
from rich.text import Text

from hisparse.algorithms import build_algorithm
from hisparse.cli import plan_links, plan_plot, plan_slo, plan_times, plan_trace
from hisparse.cli.lists import names, numbers
from hisparse.cli.output import make_table, print_paragraph
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_indexer
from hisparse.engine.stages import divide_layers
from hisparse.errors import ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.plan.fit import Capacity, Machine, fit, refuse
from hisparse.sglang.combinations import Start, check_combinations
from hisparse.units import format_bytes, resolve_memory

__all__ = ["add_parser"]

#: Fraction of a GPU for weights and KV cache. The printed command sets it on the server.
_MEM_FRACTION = 0.85

_PIPELINE = (
    "A step passes the ranks of a pipeline one after the other; that the ranks work on other "
    "requests meanwhile is left out."
)


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = (
        "compute how many requests fit, dense and with hisparse, and the command to start; "
        "estimate the time of a decode step's attention"
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
    add("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), help="dtype of K and V (auto)")
    add("--tp", type=int, default=1, metavar="N", help="GPUs that divide a layer, on one node (1)")
    add(
        "--pp", type=int, default=1, metavar="N", help="parts that divide the layers, each --tp (1)"
    )
    add("--dp", type=int, default=1, metavar="N", help="replicas, all on that node (1)")
    plan_times.add_flags(parser)
    plan_trace.add_flag(parser)
    plan_slo.add_flags(parser)
    plan_links.add_flag(parser)
    text = "draw requests and time per token against the context, for the first GPU and batch"
    add("--plot", metavar="FILE.svg", help=text)
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.eval.models import resolve

    hardware, links = plan_times.read_hardware(arguments), plan_links.read_links(arguments)
    traced = plan_trace.read_trace(arguments)
    folder = resolve(arguments.model, progress=lambda line: print(line, file=sys.stderr))
    try:
        import transformers
    except ImportError:
        raise ConfigError("hisparse plan needs transformers: pip install transformers") from None
    # An error in the model's configuration is one line of ours, without warnings before it.
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from hisparse.transformers.model_config import read_model_config

    model = read_model_config(folder)
    capacities, machine = _fit_all(arguments, model)
    target = plan_slo.read_target(arguments, hardware, machine)

    def row(capacity: Capacity) -> dict[str, Any]:
        hits = arguments.hit_ratio or plan_times.HIT_RATIOS
        if traced is not None and capacity.limit is not None:
            hits = [traced.hit_ratio(capacity.config)]
        moved = capacity.context * capacity.token_bytes
        return _describe(capacity, machine, folder) | {
            "estimates": plan_times.describe_steps(capacity, hardware, arguments.batch, hits),
            "loads": plan_slo.describe_loads(capacity, hardware, target, hits),
            "moves": plan_links.describe_moves(moved, links),
            "beyond_trace": traced is not None and capacity.context > traced.longest,
        }

    rows = [row(capacity) for capacity in capacities]
    estimate = plan_times.describe_hardware(hardware, arguments, machine)
    if target is not None:
        estimate["assumptions"] = (*estimate["assumptions"], target.assumption)
    if machine.stages:
        estimate["assumptions"] = (*estimate["assumptions"], _PIPELINE)
    source = f"{arguments.model}, {estimate['host']}"
    if traced is not None:
        estimate["trace"] = traced.about
        source += ", MADE-UP trace" if traced.made_up else ", recorded trace"
        source += f" of up to {traced.longest:,} tokens"
    if arguments.plot:
        arguments.context = plan_plot.contexts(_contexts(arguments.context, model))
        plotted = [row(capacity) for capacity in _fit_all(arguments, model)[0]]
        plan_plot.write(arguments.plot, plotted, source)
    if arguments.json:
        about = _about(arguments, machine) | {"estimate": estimate}
        first = next(row for row in rows if row["hisparse"]["limit"] is not None)
        print(json.dumps(about | first | {"plans": rows}, indent=2))
        return 0
    console = Console(highlight=False)
    _print(console, rows, machine)
    if traced is not None:
        plan_trace.print_source(console, traced, rows)
    if target is not None:
        plan_slo.print_loads(console, rows, target)
    plan_links.print_moves(console, rows)
    plan_times.print_steps(console, rows, estimate)
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
    from hisparse.transformers.model_config import count_weight_bytes, shape_per_rank

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
    check_combinations(Start(args=flags, config=config, device="cuda"))


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
    stored = {"kv_cache_dtype": flag} if flag == "fp8_e4m3" else {}
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
