"""Identifies K and V of a server: the model's fingerprint, the namespace, LoRA adapters."""

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor

from hisparse.cache.serializer import PageSerializer
from hisparse.model_config import rotary_frequencies, text_config
from hisparse.sglang.features.storage.calls import StorageCounters
from hisparse.sglang.ranks import LinkerRanks
from hisparse.sglang.session import ServerSession
from hisparse.storage import Namespace
from hisparse.storage.fingerprint import fingerprint, page_namespace, tensor_digests

logger = logging.getLogger("hisparse")

#: Cosines and sines may differ by so much: SGLang keeps some tables in bfloat16.
_TOLERANCE: Final = 0.01
#: Relative differences of angles of about 1, of tables in float32 and in fewer bits.
_ANGLES: Final = (1e-3, 0.01)
#: The last row that is compared: further on, rounded frequencies tell.
_LAST_ROW: Final = 4096
#: The number of a layer in the name of a module.
_LAYER: Final = re.compile(r"\.(\d+)\.")
#: Rows of an unexpected table that tell it from others. Tables grow while a server runs.
_TABLE_ROWS: Final = 64


@dataclass(kw_only=True)
class StorageState:
    """The state of one rank.

    Attributes:
        model: SGLang's model.
        model_config: the model's configuration, of transformers.
        model_settings: its settings that differ from defaults.
        counters: of what the storage does.
        adapter_key: takes SGLang's id of a LoRA adapter; the adapter's name in keys of pages.
        swap_out: takes SGLang's ``Req`` of a request that is retracted; None: nothing is kept.
        rests: whether the storage is not used: until a flush of all ranks, since the pages in host
            memory may be of other weights.
        fingerprint: of the model, taken at its last flush; "": an update began since.
        weight_updater: SGLang's manager of updates; None: none has begun.
    """

    model: Any
    model_config: Any
    model_settings: Mapping[str, object]
    counters: StorageCounters = field(default_factory=StorageCounters)
    adapter_key: Callable[[str], str] | None = None
    swap_out: Callable[[Any], None] | None = None
    rests: bool = True
    fingerprint: str = ""
    weight_updater: Any = None

    def note_update(self, updater: Any) -> None:
        """Let the storage rest until a flush: host memory has K and V of the old weights.

        Args:
            updater: SGLang's ``SchedulerWeightUpdaterManager``, whose update begins, goes on or
                ends. It may fail midway, and weights may come by RDMA until it ends.
        """
        if self.fingerprint:
            logger.warning(
                "hisparse: storage: an update of the weights began; the store is not used until a "
                "flush after its end (/flush_cache, unless the update flushes itself)"
            )
        self.rests, self.fingerprint, self.weight_updater = True, "", updater

    @property
    def update_is_open(self) -> bool:
        """Whether SGLang waits for more weights: from ``begin`` to ``end_weight_update``."""
        return self.weight_updater is not None and self.weight_updater._session is not None


def model_fingerprint(state: StorageState) -> str:
    """The fingerprint of this rank's model with the weights that it has now."""
    # Other buffers follow from the configuration, and SGLang extends some while it serves.
    settings = dict(state.model_settings)
    if other_ropes := rope_differences(state.model, state.model_config):
        settings["rotary tables"] = other_ropes
    return fingerprint(settings, state.model.named_parameters())


def make_namespace(
    session: ServerSession, model: str, serializer: PageSerializer, ranks: LinkerRanks
) -> Namespace:
    """The namespace of this rank's pages; see :func:`page_namespace`.

    Args:
        model: fingerprint of this rank's model.
        serializer: bytes of a record.
    """
    rank, num_ranks = ranks.key
    return page_namespace(
        ranks.gather(model),
        session.setup.policy,
        session.setup.algorithm,
        session.setup.resolved.config,
        serializer,
        rank=rank,
        num_ranks=num_ranks,
    )


