"""Both services over gRPC and HTTP, and the work in the background.

One thread runs all requests, so each sees and changes the state as if it were alone until it waits
for the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse.errors import ConfigError, one_line
from hisparse.kvcm.blocks import delete_due, expire_sessions
from hisparse.kvcm.reclaim import reclaim
from hisparse.kvcm.registry import Registry
from hisparse.kvcm.services import AdminService, MetaService
from hisparse.kvcm.state import Group, State, restore
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.store import open_store
from hisparse.kvcm.wire import (
    METHODS,
    Method,
    ServiceError,
    read_json,
    write_json,
)

_LOG: Final = logging.getLogger(__name__)
#: Bytes of a request. Its lists have limits of their own.
MAX_BODY: Final = 32 << 20
#: Bytes of a JSON body that is read, or blocks of a response that is written, in a thread.
_LARGE_BODY, _LARGE_RESPONSE = 1 << 16, 256
#: Seconds between two looks for work in the background.
_PERIOD_S: Final = 0.05
_ANY_NODE: Final = {"CheckHealth", "GetMetrics"}  # Methods that ask no store.
#: Codes that AdminService has; others are INTERNAL_ERROR there, as clients expect.
_ADMIN_CODES: Final = {"OK", "UNSUPPORTED", "INVALID_ARGUMENT", "SERVER_NOT_LEADER"}

Call = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True)
class Ports:
    """Where the services listen; a service may share a port with the other one.

    Attributes:
        host: name or address.
        rpc: gRPC of MetaService; 0: any that is free.
        http: HTTP of MetaService.
        admin_rpc: gRPC of AdminService.
        admin_http: HTTP of AdminService.
    """

    host: str = "127.0.0.1"
    rpc: int = 6381
    http: int = 6382
    admin_rpc: int = 6491
    admin_http: int = 6492


class Dispatcher:
    """Calls the functions of both services.

    Args:
        state: of the manager.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._running: set[asyncio.Task[Any]] = set()
        registry = Registry(state)
        self._services = {
            "meta": MetaService(state, registry),
            "admin": AdminService(state, registry),
        }

    def bind(self, method: Method) -> Call:
        """A function from a request to its response, which never raises.

        What has begun goes on when the client is gone: the state and the store stay alike.
        """
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
        function = getattr(self._services[method.service], name, None)

        async def call(request: Any) -> Any:
            task = asyncio.create_task(self._call(method, function, request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await asyncio.shield(task)

        return call

    async def drain(self) -> None:
        """Return when no request runs."""
        while self._running:
            await asyncio.wait(self._running)

    async def _call(self, method: Method, function: Any, request: Any) -> Any:
        begin = time.perf_counter()
        response = method.response()
        code, message = "OK", ""
        try:
            if (lost := self._state.writer.lost) and method.name not in _ANY_NODE:
                raise ServiceError("SERVER_NOT_LEADER", lost)
            if function is None:
                raise ServiceError("UNSUPPORTED", f"{method.name}: expected a method that is built")
            await function(request, response)
        except ServiceError as error:
            code, message = error.code, str(error)
        except OSError as error:
            code, message = "INTERNAL_ERROR", one_line(error)
        except Exception as error:
            _LOG.exception("%s failed", method.name)
            code, message = "INTERNAL_ERROR", one_line(error)
        if method.service == "admin" and code not in _ADMIN_CODES:
            code = "INTERNAL_ERROR"
        if code != "OK":
            response = method.response()
        status = response.header.status
        status.code = status.DESCRIPTOR.fields_by_name["code"].enum_type.values_by_name[code].number
        status.message = message
        if method.service == "meta":
            response.header.tracer_result = ""
        response.header.request_id = f"{request.trace_id}_{time.time_ns() // 1000}"
        self._count(method.name, code, (time.perf_counter() - begin) * 1e6)
        return response

    def _count(self, name: str, code: str, microseconds: float) -> None:
        counters = self._state.counters
        counters["service.query_counter", name] += 1
        counters["service.error_counter", name] += code != "OK"
        self._state.gauges["service.query_rt_us", name] = microseconds


def _http_app(calls: dict[str, tuple[Method, Call]]) -> Starlette:
    """The application of a port.

    Args:
        calls: by path.
    """

    async def answer(request: Request) -> Response:
        method, call = calls[request.url.path]
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
        response = await call(message)
        if len(getattr(response, "locations", ())) < _LARGE_RESPONSE:
            return _json(200, write_json(response))
        return _json(200, await asyncio.to_thread(write_json, response))

    return Starlette(routes=[Route(path, answer, methods=["POST"]) for path in calls])


def _json(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")


class _HTTPServer(uvicorn.Server):
    """Leaves signals to this process: there are several servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _grpc_handlers(calls: dict[str, tuple[Method, Call]]) -> Any:
    """The handler of one service.

    Args:
        calls: by name of the method.
    """

    def handler(method: Method, call: Call) -> Any:
        async def answer(request: Any, _: Any) -> Any:
            return await call(request)

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
        state: of the manager.
        ports: where to listen.
    """

    def __init__(self, state: State, ports: Ports) -> None:
        self._state = state
        self._ports = ports
        self._grpc: list[Any] = []
        self._http: list[uvicorn.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._dispatcher = dispatcher = Dispatcher(state)
        self._calls = {
            service: [(method, dispatcher.bind(method)) for method in methods]
            for service, methods in METHODS.items()
        }

    async def start(self) -> Ports:
        """Listen, and begin the work in the background.

        Returns:
            The ports; those that were 0 have a number.

        Raises:
            ConfigError: a port is taken.
        """
        ports, found = self._ports, dict[str, int]()
        for port, services in _share(ports.rpc, ports.admin_rpc):
            bound = await self._start_grpc(port, services)
            found |= {f"{service}_rpc": bound for service in services}
        for port, services in _share(ports.http, ports.admin_http):
            bound = await self._start_http(port, services)
            found |= {f"{service}_http": bound for service in services}
        for work in (expire_sessions, delete_due, reclaim):
            self._tasks.append(asyncio.create_task(_repeat(work, self._state)))
        return Ports(
            ports.host, found["meta_rpc"], found["meta_http"], found["admin_rpc"],
            found["admin_http"],
        )  # fmt: skip

    async def _start_grpc(self, port: int, services: tuple[str, ...]) -> int:
        options = [("grpc.max_receive_message_length", MAX_BODY), ("grpc.so_reuseport", 0),
                   ("grpc.max_send_message_length", -1)]  # fmt: skip
        server = grpc.aio.server(options=options)
        for service in services:
            handler = _grpc_handlers({x.name: (x, call) for x, call in self._calls[service]})
            server.add_generic_rpc_handlers((handler,))
        host = self._ports.host
        try:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            bound: int = server.add_insecure_port(address)
        except RuntimeError as error:
            raise _port_error(host, port, error) from None
        await server.start()
        self._grpc.append(server)
        return bound

    async def _start_http(self, port: int, services: tuple[str, ...]) -> int:
        calls: dict[str, tuple[Method, Call]] = {}
        for service in reversed(services):
            calls |= {method.http_path: (method, call) for method, call in self._calls[service]}
        listening = _listen(self._ports.host, port)
        config = uvicorn.Config(
            _http_app(calls), lifespan="off", log_config=None, access_log=False, ws="none",
            timeout_graceful_shutdown=1,
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
        serving, working = self._tasks[: len(self._http)], self._tasks[len(self._http) :]
        await asyncio.gather(*serving, return_exceptions=True)
        await self._dispatcher.drain()
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


async def _repeat(work: Callable[[State], Awaitable[None]], state: State) -> None:
    while True:
        try:
            await work(state)
        except OSError as error:
            _LOG.error("%s: %s", work.__name__, one_line(error))
        except Exception:
            _LOG.exception("%s failed", work.__name__)
        await asyncio.sleep(_PERIOD_S)


def _has(state: State, storage: Any, config: Any) -> bool:
    """Whether a restored state has this configuration."""
    known, group = state.storages.get(storage.global_unique_name), state.groups.get(config.name)
    return bool(known and group and known.config == storage and group.config == config)


async def serve(
    place: str, startup: tuple[Any, Any], ports: Ports, on_start: Callable[[Ports], None]
) -> None:
    """Run a manager until a signal ends it.

    Args:
        place: of its records, as :func:`~hisparse.kvcm.store.open_store` takes it.
        startup: ``StorageConfig`` and ``InstanceGroup`` of a manager that has neither yet.
        ports: where to listen.
        on_start: told of the ports once all listen.

    Raises:
        ConfigError: the store cannot be opened, or a port is taken.
    """
    with _few_collections():
        state = restore(open_store(place))
        gc.freeze()
        await _serve(state, startup, ports, on_start)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Millions of blocks in no cycle: a full collection would take a second."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


async def _serve(
    state: State, startup: tuple[Any, Any], ports: Ports, on_start: Callable[[Ports], None]
) -> None:
    server = Server(state, ports)
    try:
        if not state.storages and not state.groups:
            storage, config = startup
            found = Storage(state.new_number(), storage, True)
            group = Group(state.new_number(), config)
            await state.writer.write({found.number: found.record(), group.number: group.record()})
            state.storages[found.name], state.groups[config.name] = found, group
        elif not _has(state, *startup):
            text = "the store has other storages or groups than the command line says; they count"
            print(f"kvcm: {text}", file=sys.stderr)
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        on_start(await server.start())
        await ended.wait()
    except ServiceError as error:
        raise ConfigError(str(error)) from None
    finally:
        await server.stop()
        state.writer.close()
