"""Hugging Face's models beside the server's: greedy tokens, and logprobs of chosen positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from hisparse.transformers import enable
from tests.hf_indexer import inputs_of, scores_of

#: ``(layer, position)`` to the tokens that a query attends.
Choices = dict[tuple[int, int], list[int]]


def load(model: Path, **options: Any) -> Any:
    """The model in a folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options).eval()


def greedy_batch(net: Any, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
    """The most likely ``count`` tokens after prompts of one length, over their ends too."""
    out = net.generate(
        torch.tensor(prompts),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    found: list[list[int]] = out[:, len(prompts[0]) :].tolist()
    return found


def greedy(net: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """The same of one prompt."""
    return greedy_batch(net, [prompt], count, **options)[0]


def sparse_tokens(
    kind: str, prompts: list[list[int]], count: int, config: dict[str, Any]
) -> list[list[int]]:
    """Continuations by a tiny model with hisparse's cache, whose rows do not stay resident."""
    net = load(tiny_model(kind))
    cache, found = enable(net, config | {"max_row_capacity": 256}, max_length=4096), []
    for prompt in prompts:
        found.append(greedy(net, prompt, count, past_key_values=cache))
        cache.reset()
    assert cache.stats().miss_pages > 0, "nothing was read from host memory"
    return found


class HuggingFace:
    """A tiny DeepSeek model in float32.

    Args:
        kind: of :func:`tiny_model`.
        index_topk: tokens that a query attends, in place of the model's own number.

    Attributes:
        swapped: for each query of the last forward whose recorded choice was another one, how far
            the scores of its tokens were from those of the model's choice at most, relative to
            the spread of the query's scores.
    """

    def __init__(self, kind: str, index_topk: int | None = None) -> None:
        options = {} if index_topk is None else {"index_topk": index_topk}
        self._model = load(tiny_model(kind), attn_implementation="eager", **options)
        self.swapped: list[float] = []

    @torch.no_grad()
    def logprobs(self, ids: list[int], choices: Choices | None = None) -> Tensor:
        """``[n, vocabulary]``; sparse layers attend ``choices`` where they are given."""
        self.swapped, hooks = [], []
        for layer, block in enumerate(self._model.model.layers if choices is not None else ()):

            def choose(
                indexer: DeepseekV32Indexer,
                given: tuple[Tensor, ...],
                out: Tensor,
                layer: int = layer,
            ) -> Tensor:
                return self._replace(scores_of(inputs_of(indexer, given)), out, choices, layer)

            hooks.append(block.self_attn.indexer.register_forward_hook(choose))
        try:
            logits: Tensor = self._model(torch.tensor([ids])).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return logits.log_softmax(-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Continuation of a prompt."""
        return greedy(self._model, prompt, count)

    def _replace(self, scores: Tensor, out: Tensor, choices: Choices, layer: int) -> Tensor:
        """The recorded choices in place of ``out [1, n, K]``, differences noted."""
        out = out.clone()
        width = out.shape[-1]
        for position in range(width, out.shape[1]):
            chosen, own = choices[layer, position], out[0, position].tolist()
            if set(chosen) != set(own):
                seen = scores[position, : position + 1]
                ours, theirs = seen[chosen].sort().values, seen[own].sort().values
                self.swapped.append(float((ours - theirs).abs().max() / seen.std()))
            out[0, position] = torch.tensor(chosen)
        return out


@torch.no_grad()
def behind_the_best(net: Any, prompt: list[int], ids: list[int]) -> Tensor:
    """How far the logprob of each of ``ids`` is behind that of the best token, ``[n]``."""
    logprobs = net(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    best: Tensor = logprobs.amax(-1)
    return best - logprobs[range(len(ids)), ids]
