"""A fingerprint of a model: K/V of one model are wrong for any other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
import xxhash

__all__ = ["fingerprint"]

#: Parts of a configuration that do not change what a model computes.
_ORIGIN = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
#: Runs of elements that are read of each tensor, and the length of each.
_RUNS, _RUN_LENGTH = 16, 256


def fingerprint(settings: Mapping[str, object], weights: Iterable[tuple[str, object]]) -> str:
    """A fingerprint of a model's configuration and weights.

    The function reads up to 4,096 elements of each tensor in 16 evenly spaced runs: all weights of
    a small layer, and enough of a large one, since training changes elements everywhere. Reading
    every element would take as long as reading a long context from its file. Two models with the
    same fingerprint can differ only in elements that fall between the runs of every tensor.

    Args:
        settings: the model's configuration. Keys that only say where the model is from are
            ignored.
        weights: names and values of the model's state, in an order that does not vary. Values that
            are no tensors are ignored.

    Returns:
        32 hexadecimal digits.
    """
    kept = {name: value for name, value in settings.items() if name not in _ORIGIN}
    digest = xxhash.xxh3_128(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, value in weights:
        if not isinstance(value, torch.Tensor):
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        if value.is_meta:  # Offloaded: elsewhere until its layer runs.
            continue
        flat = value.detach().reshape(-1)
        if flat.numel() > _RUNS * _RUN_LENGTH:
            flat = flat[: flat.numel() // _RUNS * _RUNS].view(_RUNS, -1)[:, :_RUN_LENGTH]
        digest.update(flat.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
