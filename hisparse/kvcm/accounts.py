"""Who may administrate: accounts with roles, whose passwords are kept as scrypt's hashes.

Clients log in with each call, by HTTP's basic authentication: the header, or gRPC's metadata,
``authorization: Basic <base64 of name:password>``.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Final

from hisparse.errors import quoted
from hisparse.kvcm.wire import PROTO, ServiceError

_NAME: Final = re.compile(r"[\w.@-]{1,128}", re.ASCII)
_MAX_PASSWORD: Final = 1024  # bytes
#: 16 MiB and five passes, one of OWASP's recommendations.
_COST: Final = {"n": 1 << 14, "r": 8, "p": 5}


@dataclass(frozen=True)
class Account:
    """Who may log in.

    Attributes:
        number: of its record.
        name: without ":".
        role: number of an ``AccountRole``.
        salt: hexadecimal.
        hash: of the password, hexadecimal.
    """

    number: int
    name: str
    role: int
    salt: str
    hash: str

    def record(self) -> bytes:
        """What the store keeps of it."""
        return b"A" + json.dumps(asdict(self)).encode()

    async def has(self, password: str) -> bool:
        """Whether this is its password; takes a fifth of a second."""
        found = await asyncio.to_thread(_hash, password, self.salt)
        return hmac.compare_digest(found, self.hash)


#: Takes the time of an account that there is.
_NOBODY: Final = Account(0, "", 0, "00", "")


def _hash(password: str, salt: str) -> str:
    return hashlib.scrypt(password.encode(), salt=bytes.fromhex(salt), **_COST).hex()


async def make_account(number: int, request: Any) -> Account:
    """The account that an ``AddAccountRequest`` describes.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    name, password, role = request.user_name, request.password, request.role
    if not _NAME.fullmatch(name):
        text = "up to 128 letters, digits, '.', '_', '-', '@'"
        raise ServiceError("INVALID_ARGUMENT", f"user_name: got {quoted(name)}, expected {text}")
    if not 0 < len(password.encode()) <= _MAX_PASSWORD:
        text = f"password: got {len(password.encode())} bytes, expected 1 to {_MAX_PASSWORD}"
        raise ServiceError("INVALID_ARGUMENT", text)
    if role not in PROTO.AccountRole.values():
        choices = ", ".join(PROTO.AccountRole)
        raise ServiceError("INVALID_ARGUMENT", f"role: got {role}, expected one of: {choices}")
    salt = secrets.token_hex(16)
    return Account(number, name, role, salt, await asyncio.to_thread(_hash, password, salt))


def has_administrator(accounts: dict[str, Account]) -> bool:
    """Whether one of the accounts may change something."""
    return any(x.role == PROTO.AccountRole["ROLE_ADMIN"] for x in accounts.values())


async def log_in(accounts: dict[str, Account], authorization: str) -> Account | None:
    """The account of a header; None: there is none, or it has another password."""
    scheme, _, token = authorization.partition(" ")
    try:
        name, colon, password = base64.b64decode(token, validate=True).decode().partition(":")
    except ValueError:
        return None
    if scheme.lower() != "basic" or not colon:
        return None
    account = accounts.get(name)
    is_right = await (account or _NOBODY).has(password)
    return account if is_right else None
