"""Which models may share pages: the fingerprint of a model, and the namespace of its pages."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from hisparse.algorithms import BaseSparseAlgorithm, SelectionPolicy
from hisparse.cache.serializer import FORMAT_VERSION, PageSerializer
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.storage.namespace import Namespace

#: Parts of a configuration that do not change what a model computes.
_ORIGIN: Final = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
#: The number of a layer in the name of a parameter, such as "model.layers.7.mlp.up_proj.weight".
_LAYER: Final = re.compile(r"(?:^|\.)(\d+)\.")
#: Rows of a block; heads and hidden sizes are multiples of it.
_BLOCK_ROWS: Final = 16
#: Elements of a row of a vector: front ends may join several vectors to one.
_VECTOR_ROW: Final = 16
#: Elements of a tensor that are copied to the host at a time.
_CHUNK: Final = 2**24


def model_settings(config: Any, overrides: Mapping[str, object] | None = None) -> dict[str, object]:
    """The settings of a model that differ from the defaults, the same in every front end.

    SGLang adds attributes to a configuration. So only those that the configuration's class knows
    count.

    Args:
        config: a ``PretrainedConfig`` of transformers.
        overrides: settings given in addition to the model's files. They count even if only the
            model's code knows them.
    """
    settings: dict[str, object] = config.to_diff_dict()
    known = {*settings}
    if not getattr(config, "has_no_defaults_at_init", False):
        known = {*type(config)().to_dict(), "quantization_config"}
        settings = {name: value for name, value in settings.items() if name in known}
    own = {k: v for k, v in (overrides or {}).items() if k not in known or k in _ORIGIN}
    if own:
        settings["overrides"] = own
    rope = settings.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.get("type") == rope.get("rope_type"):
        # An older name of "rope_type", which SGLang adds.
        settings["rope_parameters"] = {k: v for k, v in rope.items() if k != "type"}
    return settings


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings of a model, such as "default" and "yarn".

    Args:
        config: of the model's decoder, of transformers. Its layers may have several kinds.
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [found, *(x for x in found.values() if isinstance(x, Mapping))]
    kinds = {x.get("rope_type", x.get("type")) for x in each}
    return {kind for kind in kinds if isinstance(kind, str)}


def fingerprint(settings: Mapping[str, object], weights: Iterable[tuple[str, object]]) -> str:
    """A fingerprint of a model's configuration and weights, the same in every front end.

    SGLang joins matrices that transformers keeps apart (queries, keys and values; gate and up) and
    gives them other names. So the fingerprint of a layer is a sum over blocks of 16 rows of its
    parameters, whatever the blocks' order: matrices are joined between blocks. Rows of zeros at the
    end of a block do not count: SGLang pads vocabularies with them.

    The function reads every element, since an edit may change only a few rows of an embedding or
    one expert. It does not notice when whole blocks of one layer change places, within a parameter
    or between parameters of the same dtype and width: for example, two experts of a layer, or its
    query matrix and its output matrix. Parameters outside of layers, such as embeddings, count as
    one layer.

    A core does 5 to 14 GB a second of rows of a KiB and more (on an AMD EPYC); weights on a GPU are
    copied to the host first, which takes longer than that.

    Args:
        settings: the model's configuration. Keys that do not change what a model computes are
            ignored: where it is from, and the numbers of its special tokens.
        weights: names and values of the model's parameters, in any order; a value that two of them
            share counts once. Values that are no tensors are ignored.

    Returns:
        32 hexadecimal digits.
    """
    kept = {name: value for name, value in settings.items() if name not in _ORIGIN}
    sums: Counter[str] = Counter()
    seen: set[Tensor] = set()
    for name, value in weights:
        if not isinstance(value, Tensor) or value in seen:
            continue
        seen.add(value)
        if value.is_meta:  # Offloaded: elsewhere until its layer runs.
            sums[f"{name} {value.dtype} {list(value.shape)}"] += 1
            continue
        layer = _LAYER.search(name)
        for elements, width, block in _blocks(value.detach()):
            kind = f"{layer[1] if layer else ''} {value.dtype} {elements}"
            sums[kind] += _checksum(block, width)
    totals = sorted((kind, total % 2**128) for kind, total in sums.items() if total)
    text = json.dumps([kept, totals], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def tensor_digests(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """A text for each tensor by its name, shape, dtype and bytes, in the order of names.

    For what one front end holds and no other arranges otherwise, such as an adapter.
    """
    texts = []
    for name, value in sorted(tensors, key=lambda x: x[0]):
        data = value.detach().contiguous().cpu().view(-1).view(torch.uint8)
        digest = xxhash.xxh3_128_hexdigest(data.numpy().data)
        texts.append(f"{name} {list(value.shape)} {value.dtype} {digest}")
    return texts


def _blocks(value: Tensor) -> Iterator[tuple[int, int, memoryview]]:
    """Blocks of rows of a tensor: their number of elements a row, bytes a row, and bytes."""
    matrices: Iterable[Tensor] = (value,)
    if value.dim() > 2:
        matrices = value.reshape(-1, *value.shape[-2:])
    elif value.dim() < 2:
        vector = value.reshape(-1)
        whole = len(vector) // _VECTOR_ROW * _VECTOR_ROW
        # Each row is a matrix, since vectors are joined at fewer elements.
        matrices = (*vector[:whole].view(-1, 1, _VECTOR_ROW), vector[None, whole:])
    for matrix in matrices:
        step = max(1, _CHUNK // max(1, matrix.shape[1]) // _BLOCK_ROWS) * _BLOCK_ROWS
        for part in matrix.split(step):
            if part.numel():
                data = part.contiguous().cpu().view(torch.uint8).numpy().reshape(-1).data
                width = len(data) // len(part)
                for start in range(0, len(data), _BLOCK_ROWS * width):
                    block = data[start : start + _BLOCK_ROWS * width]
                    yield part.shape[1], width, block


def _checksum(block: memoryview, width: int) -> int:
    """Checksum of rows of ``width`` bytes without the rows of zeros at their end; 0: no others."""
    zeros = bytes(width)
    while block and block[-width:] == zeros:
        block = block[:-width]
    return xxhash.xxh3_128_intdigest(block) if block else 0


def page_namespace(
    fingerprints: Sequence[str],
    policy: SelectionPolicy,
    algorithm: BaseSparseAlgorithm,
    config: HiSparseConfig,
    serializer: PageSerializer,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> Namespace:
    """The namespace of the pages that one rank computes.

    Neither budget nor algorithm nor layout is part of it, but for models that were trained sparse:
    there the algorithm decides what a prompt attends.

    Args:
        fingerprints: of the model, one for each rank; see :func:`fingerprint`.
        policy: has the attention rule of each layer, as this front end applies it.
        serializer: bytes of a record.
        rank: which share of the heads a record has.
        num_ranks: number of shares.

    Raises:
        ConfigError: an algorithm without a ``store_version`` decides what a prompt attends.
    """
    # One front end may apply a window of the configuration that another does not read.
    rules = [(f"{x.scale:.6g}", f"{x.logit_cap:.6g}", x.window) for x in policy.layer_rules]
    texts = [*fingerprints, str(rules), *_prefill_rules(algorithm, policy, config)]
    return Namespace(
        model=xxhash.xxh3_128_hexdigest("\n".join(texts).encode()),
        kv_dtype=serializer.describe(),
        page_size=serializer.page_tokens,
        rank=rank,
        num_ranks=num_ranks,
        page_bytes=serializer.record_bytes,
        version=FORMAT_VERSION,
    )


def _prefill_rules(
    algorithm: BaseSparseAlgorithm, policy: SelectionPolicy, config: HiSparseConfig
) -> list[str]:
    """The settings that K and V of a prompt depend on."""
    if not algorithm.prefill_choices(policy):
        return []
    if algorithm.store_version is None:
        raise ConfigError(
            f"storage: got algorithm {config.algorithm}, which decides what prompts attend but has "
            "no store_version, expected one that declares it, or no storage"
        )
    sizes = (config.budget, config.num_sink_pages, config.num_recent_pages)
    return [repr(algorithm), str((algorithm.store_version, *sizes)), str(config.dense_layers)]
