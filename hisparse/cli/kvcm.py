"""``hisparse kvcm``: a manager for caches that many servers share."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparse.cli import kvcm_replay
from hisparse.cli.terminal import Values, add_command, add_flag, file, string
from hisparse.errors import ConfigError
from hisparse.units import parse_memory

if TYPE_CHECKING:
    from hisparse.kvcm.server import Ports

_MODULES = ("grpc", "grpc_tools", "prometheus_client", "starlette", "uvicorn")
_PORT = Values(int, "a port", "PORT", lambda x: 0 <= x < 1 << 16, several=False)
_HOST, _ROOT, _CAPACITY = "127.0.0.1", "/data/nfs/", "30GB"
#: Name of the flag, default, and what listens.
_PORTS = (
    ("rpc", 6381, "gRPC of engines"),
    ("http", 6382, "HTTP of engines"),
    ("admin-rpc", 6491, "gRPC of administrators; may be that of engines"),
    ("admin-http", 6492, "HTTP of administrators"),
)


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    parser = add_command(commands, "kvcm", "a manager for caches that many servers share")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    kvcm_replay.add_parser(actions)
    text = "run the manager until a signal ends it"
    parser = add_command(actions, "serve", text, _serve, json=False)
    text = "what keeps the metadata: a file or redis://host:port (without it nothing does)"
    add_flag(parser, "--store", string, text, "", metavar="PLACE")
    add_flag(parser, "--root", string, "folder of blocks that engines mount", _ROOT, metavar="DIR")
    add_flag(parser, "--capacity", string, "bytes of blocks", _CAPACITY, metavar="SIZE")
    text = "JSON of a storage and a group, instead of --root and --capacity"
    add_flag(parser, "--startup-config", file, text)
    add_flag(parser, "--host", string, "address to listen on", _HOST, metavar="ADDRESS")
    for name, port, text in _PORTS:
        add_flag(parser, f"--{name}-port", _PORT, text, port)
    add_flag(parser, "--tls-cert", file, "PEM file of a certificate: all ports are encrypted")
    add_flag(parser, "--tls-key", file, "PEM file of its key")
    text = "administrators need an account (add one with ROLE_ADMIN before)"
    parser.add_argument("--login", action="store_true", help=text)
    text = "serve DebugService, too: HTTP 3000 above that of engines, gRPC of administrators"
    parser.add_argument("--debug-service", action="store_true", help=text)


def _serve(arguments: argparse.Namespace) -> int:
    missing = [x for x in _MODULES if importlib.util.find_spec(x) is None]
    if missing:
        raise ConfigError(f"kvcm: got no {missing[0]}, expected pip install 'hisparse[kvcm]'")
    from hisparse.kvcm.server import Ports, serve
    from hisparse.kvcm.startup import default_startup, load_startup

    if arguments.startup_config is not None:
        startup = load_startup(arguments.startup_config)
    else:
        capacity = parse_memory("--capacity", arguments.capacity)
        startup = default_startup(Path(arguments.root).absolute(), int(capacity))
    certificate, key = arguments.tls_cert, arguments.tls_key
    if (certificate is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key: got one of them, expected both or none")
    if arguments.login and not arguments.store:
        raise ConfigError("--login: got no --store, expected one that has accounts")
    debug_http = arguments.http_port and arguments.http_port + 3000
    if arguments.debug_service and debug_http >= 1 << 16:
        text = f"got {arguments.http_port}, expected at most 62535 with --debug-service"
        raise ConfigError(f"--http-port: {text}")
    ports = Ports(
        arguments.host, arguments.rpc_port, arguments.http_port, arguments.admin_rpc_port,
        arguments.admin_http_port, debug_http if arguments.debug_service else None,
        None if certificate is None else (str(certificate), str(key)), arguments.login,
    )  # fmt: skip
    if not arguments.host.startswith("127.") and arguments.host not in ("::1", "localhost"):
        may = "read and write" if arguments.login else "read, write and administer (see --login)"
        print(f"kvcm: who reaches {arguments.host} may {may}", file=sys.stderr)
    asyncio.run(serve(arguments.store, startup, ports, _print_ports))
    return 0


def _print_ports(ports: Ports) -> None:
    print(
        f"kvcm: engines at {ports.host} gRPC {ports.rpc} HTTP {ports.http}, administrators gRPC "
        f"{ports.admin_rpc} HTTP {ports.admin_http}",
        flush=True,
    )
