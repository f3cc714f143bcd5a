"""Keys of pages: each names the tokens of its page and all tokens before them."""

from __future__ import annotations

import hashlib

import numpy as np


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
