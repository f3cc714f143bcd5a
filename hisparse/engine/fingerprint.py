"""A fingerprint of a model: K/V of one model are wrong for any other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
import xxhash

__all__ = ["fingerprint"]

#: Parts of a configuration that do not change what a model computes.
_ORIGIN = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
#: Elements of a tensor that are copied to the host at a time.
_CHUNK = 2**24


def fingerprint(settings: Mapping[str, object], weights: Iterable[tuple[str, object]]) -> str:
    """A fingerprint of a model's configuration and weights.

    The function reads every element, since an edit may change a few rows of an embedding or one
    expert alone. A core does 15 to 23 GB a second (on an AMD EPYC); weights on a GPU are
    copied to the host first, which takes longer than that.

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
        for part in value.detach().reshape(-1).split(_CHUNK):
            digest.update(part.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
