"""Keys of blocks from token ids, for engines that send tokens.

Every key depends on all tokens before it, so equal keys mean equal prefixes.
"""

from collections.abc import Iterable

_SALT = 0x9E3779B97F4A7C15
_LOW = (1 << 64) - 1
_SIGN = 1 << 63
_HIGH_HALF = 0xFFFFFFFF << 32


def block_keys(token_ids: Iterable[int], block_size: int) -> list[int]:
    """One key for each whole block of tokens.

    Args:
        token_ids: signed 64-bit numbers.
        block_size: tokens of a block, at least 1.

    Returns:
        Signed 64-bit keys; tokens after the last whole block have none.
    """
    keys = []
    state, left = 0, block_size
    for token in token_ids:
        # The shift to the right keeps the sign.
        high = state >> 32 | _HIGH_HALF if state & _SIGN else state >> 32
        state ^= (token + _SALT + (state << 12) + high) & _LOW
        left -= 1
        if not left:
            keys.append(state - (1 << 64) if state & _SIGN else state)
            left = block_size
    return keys
