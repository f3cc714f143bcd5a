"""The messages of all services and their JSON form.

``kvcm.proto`` is compiled when this module is imported, in some milliseconds: no generated code has
to match the installed protobuf.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

_FOLDER: Final = Path(__file__).parent
_PACKAGE: Final = "kv_cache_manager.proto"
#: Fields that may hold a million numbers: json_format takes 2 us for each.
_LONG: Final = ("block_keys", "token_ids")


class ServiceError(Exception):
    """A request that gets an error.

    Args:
        code: name of an ``ErrorCode``.
        message: one line.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Method:
    """One method of a service.

    Attributes:
        service: ``"meta"``, ``"admin"`` or ``"debug"``.
        name: such as ``"StartWriteCache"``.
        request: class of its request.
        response: class of its response.
    """

    service: str
    name: str
    request: Any
    response: Any

    @property
    def grpc_service(self) -> str:
        """Full name of the service: ``"kv_cache_manager.proto.meta.MetaService"``."""
        return f"{_PACKAGE}.{self.service}.{self.service.capitalize()}Service"

    @property
    def http_path(self) -> str:
        """Path of the HTTP request: ``"/api/startWriteCache"``."""
        return f"/api/{self.name[0].lower()}{self.name[1:]}"


def _load() -> tuple[SimpleNamespace, dict[str, tuple[Method, ...]]]:
    """Message classes and enums (name to number), and the methods of each service."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "descriptors")
        if protoc.main(["", f"-I{_FOLDER}", f"--descriptor_set_out={out}", "kvcm.proto"]):
            raise RuntimeError("protoc failed; its message is above")
        (description,) = FileDescriptorSet.FromString(out.read_bytes()).file
    pool = DescriptorPool()  # Upstream's modules may be loaded too: theirs is the default pool.
    pool.Add(description)
    file = pool.FindFileByName("kvcm.proto")
    found: dict[str, Any] = {
        key: GetMessageClass(message) for key, message in file.message_types_by_name.items()
    }
    for key, enum in file.enum_types_by_name.items():
        found[key] = {value.name: value.number for value in enum.values}
    methods = {}
    for key, service in file.services_by_name.items():
        name = key.removesuffix("Service").lower()
        methods[name] = tuple(
            Method(name, x.name, found[x.input_type.name], found[x.output_type.name])
            for x in service.methods
        )
    return SimpleNamespace(**found), methods


PROTO, METHODS = _load()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"got {name}, expected JSON")


def read_json(body: bytes | str, message: Any) -> None:
    """Read a request.

    Args:
        body: a JSON object. Names may be snake_case or lowerCamel; unknown ones are ignored.
        message: an empty message, to fill.

    Raises:
        ValueError: the body is not JSON, or does not fit the message.
    """
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
        if not isinstance(fields, dict):
            raise ValueError(f"got {type(fields).__name__}, expected a JSON object")
        for name in _LONG:
            values = fields.get(name)
            if type(values) is list and set(map(type, values)) == {int} and hasattr(message, name):
                getattr(message, name).extend(values)
                del fields[name]
        json_format.ParseDict(fields, message, ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.Error) as error:
        raise ValueError(f"request: {error}") from None


def write_json(message: Any) -> bytes:
    """Write a response: snake_case, defaults printed, 64-bit numbers as strings, enums as names."""
    fields = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
