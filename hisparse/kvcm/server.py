"""The services over gRPC and HTTP.

One thread runs all requests, so each sees and changes the state as if it were alone until it waits
for the store.
"""

import asyncio
import contextlib
import gc
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse.errors import ConfigError, one_line
from hisparse.kvcm.accounts import has_administrator
from hisparse.kvcm.dispatch import WAITS, Call, Dispatcher, Gate
from hisparse.kvcm.election import Node
from hisparse.kvcm.metrics import Exporter
from hisparse.kvcm.store import open_store
from hisparse.kvcm.wire import METHODS, Method, ServiceError, read_json, write_json

#: Bytes of a request. Its lists have limits of their own.
MAX_BODY: Final = 32 << 20
#: Bytes of a JSON body that is read, or blocks of a response that is written, in a thread.
_LARGE_BODY, _LARGE_RESPONSE = 1 << 16, 256
#: Who is refused, as HTTP and gRPC say it.
_REFUSED: Final = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@dataclass(frozen=True)
class Ports:
    """Where the services listen; a service may share a port with the other one.

    Attributes:
        host: name or address.
        rpc: gRPC of MetaService; 0: any that is free.
        http: HTTP of MetaService.
        admin_rpc: gRPC of AdminService.
        admin_http: HTTP of AdminService.
        debug_http: HTTP of DebugService, whose gRPC is on the port of AdminService's; None: off.
        tls: files of the certificate and of its key, PEM; None: the ports are not encrypted.
        login: whether administrators need an account.
    """

    host: str = "127.0.0.1"
    rpc: int = 6381
    http: int = 6382
    admin_rpc: int = 6491
    admin_http: int = 6492
    debug_http: int | None = None
    tls: tuple[str, str] | None = None
    login: bool = False


def _http_app(
    calls: dict[str, tuple[Method, Call]], gate: Gate | None, exporter: Exporter | None
) -> Starlette:
    """The application of a port.

    Args:
        calls: by path.
        gate: asks administrators for their account.
        exporter: shows the metrics, too.
    """

    async def ask(request: Request, method: str) -> int:
        if gate is None:
            return 0
        return await gate.refuse(method, request.headers.get("authorization", ""))

    def refusal(status: int) -> Response:
        header = {"WWW-Authenticate": 'Basic realm="kvcm"'} if status == 401 else {}
        return Response(b"{}", status, header, "application/json")

    async def show_metrics(request: Request) -> Response:
        status = await ask(request, "GetMetrics")
        if status > 0 or exporter is None:
            return refusal(status or 404)
        return Response(exporter.render(), media_type=CONTENT_TYPE_LATEST)

    async def answer(request: Request) -> Response:
        method, call = calls[request.url.path]
        status = 0 if method.service == "meta" else await ask(request, method.name)
        if status > 0:
            return refusal(status)
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    return _json(413, b"{}")
        except ClientDisconnect:
            return _json(400, b"{}")
        message = method.request()
        try:
            if len(body) < _LARGE_BODY:
                read_json(bytes(body), message)
            else:
                await asyncio.to_thread(read_json, bytes(body), message)
        except ValueError:
            return _json(400, b"{}")
        response = await call(message, waits=status == WAITS)
        if len(getattr(response, "locations", ())) < _LARGE_RESPONSE:
            return _json(200, write_json(response))
        return _json(200, await asyncio.to_thread(write_json, response))

    routes = [Route(path, answer, methods=["POST"]) for path in calls]
    return Starlette(routes=[*routes, Route("/metrics", show_metrics, methods=["GET"])])


