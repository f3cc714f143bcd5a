"""What pages must have in common to be exchanged, and their keys."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np
import xxhash

from hisparse.errors import ConfigError, quoted
from hisparse.options import from_options, parse_object

_KEY: Final = re.compile(r"[0-9a-fA-F]{2,128}")
_MAX_TEXT: Final = 256
#: The system moves less than 2 GiB in a call.
MAX_PAGE_BYTES: Final = 1 << 30


def page_keys(token_ids: np.ndarray, page_tokens: int) -> list[str]:
    """Keys of the whole pages of a sequence, in order.

    A key is SHA-256 of the key before and of the page's tokens, 32 bits each, least byte first.
    These are the keys of SGLang's radix cache for requests without an adapter or a salt.

    Args:
        token_ids: ``[n]``, integers of 0 to 2^32 - 1.
        page_tokens: tokens of a page.

    Returns:
        A key of 64 hexadecimal digits for each whole page.
    """
    data = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    size, before, keys = 4 * page_tokens, b"", []
    for start in range(0, len(data) - size + 1, size):
        before = hashlib.sha256(before + data[start : start + size]).digest()
        keys.append(before.hex())
    return keys


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What pages must have in common to be exchanged.

    Nothing here says how a server lays out its memory, so that servers with other layouts, budgets
    and algorithms exchange pages.

    Attributes:
        model: fingerprint of the weights and of all that changes K and V; 1 to 256 ASCII
            characters.
        kv_dtype: of K and V, such as "bfloat16" or "fp8_e4m3"; 1 to 256 ASCII characters.
        page_size: tokens of a page.
        rank: which share of the heads or layers a page holds, from 0.
        num_ranks: into how many shares the model is divided.
        page_bytes: bytes of a page, less than 1 GiB.
        version: of the arrangement of bytes in a page, which the writer defines.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    kv_dtype: str
    page_size: int
    rank: int
    num_ranks: int
    page_bytes: int
    version: int = 1

    def __post_init__(self) -> None:
        for name in ("model", "kv_dtype"):
            text = getattr(self, name)
            if not 0 < len(text) <= _MAX_TEXT or not (text.isascii() and text.isprintable()):
                expected = f"1 to {_MAX_TEXT} printable ASCII characters"
                raise ConfigError(f"namespace: {name}: got {quoted(text)}, expected {expected}")
        for name, value, low, high in (
            ("page_size", self.page_size, 1, 2**31),
            ("num_ranks", self.num_ranks, 1, 2**31),
            ("rank", self.rank, 0, self.num_ranks),
            ("version", self.version, 0, 2**31),
            ("page_bytes", self.page_bytes, 1, MAX_PAGE_BYTES),
        ):
            if not low <= value < high:
                expected = f"{low:,} to {high - 1:,}"
                raise ConfigError(f"namespace: {name}: got {quoted(value)}, expected {expected}")

    @cached_property
    def text(self) -> str:
        """Canonical JSON: equal namespaces have the same text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def key(self) -> str:
        """32 hexadecimal digits: xxh3_128 of :attr:`text`."""
        return xxhash.xxh3_128_hexdigest(self.text.encode())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read :attr:`text`.

        Raises:
            ConfigError: it is no such text.
        """
        found = parse_object(text, "namespace", '{"model": "...", ...}')
        return from_options(cls, "namespace", "namespace", found)


def check_key(key: str) -> str:
    """The key of a page in lower case.

    Raises:
        ConfigError: the key is malformed.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key) or len(key) % 2:
        expected = "2 to 128 hexadecimal digits, an even number"
        raise ConfigError(f"key: got {quoted(key)}, expected {expected}")
    return key.lower()
