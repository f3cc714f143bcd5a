"""What a load benchmark knows of its model before a server starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.eval import models
from hisparse_bench.load import random_dsa
from hisparse_bench.load.options import LoadOptions

#: Device bytes of the indexer's key of a token and layer: fp8 values and a float32 scale.
_INDEX_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model, its sizes and its tokenizer.

    Attributes:
        folder: folder or hub id.
        tokenizer: of transformers.
        kv_token_bytes: device bytes of a token in a dense KV cache: K, V, and the indexer's key.
        index_token_bytes: the part of ``kv_token_bytes`` that is the indexer's.
        longest: tokens that the model takes.
        index_top_k: tokens that the model's own indexer selects; None without an indexer.
        stands_in_for_dense: whether hisparse with the whole KV cache on the device is the dense
            contender, because SGLang cannot serve this model on this device.
        flags: SGLang's flags that the model needs.
    """

    folder: str
    tokenizer: Any
    kv_token_bytes: int
    longest: int
    index_token_bytes: int = 0
    index_top_k: int | None = None
    stands_in_for_dense: bool = False
    flags: tuple[str, ...] = ()

    @classmethod
    def load(
        cls, options: LoadOptions, say: Callable[[str], None], dtype: torch.dtype | None = None
    ) -> ServedModel:
        """Fetch the model if needed, and read its configuration and tokenizer.

        Args:
            options: the run.
            say: told what happens.
            dtype: of a running server's KV cache; None for the model's. Servers that are started
                on a CPU have float32.

        Raises:
            ConfigError: the model cannot be read, or is too short for a context.
        """
        from transformers import AutoTokenizer

        from hisparse.transformers.model_shape import read_model_config, shape_per_rank, text_config

        if options.model == random_dsa.NAME:
            folder = random_dsa.make(say)
        else:
            folder = models.resolve(options.model, progress=say)
        config = read_model_config(folder)
        spec, text = shape_per_rank(config, 1, 1), text_config(config)
        if options.device == "cpu" and not options.url:
            dtype = torch.float32
        spec = replace(spec, dtype=dtype or spec.dtype)
        indexed = spec.index_head_dim > 0
        index = spec.num_layers * (spec.index_head_dim + _INDEX_SCALE_BYTES) if indexed else 0
        longest = int(getattr(text, "max_position_embeddings", 0) or 2**31)
        found = cls(
            folder=folder,
            tokenizer=models.load(AutoTokenizer, folder),
            kv_token_bytes=spec.token_bytes + index,
            longest=longest,
            index_token_bytes=index,
            index_top_k=int(text.index_topk) if indexed else None,
            # The kernels of SGLang's own sparse attention need a GPU.
            stands_in_for_dense=indexed and options.device == "cpu",
        )
        if not options.trace and found.longest_request(options) > longest:
            raise ConfigError(
                f"--context: got {max(options.context)} and {options.output} of --output, expected "
                f"at most {longest} in all, which {options.model} takes"
            )
        return found

    def longest_request(self, options: LoadOptions) -> int:
        """Tokens of the longest request, with its answer; a trace's are at most ``longest``."""
        return self.longest if options.trace else max(options.context) + options.output

    @property
    def own_algorithm(self) -> str:
        """The algorithm that the model was trained with, else the default."""
        return "dsa" if self.index_top_k is not None else HiSparseConfig.algorithm