def _json(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")


class _HTTPServer(uvicorn.Server):
    """Leaves signals to this process: there are several servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _grpc_handlers(calls: dict[str, tuple[Method, Call]], gate: Gate | None) -> Any:
    """The handler of one service.

    Args:
        calls: by name of the method.
        gate: asks administrators for their account.
    """

    def handler(method: Method, call: Call) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            status = 0
            if gate is not None and method.service != "meta":
                told = dict(context.invocation_metadata() or ())
                status = await gate.refuse(method.name, str(told.get("authorization", "")))
                if status > 0:
                    await context.abort(_REFUSED[status], f"{method.name}: got no such account")
            return await call(request, waits=status == WAITS)

        return grpc.unary_unary_rpc_method_handler(
            answer, method.request.FromString, method.response.SerializeToString
        )

    service = next(iter(calls.values()))[0].grpc_service
    return grpc.method_handlers_generic_handler(
        service, {name: handler(*each) for name, each in calls.items()}
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise _port_error(host, port, error) from None
    # A response is several writes; connections inherit this.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _port_error(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"port: got {host} {port}, expected one that is free: {one_line(error)}")


def _share(meta: int, admin: int) -> list[tuple[int, tuple[str, ...]]]:
    """Ports and the services on each, the first of which answers a path that both have."""
    if meta == admin != 0:
        return [(meta, ("meta", "admin"))]
    return [(meta, ("meta",)), (admin, ("admin",))]


class Server:
    """A manager that listens.

    Args:
        ports: where to listen.
    """

    def __init__(self, node: Node, ports: Ports) -> None:
        self._node = node
        self._ports = ports
        self._grpc: list[Any] = []
        self._http: list[uvicorn.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._gate = Gate(node) if ports.login else None
        dispatcher = Dispatcher(node)
        self._calls = {
            service: [(method, dispatcher.bind(method)) for method in methods]
            for service, methods in METHODS.items()
        }

    async def start(self) -> Ports:
        """Listen.

        Returns:
            The ports; those that were 0 have a number.

        Raises:
            ConfigError: a port is taken, or the certificate is none.
        """
        ports, found = self._ports, dict[str, int]()
        if ports.tls is not None:
            _check_certificate(*ports.tls)
        debug = () if ports.debug_http is None else ("debug",)
        for port, services in _share(ports.rpc, ports.admin_rpc):
            bound = await self._start_grpc(port, services + debug * ("admin" in services))
            found |= {f"{service}_rpc": bound for service in services}
        http = _share(ports.http, ports.admin_http)
        if ports.debug_http is not None:
            http.append((ports.debug_http, debug))
        for port, services in http:
            bound = self._start_http(port, services)
            found |= {f"{service}_http": bound for service in services}
        return replace(
            ports, rpc=found["meta_rpc"], http=found["meta_http"], admin_rpc=found["admin_rpc"],
            admin_http=found["admin_http"], debug_http=found.get("debug_http"),
        )  # fmt: skip

    async def _start_grpc(self, port: int, services: tuple[str, ...]) -> int:
        options = [("grpc.max_receive_message_length", MAX_BODY), ("grpc.so_reuseport", 0),
                   ("grpc.max_send_message_length", -1)]  # fmt: skip
        server = grpc.aio.server(options=options)
        for service in services:
            calls = {x.name: (x, call) for x, call in self._calls[service]}
            server.add_generic_rpc_handlers((_grpc_handlers(calls, self._gate),))
        host = self._ports.host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int
            if self._ports.tls is None:
                bound = server.add_insecure_port(address)
            else:
                certificate, key = (Path(x).read_bytes() for x in self._ports.tls)
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                bound = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise _port_error(host, port, error) from None
        await server.start()
        self._grpc.append(server)
        return bound

    def _start_http(self, port: int, services: tuple[str, ...]) -> int:
        calls: dict[str, tuple[Method, Call]] = {}
        for service in reversed(services):
            calls |= {method.http_path: (method, call) for method, call in self._calls[service]}
        listening = _listen(self._ports.host, port)
        exporter = Exporter(self._node) if "admin" in services else None
        certificate, key = self._ports.tls or (None, None)
        config = uvicorn.Config(
            _http_app(calls, self._gate, exporter), lifespan="off", log_config=None,
            access_log=False, ws="none", timeout_graceful_shutdown=1, ssl_certfile=certificate,
            ssl_keyfile=key,
        )  # fmt: skip
        server = _HTTPServer(config)
        self._http.append(server)
        self._tasks.append(asyncio.create_task(server.serve(sockets=[listening])))
        bound: int = listening.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Answer what was asked, then end."""
        for server in self._http:
            server.should_exit = True
        for server in self._grpc:
            await server.stop(grace=1)
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _check_certificate(certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        text = f"tls: got {certificate} and {key}, expected PEM files of a certificate and its key"
        raise ConfigError(f"{text}: {one_line(error)}") from None


async def serve(
    place: str, startup: tuple[Any, Any], ports: Ports, on_start: Callable[[Ports], None]
) -> None:
    """Run a manager until a signal ends it.

    Args:
        place: of its records, as :func:`~hisparse.kvcm.store.open_store` takes it.
        startup: ``StorageConfig`` and ``InstanceGroup`` of managers that have neither yet.
        ports: where to listen.
        on_start: told of the ports once all listen, and the manager leads or waits.

    Raises:
        ConfigError: the store cannot be opened, a port is taken, the certificate is none, or nobody
            could log in.
    """
    node = Node(open_store(place), startup)
    server = Server(node, ports)
    running = None
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)  # A full one would take a second, and find nothing.
    try:
        bound = await server.start()
        node.name = f"{_address(ports.host)}:{bound.admin_http}_{secrets.token_hex(8)}"
        await node.campaign()
        if ports.login and node.state is not None and not has_administrator(node.state.accounts):
            text = "expected to start without it first, and addAccount"
            raise ConfigError(f"--login: got a store without an account of ROLE_ADMIN, {text}")
        running = asyncio.create_task(node.run())
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        on_start(bound)
        await ended.wait()
    except ServiceError as error:
        raise ConfigError(str(error)) from None
    finally:
        await server.stop()
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await node.step_down()
        gc.set_threshold(*thresholds)


def _address(host: str) -> str:
    """Where others reach a manager that listens at a host."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
