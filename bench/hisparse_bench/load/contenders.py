"""The contenders of a load benchmark: the flags of each one's server, at equal device bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hisparse.algorithms import ALGORITHMS, build_algorithm
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, unknown_name
from hisparse.eval import models
from hisparse_bench.load.options import LoadOptions, round_up

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
            say: shows a line of progress.
            dtype: of a running server's KV cache; None for the model's. Servers that are started
                on a CPU have float32.

        Raises:
            ConfigError: the model cannot be read, or is too short for a context.
        """
        from transformers import AutoTokenizer

        from hisparse.model_config import read_model_config, text_config
        from hisparse.plan.shapes import shape_per_rank

        if options.model == RANDOM_DSA:
            folder = make_random_dsa(say)
        else:
            folder = models.resolve(options.model, progress=say)
        config = read_model_config(folder)
        spec, text = shape_per_rank(config, 1, 1), text_config(config)
        if options.device == "cpu" and not options.url:
            dtype = torch.float32
        spec = replace(spec, dtype=dtype or spec.dtype)
        indexed = spec.num_indexers > 0
        index = spec.num_indexers * (spec.index_head_dim + _INDEX_SCALE_BYTES)
        longest = int(getattr(text, "max_position_embeddings", 0) or 2**31)
        found = cls(
            folder=folder,
            tokenizer=models.load(AutoTokenizer, folder),
            kv_token_bytes=format_of(spec).token_bytes + index,
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


#: A small random model with DeepSeek-V3.2's sparse attention, for machines without a real one.
RANDOM_DSA = "random-dsa"
_RANDOM_CONTEXT = 16384
_RANDOM_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": _RANDOM_CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "kv_lora_rank": 256,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk": 256,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": _RANDOM_CONTEXT // 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def make_random_dsa(say: Callable[[str], None]) -> str:
    """Make the model once, with the tokenizer of SmolLM2; return its folder."""
    target = models.default_cache() / "models" / f"{RANDOM_DSA}-v1"
    if not (target / "config.json").is_file():
        import transformers

        tokenizer = models.load(
            transformers.AutoTokenizer, models.resolve("smollm2-135m", progress=say)
        )
        say(f"{RANDOM_DSA}: making random weights")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            config = transformers.DeepseekV32Config(**_RANDOM_SHAPE, vocab_size=len(tokenizer))
            model = transformers.DeepseekV32ForCausalLM(config).float()
            scale_weights(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{RANDOM_DSA}-") as temporary:
            made = Path(temporary) / "made"
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            drop_layer_types(made / "config.json")
            made.rename(target)
    return str(target)


@torch.no_grad()
def scale_weights(model: torch.nn.Module, *, bias: float | None = None) -> None:
    """Scale weights so that attention is peaked and continuations wander.

    Args:
        model: random weights, which are replaced: activations have unit variance, attention logits
            a standard deviation of about 3.
        bias: standard deviation of biases; None leaves them as they are.
    """
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            if bias is not None:
                weight.normal_(0, bias)
        elif weight.ndim == 2 and "embed" in name:
            weight.normal_(0, 1)
        elif weight.ndim >= 2:
            gain = 2.0 if any(x in name for x in ("q_proj", "q_b_proj", "o_proj")) else 1.5
            weight.normal_(0, gain / weight.shape[-1] ** 0.5)
        if "indexer.weights_proj" in name:
            # SGLang keeps these in bfloat16, whatever the dtype of the model.
            weight.copy_(weight.bfloat16())


def drop_layer_types(path: Path) -> None:
    """Remove ``layer_types``, which DeepSeek's files lack; transformers' releases differ in it."""
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps(config, indent=2))


DENSE, SGLANG_HISPARSE = "dense", "sglang-hisparse"
_MIB = 2**20
#: Tokens in host memory for each one on the device, SGLang's default.
_UPSTREAM_RATIO = 2
#: Tokens of a prefill on a CPU are a multiple of SGLang's default, and so of any page size.
_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way of serving the model.

    Attributes:
        options: the run.
        model: the model.
        algorithm: ``DENSE``, ``SGLANG_HISPARSE`` or an algorithm of hisparse.
        device_buffer_size: tokens of a row's device buffer, hisparse only; None for the default.
    """

    options: LoadOptions
    model: ServedModel
    algorithm: str
    device_buffer_size: int | None = None

    @property
    def name(self) -> str:
        """Name in reports."""
        if self.algorithm == DENSE and self.model.stands_in_for_dense:
            return f"{self.model.own_algorithm}, all resident"
        size = self.device_buffer_size
        return self.algorithm if size is None else f"{self.algorithm}, buffer {size}"

    @property
    def is_hisparse(self) -> bool:
        """Whether hisparse serves, with its metrics."""
        return self.algorithm not in (DENSE, SGLANG_HISPARSE) or self.model.stands_in_for_dense

    def check(self) -> HiSparseConfig:
        """The settings of hisparse.

        Raises:
            ConfigError: a setting is wrong; found before a server starts.
        """
        return HiSparseConfig.from_dict(self._config())

    def flags(self, device_bytes: int, num_tokens: int) -> list[str]:
        """Flags of the timed server.

        Args:
            device_bytes: device memory for the KV cache and all that belongs to it.
            num_tokens: tokens of all requests of the largest load, with their answers.
        """
        if self.algorithm == DENSE and not self.model.stands_in_for_dense:
            tokens = max(1, device_bytes // self.model.kv_token_bytes)
            return [*self._common(), *self._dense_backend(), "--max-total-tokens", str(tokens)]
        if self.algorithm == SGLANG_HISPARSE:
            return [*self._common(), *self._upstream(device_bytes)]
        config = self._config() | {"device_memory": device_bytes}
        if self.algorithm == DENSE:
            config |= self._resident()
        return [*self._common(), *self._hisparse(config, num_tokens)]

    def exact_flags(self, num_tokens: int) -> list[str]:
        """Flags of a server that attends all tokens, with memory for ``num_tokens``.

        With a model's own indexer, all tokens that the indexer selects.
        """
        if self.algorithm == DENSE and not self.model.stands_in_for_dense:
            return [*self._common(), *self._dense_backend(), "--max-total-tokens", str(num_tokens)]
        if self.algorithm == SGLANG_HISPARSE:
            return [*self._common(), *self._upstream(num_tokens * self._upstream_token_bytes)]
        config = replace(self, device_buffer_size=None)._config() | {
            "device_memory": 4 * num_tokens * self.model.kv_token_bytes + 256 * _MIB
        }
        if self.model.index_top_k is None:
            config["budget"] = round_up(self.model.longest_request(self.options))
        elif self.algorithm == DENSE:
            config |= self._resident()
        return [*self._common(), *self._hisparse(config, num_tokens)]

    def _common(self) -> list[str]:
        options = self.options
        flags = ["--device", options.device, "--skip-server-warmup", "--sleep-on-idle"]
        flags += ["--max-running-requests", str(max(options.most_running, 2))]
        flags += self.model.flags
        if options.device == "cpu":
            # In chunks, torch_native computes the prefix of each chunk again. SGLang's default of
            # the fraction leaves memory for a large chunk on a GPU, more than a CPU's machine has.
            chunk = -(-self.model.longest_request(options) // _CHUNK) * _CHUNK
            flags += ["--dtype", "float32", "--chunked-prefill-size", str(chunk)]
            flags += ["--mem-fraction-static", "0.8"]
        return flags

    def _dense_backend(self) -> list[str]:
        # On CUDA SGLang knows best. On x86 CPUs its default is intel_amx, which needs sgl-kernel
        # for CPUs: no package index has a wheel of it.
        return ["--attention-backend", "torch_native"] if self.options.device == "cpu" else []

    def _hisparse(self, config: dict[str, Any], num_tokens: int) -> list[str]:
        host = int(1.1 * num_tokens * self.model.kv_token_bytes) + 64 * _MIB
        config = {"host_memory": host} | config
        flags = ["--attention-backend", "hisparse", "--hisparse-config", json.dumps(config)]
        return [*flags, "--max-total-tokens", str(num_tokens)]

    def _config(self) -> dict[str, Any]:
        name = self.model.own_algorithm if self.algorithm == DENSE else self.algorithm
        config: dict[str, Any] = {"algorithm": name, "budget": self.options.budget}
        if self.model.index_top_k is not None:
            config |= {"budget": self.model.index_top_k, "page_size": 1}
            config |= {"num_sink_pages": 0, "num_recent_pages": 0}
        if self.device_buffer_size is not None:
            # Without a maximum, a row would grow into unused device memory.
            size = self.device_buffer_size
            config |= {"device_buffer_size": size, "max_row_capacity": size}
        return config

    def _resident(self) -> dict[str, Any]:
        """Settings that keep the whole KV cache of each running request on the device."""
        return {"device_buffer_size": round_up(self.model.longest_request(self.options)) + 16}

    @property
    def _upstream_token_bytes(self) -> int:
        """Device bytes of a device token: those in host memory have indexer keys there as well."""
        return self.model.kv_token_bytes + (_UPSTREAM_RATIO - 1) * self.model.index_token_bytes

    def _upstream(self, device_bytes: int) -> list[str]:
        """SGLang's own HiSparse: device buffers of all requests and the pool share the bytes."""
        tokens = max(1, device_bytes // self._upstream_token_bytes)
        top_k = self.model.index_top_k
        assert top_k is not None, "contenders() refuses a model without an indexer"
        config = {"top_k": top_k, "device_buffer_size": 2 * top_k}
        config["host_to_device_ratio"] = _UPSTREAM_RATIO
        flags = ["--enable-hisparse", "--disable-radix-cache", "--max-total-tokens", str(tokens)]
        return [*flags, "--hisparse-config", json.dumps(config)]


def contenders(options: LoadOptions, model: ServedModel) -> Sequence[Contender]:
    """The contenders of a run; the dense one first.

    Raises:
        ConfigError: a name is unknown, or the contender cannot run here.
    """
    names = dict.fromkeys(options.algorithm)
    found = []
    for name in sorted(names, key=lambda name: name != DENSE):
        if name == SGLANG_HISPARSE and (options.device != "cuda" or model.index_top_k is None):
            raise ConfigError(
                f"--algorithm: got {name} with {options.model} on {options.device}, expected it on "
                "cuda with a model that has an indexer, such as DeepSeek-V3.2"
            )
        if name not in (DENSE, SGLANG_HISPARSE) and name not in ALGORITHMS:
            raise ConfigError(
                unknown_name("algorithm", name, (DENSE, SGLANG_HISPARSE, *ALGORITHMS))
            )
        base = Contender(options=options, model=model, algorithm=name)
        sizes = options.device_buffer_size if name not in (DENSE, SGLANG_HISPARSE) else ()
        found += [replace(base, device_buffer_size=size) for size in sizes] or [base]
    for contender in found:
        if contender.is_hisparse:
            build_algorithm(contender.check())
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: got cuda, but PyTorch finds no CUDA GPU here; expected cpu")
    return found
