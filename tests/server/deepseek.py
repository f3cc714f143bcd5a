"""Hugging Face's DeepSeek models beside the server's, attending what the server attended."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from tests.hf_indexer import inputs_of, scores_of

__all__ = ["RECORDED", "Choices", "HuggingFace", "read_choices"]

#: ``(layer, position)`` to the tokens that a query attends.
Choices = dict[tuple[int, int], list[int]]

#: The algorithm dsa, writing down what it chooses; a package of its own.
RECORDED = """
    from dataclasses import dataclass
    from itertools import count
    from pathlib import Path

    import torch

    from hisparse.algorithms.dsa import DSA

    COUNT = count()


    @dataclass(frozen=True, kw_only=True)
    class Recorded(DSA):
        folder: str

        def _write(self, layer, slots, positions, rows):
            torch.save((layer, slots, positions, rows), Path(self.folder) / f"{next(COUNT)}.pt")

        def retrieve_topk(self, queries, layer_id, step):
            selection = super().retrieve_topk(queries, layer_id, step)
            positions = step.num_pages.tolist()
            rows = selection.pages[:, 0].tolist()
            for row, position in zip(rows, positions, strict=True):
                if -1 in row:
                    row[row.index(-1)] = position
            self._write(layer_id, step.slots.tolist(), positions, rows)
            return selection

        def select_prefill(self, layer_id, step):
            chosen = super().select_prefill(layer_id, step)
            positions = list(range(step.start, step.start + step.length))
            rows = [range(p + 1) for p in positions] if chosen is None else chosen.tolist()
            self._write(layer_id, [step.slot] * step.length, positions, rows)
            return chosen
"""


def read_choices(folder: Path, lengths: list[int]) -> list[Choices]:
    """What was written down for requests of so many computed tokens, each another number.

    Nothing is written of decode steps that attend all there is.
    """
    found: list[Choices] = []
    current: dict[int, Choices] = {}
    for path in sorted(folder.iterdir(), key=lambda p: int(p.stem)):
        layer, slots, positions, rows = torch.load(path, weights_only=False)
        for slot, position, row in zip(slots, positions, rows, strict=True):
            seen = current.get(slot, {})
            if layer == 0 and ((0, position) in seen or (0, position - 1) not in seen):
                # The slot has changed hands.
                current[slot] = {}
                found.append(current[slot])
            current[slot][layer, position] = [token for token in row if token >= 0]
    ends = {max(p for _, p in choices) + 1: choices for choices in found}
    return [ends.get(length, {}) for length in lengths]


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
        self._model = AutoModelForCausalLM.from_pretrained(
            tiny_model(kind), dtype=torch.float32, attn_implementation="eager", **options
        ).eval()
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
        out = self._model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

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
