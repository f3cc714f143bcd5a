"""Nodes that SGLang fills a tree of drafts up with."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["drop_fillers", "find_fillers"]

#: Token of a filler, and one that no model generates.
_FILLER, _NONE = 0, -1


def find_fillers(parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """``[B, n] bool``, leaves at node 0 with token 0.

    A draft of token 0 looks the same. It is rejected then, and the model generates the token.

    Args:
        parents: ``[B, n]``, parent of each node.
        tokens: ``[B, n]``, token ids.
    """
    has_child = (parents[:, :, None] == np.arange(parents.shape[1])).any(1)
    fillers: np.ndarray = (parents == 0) & (tokens == _FILLER) & ~has_child
    return fillers


def drop_fillers(drafts: Any, parents: np.ndarray) -> Tensor:
    """Let SGLang accept no filler: the model would have to attend for each of them.

    Args:
        drafts: SGLang's ``NgramVerifyInput``; the tokens that it compares are replaced.
        parents: ``[B, n]``, parent of each node.

    Returns:
        ``[B, n]``, token ids, -1 for fillers.
    """
    tokens: Tensor = drafts.draft_token.view(parents.shape).clone()
    tokens.numpy()[find_fillers(parents, tokens.numpy())] = _NONE
    # The model's input is another reference to the old tensor.
    drafts.draft_token = tokens.flatten()
    return tokens
