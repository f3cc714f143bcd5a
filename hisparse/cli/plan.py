"""``hisparse plan``: how many long requests a machine serves, and the command that serves them."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from hisparse.cli.lists import names, numbers
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.memory.host import free_host_memory
from hisparse.units import format_bytes, resolve_memory

if TYPE_CHECKING:
    from hisparse.plan.fit import Capacity, Machine

__all__ = ["add_parser"]

#: Weights and KV cache together; written into the command, so that the server keeps to it.
_MEM_FRACTION = 0.85


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = commands.add_parser(
        "plan", help="how many requests fit, dense and with hisparse, and the flags to use"
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", metavar="PATH|HUB_ID|NAME", help="only its config")
    add("--context", type=numbers, default=[], metavar="N[,N]", help="tokens, prompt and answer")
    add("--algorithm", type=names, default=[], metavar="NAME[,NAME]")
    add("--budget", type=numbers, default=[], metavar="N[,N]", help="tokens")
    add("--config", action="append", default=[], metavar="JSON", help="a whole configuration")
    add("--device-memory", metavar="SIZE", help="of one GPU, such as 141GiB (this machine's)")
    add("--host-memory", metavar="SIZE", help="free on the node, such as 1TiB (this machine's)")
    add("--weights", metavar="SIZE", help="of the model's files (computed from its config)")
    add("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), help="how K and V are stored (auto)")
    add("--tp", type=int, default=1, help="GPUs, all on one node")
    add("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.eval.models import resolve

    folder = resolve(arguments.model, progress=lambda line: print(line, file=sys.stderr))
    try:
        import transformers
    except ImportError:
        raise ConfigError("hisparse plan needs transformers: pip install transformers") from None
    # What goes wrong is one line of ours.
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from hisparse.transformers.served_shape import read_configuration

    capacities, machine = _plan(arguments, read_configuration(folder))
    lines = [_describe(c, machine, folder) for c in capacities]
    if arguments.json:
        about = {
            "model": arguments.model,
            "tp": machine.tp,
            "device_memory_bytes": machine.device_bytes,
            "host_memory_bytes": machine.host_bytes,
            "weight_bytes": machine.weight_bytes,
            "mem_fraction_static": machine.mem_fraction,
        }
        print(json.dumps(about | lines[0] | {"plans": lines}, indent=2))
    else:
        _print_tables(lines, machine)
    return 0


def _plan(arguments: argparse.Namespace, model: Any) -> tuple[list[Capacity], Machine]:
    """One capacity for each configuration and context."""
    from hisparse.engine.capabilities import check_indexer
    from hisparse.plan.fit import Machine, fit
    from hisparse.transformers.served_shape import count_weight_bytes, served_shape

    if arguments.tp < 1:
        raise ConfigError(f"--tp: got {arguments.tp}, expected at least 1")
    shape = served_shape(model, 1, arguments.tp)
    contexts = _contexts(arguments.context, model)
    machine = Machine(
        device_bytes=_device_bytes(arguments.device_memory),
        host_bytes=_size("--host-memory", arguments.host_memory) or free_host_memory(),
        tp=arguments.tp,
        weight_bytes=_size("--weights", arguments.weights)
        or count_weight_bytes(model, shape.dtype),
        mem_fraction=_MEM_FRACTION,
    )
    capacities = []
    for config in _configs(arguments, model, has_indexer=shape.index_head_dim > 0):
        check_indexer(model.model_type, config, has_indexer=shape.index_head_dim > 0)
        spec = served_shape(model, config.page_size, arguments.tp)
        capacities += [fit(config, spec, machine, context) for context in contexts]
    return capacities, machine


def _contexts(asked: list[int], model: Any) -> list[int]:
    from hisparse.transformers.shape import text_config

    longest: int | None = getattr(text_config(model), "max_position_embeddings", None)
    contexts = asked or ([longest] if longest else [])
    if not contexts:
        raise ConfigError("--context: got nothing, and the model's config names no longest one")
    if longest and max(contexts) > longest:
        raise ConfigError(
            f"--context: got {max(contexts)}, expected at most {longest}, "
            f"max_position_embeddings of this {model.model_type} model"
        )
    return contexts


def _configs(
    arguments: argparse.Namespace, model: Any, *, has_indexer: bool
) -> list[HiSparseConfig]:
    """Algorithms times budgets, and each ``--config``; else one of defaults."""
    from hisparse.transformers.shape import text_config

    # As in the server, the flag and the key are the same setting, and "auto" leaves it to the key.
    flag = arguments.kv_cache_dtype
    stored = {"kv_cache_dtype": flag} if flag == "fp8_e4m3" else {}
    whole = [replace(HiSparseConfig.parse(text), **stored) for text in arguments.config]
    if whole and not (arguments.algorithm or arguments.budget):
        return whole
    defaults: dict[str, Any] = {}
    if has_indexer:
        # As the model was trained.
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
        "bytes_per_token": capacity.spec.token_bytes,
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
    words += ["--context-length", str(capacity.context)]
    words += ["--mem-fraction-static", f"{machine.mem_fraction:g}"]
    words += ["--max-running-requests", str(capacity.max_requests)]
    words += ["--attention-backend", "hisparse", "--hisparse-config", json.dumps(settings)]
    return shlex.join(words)


def _print_tables(lines: list[dict[str, Any]], machine: Machine) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("algorithm", no_wrap=True)
    for name in ("budget", "context", "dense", "hisparse", "device", "host"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for line in lines:
        ours = line["hisparse"]
        table.add_row(
            line["algorithm"],
            f"{line['budget']:,}",
            f"{line['context']:,}",
            f"{line['dense']['max_requests']:,}",
            f"{ours['max_requests']:,}",
            format_bytes(ours["device_bytes_per_request"]),
            format_bytes(ours["host_bytes_per_request"]),
            ours["limit"].removesuffix("_memory"),
        )
    console.print(table)
    gpus = f"on each of {machine.tp} GPUs" if machine.tp > 1 else "on one GPU"
    console.print(
        f"Requests at once, dense and with hisparse, and the bytes that one takes {gpus} of "
        f"{format_bytes(machine.device_bytes)}.\nK and V of a token take "
        f"{format_bytes(lines[0]['bytes_per_token'])} there, all weights "
        f"{format_bytes(machine.weight_bytes)}. Weights and cache get "
        f"{machine.mem_fraction:.0%} of a GPU,\nactivations and CUDA graphs the rest."
    )
    for line in lines:
        console.print(f"\n{line['command'] or line['hisparse']['message']}", markup=False)
