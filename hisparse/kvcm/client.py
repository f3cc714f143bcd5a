"""Calls a manager by gRPC: this one, or any other of the same interface."""

from __future__ import annotations

from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from hisparse.errors import HiSparseError, quoted
from hisparse.kvcm.wire import METHODS, PROTO

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A manager that is started again is found soon.
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_METHODS: Final = {method.name: method for method in METHODS["meta"]}
_CODES: Final = {number: name for name, number in PROTO.ErrorCode.items()}
#: After these another manager may answer.
_ELSEWHERE: Final = ("UNAVAILABLE", "SERVER_NOT_LEADER", "DEADLINE_EXCEEDED")


class ManagerError(HiSparseError):
    """A manager does not answer, or not as expected.

    Args:
        code: of gRPC, or of the manager; "": its answer makes no sense.
        message: one line.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ManagerClient:
    """Calls methods of MetaService. Any thread may call it.

    Args:
        addresses: "HOST:PORT" of its gRPC, with "tls://" before it if that is encrypted; or several
            with commas, of managers of which one leads.
        timeout_s: time limit of a call.
    """

    def __init__(self, addresses: str, timeout_s: float) -> None:
        self._addresses = [address.strip() for address in addresses.split(",")]
        self._channels = list(map(_channel, self._addresses))
        self._timeout_s, self._leader = timeout_s, 0

    def call(self, name: str, **fields: Any) -> Any:
        """The response of a method.

        Args:
            name: such as "GetCacheLocation".
            fields: of its request.

        Raises:
            ManagerError: no manager answers, or one answers an error.
        """
        for left in reversed(range(len(self._channels))):
            at = self._leader
            try:
                return self._call(at, name, fields)
            except ManagerError as error:
                if error.code not in _ELSEWHERE:
                    raise
                self._leader = (at + 1) % len(self._channels)
                # One that hangs took all the time that the call had.
                if not left or error.code == "DEADLINE_EXCEEDED":
                    raise
        raise AssertionError("there is an address")

    def _call(self, at: int, name: str, fields: dict[str, Any]) -> Any:
        method = _METHODS[name]
        path = f"/{method.grpc_service}/{name}"
        try:
            call = self._channels[at].unary_unary(path)
            answer = call(method.request(**fields).SerializeToString(), timeout=self._timeout_s)
            response = method.response.FromString(answer)
        except grpc.RpcError as error:
            code, text = error.code().name, error.details()
        except DecodeError as error:
            code, text = "", f"{len(answer)} bytes: {error}"
        else:
            status = response.header.status
            if status.code == PROTO.ErrorCode["OK"]:
                return response
            code, text = _CODES.get(status.code, ""), status.message
        got = f"{code or 'nonsense'} ({quoted(text)})"
        raise ManagerError(code, f"manager {self._addresses[at]}: {name}: got {got}, expected OK")

    def close(self) -> None:
        """Let go of the connections."""
        for channel in self._channels:
            channel.close()


def _channel(address: str) -> Any:
    """A connection. gRPC reads the certificates that it trusts from its own settings."""
    host = address.removeprefix("tls://")
    if host == address:
        return grpc.insecure_channel(host, options=_OPTIONS)
    return grpc.secure_channel(host, grpc.ssl_channel_credentials(), options=_OPTIONS)