class AdapterKeys:
    """Names LoRA adapters by their content, in place of SGLang's ids.

    SGLang's ids of adapters of the command line say a name and a path, which stay the same when the
    adapter is trained anew; those of adapters loaded over HTTP are random.

    Args:
        manager: SGLang's ``LoRAManager``; None: the server has no adapters.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def key(self, lora_id: str) -> str:
        """32 hexadecimal digits for the content of a loaded adapter."""
        adapter = None if self._manager is None else self._manager.loras.get(lora_id)
        if adapter is None:
            # SGLang has loaded it before it takes requests for it. Otherwise no page may be shared.
            logger.warning(
                "hisparse: storage: adapter %s is not loaded; no page is shared", lora_id
            )
            return secrets.token_hex(16)
        if adapter not in self._known:
            config = adapter.config
            texts = [
                # SGLang leaves out what the server was not started for.
                str(sorted(self._manager.target_modules)),
                json.dumps([config.hf_config, config.added_tokens_config], sort_keys=True),
                repr(adapter.scaling),
                *tensor_digests(_adapter_weights(adapter)),
            ]
            self._known[adapter] = xxhash.xxh3_128_hexdigest("\n".join(texts).encode())
        return self._known[adapter]


def _adapter_weights(adapter: Any) -> Iterator[tuple[str, Tensor]]:
    for layer in adapter.layers:
        yield from layer.weights.items()
    yield from adapter.embedding_layers.items()
    yield from adapter.added_tokens_embeddings.items()


def rope_differences(model: Any, config: Any) -> list[str]:
    """Rotary embeddings of a model that differ from those of transformers for its configuration.

    SGLang does not read every setting of a rotary embedding.

    Args:
        config: its configuration, of transformers.

    Returns:
        A text for each layer with another table, or that rotates in another order of channels;
        usually none. Layers without a table of SGLang's are left out.
    """
    text, expected = text_config(config), dict(rotary_frequencies(config))
    types = getattr(text, "layer_types", None) or ()
    found, seen = [], {}
    for name, module in model.named_modules(remove_duplicate=False):
        table = getattr(module, "cos_sin_cache", None)
        if not isinstance(table, Tensor):
            continue
        layer = int(match[1]) if (match := _LAYER.search(name)) else 0
        kind = types[layer] if None not in expected and layer < len(types) else None
        if (id(module), kind) not in seen:
            rope = expected.get(kind)
            is_neox = getattr(module, "is_neox_style", True)
            (digest,) = tensor_digests([(type(module).__name__, table[:_TABLE_ROWS])])
            agrees = is_neox and rope is not None and _agrees(table, *rope)
            seen[id(module), kind] = "" if agrees else f"{is_neox} {digest}"
        if other := seen[id(module), kind]:
            found.append(f"{layer} {other}")
    return found


def _agrees(table: Tensor, frequencies: Tensor, scaling: float) -> bool:
    """Whether a table ``[positions, 2 * n]`` of cosines and sines has these ``[n]`` frequencies."""
    if table.dim() != 2 or table.shape[1] != 2 * len(frequencies):
        return False
    cos, sin = table.chunk(2, dim=1)
    frequencies = frequencies.float().cpu()
    last = min(len(table) - 1, _LAST_ROW)
    rows = torch.tensor([2**i for i in range(last.bit_length())] or [0])
    angles = rows[:, None] * frequencies
    for part, function in ((cos, torch.cos), (sin, torch.sin)):
        got = part[rows.to(part.device)].float().cpu()
        if not torch.allclose(got, function(angles) * scaling, rtol=0, atol=_TOLERANCE * scaling):
            return False
    # Low frequencies: where an angle is about 1, as far as the table goes.
    far = (1.0 / frequencies).clamp(1, len(table) - 1).long()
    columns = torch.arange(len(frequencies))
    real, imaginary = (x[far.to(x.device), columns.to(x.device)].float().cpu() for x in (cos, sin))
    relative = _ANGLES[table.dtype.itemsize < 4]
    return torch.allclose(torch.atan2(imaginary, real), far * frequencies, rtol=relative, atol=1e-6)
