"""Options and model shapes that the kernel benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import torch

from hisparse.errors import ConfigError, unknown_name
from hisparse.options import meanings
from hisparse.types import KVSpec

#: Metadata of a field that no flag sets.
NO_FLAG = {"flag": False}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a kernel benchmark.

    Attributes:
        device: device of the kernels.
        num_steps: timed steps of each implementation.
        seed: seed of the inputs.
    """

    device: torch.device
    num_steps: int
    seed: int = 0


def flags_of(bench: type[Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """The flags of a benchmark, a dataclass: name, type, default and meaning of each."""
    hints, texts = get_type_hints(bench), meanings(bench)
    for each in fields(bench):
        if each.metadata != NO_FLAG:
            meaning = texts[each.name].rstrip(".").replace("``", "")
            yield each.name.replace("_", "-"), hints[each.name], each.default, meaning


def device_of(name: str) -> torch.device:
    """The device of a name.

    Raises:
        ConfigError: the name is unknown, or this machine has no such device.
    """
    if name not in ("cpu", "cuda"):
        raise ConfigError(unknown_name("--device", name, ("cpu", "cuda")))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: got cuda, but PyTorch finds no CUDA GPU here; expected cpu")
    return torch.device(name)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ConfigError: there is no such dtype; the message names the choices.
    """
    if name not in DTYPES:
        raise ConfigError(unknown_name("--dtype", name, tuple(DTYPES)))
    return DTYPES[name]


#: Fields of DeepSeek-V3.2's shape: latents of 512 and 64 columns, and its indexer's keys.
DEEPSEEK = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "index_dim": 128, "page_size": 1}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Shapes of Llama-3.1-8B by default, with another number of layers.

    Attributes:
        layers: layers of the model; each starts with the processor caches that the others left.
        q_heads: query heads.
        kv_heads: KV heads.
        head_dim: width of a head.
        v_head_dim: width of the values, which are the first columns of the keys (MLA); None: values
            are separate from the keys and as wide.
        index_dim: width of the keys of the model's own indexer; 0: it has none.
        page_size: tokens of a page.
        dtype: dtype of keys and values.
    """

    layers: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int | None = field(default=None, metadata=NO_FLAG)
    index_dim: int = field(default=0, metadata=NO_FLAG)
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def kv(self) -> KVSpec:
        """The shapes as the coordinator takes them."""
        return KVSpec(
            num_layers=self.layers,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim or self.head_dim,
            dtype=self.dtype,
            page_size=self.page_size,
            attention="GQA" if self.v_head_dim is None else "MLA",
            index_head_dim=self.index_dim,
        )

    def reported(self, *names: str) -> dict[str, Any]:
        """Parameters for a report: the named attributes, then the shapes."""
        names = (*names, "layers", "q_heads", "kv_heads", "head_dim", "page_size")
        names += () if self.v_head_dim is None else ("v_head_dim", "index_dim")
        return {name: getattr(self, name) for name in names} | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "cache": f"as {self.layers} layers leave it",
        }
