"""Tiny models and prompts of the transformers tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hisparse.transformers import HiSparseCache
from tests.server.tiny_models import VOCAB, tiny_model

DOCS = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
#: A budget and a row capacity far below the tests' contexts.
SMALL = {"budget": 96, "device_buffer_size": 128, "max_row_capacity": 128, "checked": True}
#: A budget above every context of the tests.
ROOMY = {"budget": 1024, "checked": True}

GREEDY = {"do_sample": False, "pad_token_id": 0}


@cache
def model(kind: str) -> Any:
    """ "llama", "qwen2" or "qwen3", in float32; leave its attention as it was."""
    if kind != "qwen3":
        return AutoModelForCausalLM.from_pretrained(tiny_model(kind)).eval()
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    made = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **shape, **heads)).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 2.0 / weight.shape[1] ** 0.5)
        made.lm_head.weight[made.config.eos_token_id or 0] = 0
    return made


def prompt(length: int, seed: int, batch: int = 1) -> Tensor:
    """``[batch, length]`` random token ids."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (batch, length), generator=rng)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte is a token, and there is a word for each of the tiny models' other tokens."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{i};" for i in range(len(words), VOCAB)]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


class Characters:
    """Stands for a tokenizer: a token for each character."""

    def __call__(self, text: str, return_tensors: str) -> Any:
        ids = torch.tensor([[2 + ord(letter) % 500 for letter in text]])
        return SimpleNamespace(input_ids=ids)


def run_program(
    monkeypatch: pytest.MonkeyPatch, store: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the program about ``DB`` of docs/transformers.md with a tiny model; its variables.

    The text is shorter, but has more tokens for its budget.

    Args:
        monkeypatch: of the test.
        store: folder, in place of the page's.
        options: of the algorithm.
    """
    (program,) = re.findall(r"```python\n(from transformers.*?)```", DOCS, re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 20
    monkeypatch.setattr("hisparse.eval.models.resolve", lambda name: tiny_model("llama"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder: Characters())
    given = {
        "[:4000]": "[:400]",
        '"contexts"': repr(str(store)),
        '"budget": 256': f'"budget": 128, "algorithm_config": {dict(options)}',
    }
    for old, new in given.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    variables: dict[str, Any] = {}
    exec(program, variables)
    return variables


def left_padded(lengths: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, ``[B, longest]`` each."""
    ids = prompt(max(lengths), seed, len(lengths))
    column = torch.arange(max(lengths))
    mask = (column >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def continuation(
    net: Any, ids: Tensor, count: int, cache: HiSparseCache | None = None, **options: Any
) -> list[list[int]]:
    """Greedy continuations of ``ids [B, T]``."""
    out = net.generate(ids, max_new_tokens=count, past_key_values=cache, **GREEDY, **options)
    return out[:, ids.shape[1] :].tolist()


def each_alone(
    net: Any, cache: HiSparseCache, ids: Tensor, lengths: tuple[int, ...], count: int
) -> list[list[int]]:
    """Continuations of left-padded rows ``ids [B, T]``, each in a cache that was reset."""
    found = []
    for row, length in zip(ids, lengths, strict=True):
        cache.reset()
        found += continuation(net, row[None, -length:], count, cache)
    return found
