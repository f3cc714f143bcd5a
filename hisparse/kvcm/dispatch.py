"""Asks for the account of a request, calls its method's function, and makes its error a status."""

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from hisparse.errors import one_line, quoted
from hisparse.kvcm.accounts import Account, log_in
from hisparse.kvcm.election import Node
from hisparse.kvcm.services import AdminService, MetaService
from hisparse.kvcm.store import LostStoreError
from hisparse.kvcm.wire import PROTO, Method, ServiceError

_LOG: Final = logging.getLogger(__name__)
#: Methods that each manager answers, also if another one leads.
_ANY_NODE: Final = {
    "CheckHealth", "GetMetrics", "GetManagerClusterInfo", "LeaderDemote", "GetLeaderElectorConfig",
    "UpdateLeaderElectorConfig", "UpdateLogger", "InjectFault", "RemoveFault", "ClearFaults",
}  # fmt: skip
#: Codes that AdminService has; others are INTERNAL_ERROR there, as clients expect.
_ADMIN_CODES: Final = {"OK", "UNSUPPORTED", "INVALID_ARGUMENT", "SERVER_NOT_LEADER"}
#: Names of methods that change nothing begin so: any account may call them.
_READS: Final = ("Get", "List", "Check")
_ADMIN: Final = PROTO.AccountRole["ROLE_ADMIN"]
#: Methods that can be told to fail.
_FAULTY: Final = ("GetCacheLocation", "StartWriteCache", "FinishWriteCache")

#: Passwords that wait to be hashed, a fifth of a second each; more are refused.
_MOST_GUESSES: Final = 8
#: See :meth:`Gate.refuse`.
WAITS: Final = -1

Call = Callable[..., Awaitable[Any]]


class DebugService:
    """Lets methods fail, for tests of their clients."""

    def __init__(self) -> None:
        #: By method: the call that fails, as its trace_id ends; None: each.
        self._faults: dict[str, int | None] = {}

    def check(self, name: str, trace_id: str) -> None:
        """Raise INTERNAL_ERROR if this call is to fail."""
        if name in self._faults:
            call = self._faults[name]
            if call is None or trace_id.rpartition("_")[2] == str(call):
                raise ServiceError("INTERNAL_ERROR", f"{name}: got an injected fault, expected it")

    async def inject_fault(self, request: Any, response: Any) -> None:
        once = request.fault_trigger_strategy == PROTO.FaultTriggerStrategy["ONCE"]
        self._faults[_faulty(request.api_name)] = request.trigger_at_call if once else None

    async def remove_fault(self, request: Any, response: Any) -> None:
        self._faults.pop(_faulty(request.api_name), None)

    async def clear_faults(self, request: Any, response: Any) -> None:
        self._faults.clear()


def _faulty(name: str) -> str:
    if name not in _FAULTY:
        choices = ", ".join(_FAULTY)
        text = f"api_name: got {quoted(name)}, expected one of: {choices}"
        raise ServiceError("INVALID_ARGUMENT", text)
    return name


class Gate:
    """Asks administrators for their account."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._hashing = asyncio.Lock()  # Guesses wait for each other, some of them.
        self._waiting = 0
        #: Accounts that logged in, by a hash of what they sent.
        self._known: dict[bytes, Account] = {}
        self._key = secrets.token_bytes(32)

    async def refuse(self, method: str, authorization: str) -> int:
        """Whether a call is refused.

        Args:
            method: such as ``"AddStorage"``.
            authorization: the header; "" for none.

        Returns:
            0: it is not; 401: who calls is unknown; 403: the role does not suffice; 429: too many
            ask at once; :data:`WAITS`: this manager does not lead, and the leader has the accounts.
        """
        reads = method.startswith(_READS)
        state = self._node.state
        if state is None:
            return 0 if reads and method in _ANY_NODE else WAITS
        digest = hashlib.blake2b(authorization.encode(), key=self._key).digest()
        account = self._known.get(digest)
        if account is None or state.accounts.get(account.name) is not account:
            self._known.pop(digest, None)
            if self._waiting == _MOST_GUESSES:
                return 429
            self._waiting += 1
            try:
                async with self._hashing:
                    account = await log_in(state.accounts, authorization)
            finally:
                self._waiting -= 1
            if account is None:
                return 401
            if len(self._known) > len(state.accounts):  # Of accounts that changed.
                self._known.clear()
            self._known[digest] = account
        return 0 if reads or account.role == _ADMIN else 403


class Dispatcher:
    """Calls the functions of all services."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._debug = DebugService()
        self._services = {
            "meta": MetaService(node), "admin": AdminService(node), "debug": self._debug,
        }  # fmt: skip

    def bind(self, method: Method) -> Call:
        """A function from a request to its response, which never raises.

        What has begun goes on when the client is gone: the state and the store stay alike.
        """
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
        function = getattr(self._services[method.service], name)
        running = self._node.running

        async def call(request: Any, *, waits: bool = False) -> Any:
            task = asyncio.create_task(self._call(method, function, request, waits))
            running.add(task)
            task.add_done_callback(running.discard)
            return await asyncio.shield(task)

        return call

    async def _call(self, method: Method, function: Any, request: Any, waits: bool) -> Any:
        begin = time.perf_counter()
        response = method.response()
        trace_id = getattr(request, "trace_id", "")  # DebugService has none.
        code, message = "OK", ""
        try:
            if waits:  # It may lead since: who calls was not asked.
                raise self._node.not_leader()
            if method.name not in _ANY_NODE:
                self._node.check()
            self._debug.check(method.name, trace_id)
            await function(request, response)
        except ServiceError as error:
            code, message = error.code, str(error)
        except LostStoreError as error:
            code, message = "SERVER_NOT_LEADER", str(error)
        except OSError as error:
            code, message = "INTERNAL_ERROR", one_line(error)
        except Exception as error:
            _LOG.exception("%s failed", method.name)
            code, message = "INTERNAL_ERROR", one_line(error)
        if method.service == "admin" and code not in _ADMIN_CODES:
            code = "INTERNAL_ERROR"
        if code != "OK":
            response = method.response()
        header = response.header
        header.status.code = PROTO.ErrorCode[code]
        header.status.message = message
        if method.service == "meta":
            header.tracer_result = ""
        header.request_id = f"{trace_id}_{time.time_ns() // 1000}"
        counters = self._node.counters
        counters["service.query_counter", method.name] += 1
        counters["service.error_counter", method.name] += code != "OK"
        self._node.gauges["service.query_rt_us", method.name] = (time.perf_counter() - begin) * 1e6
        return response
