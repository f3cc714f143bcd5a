"""Prompts of real text: of equal length with a common prefix, or as a trace shares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from hisparse.errors import ConfigError, quoted
from hisparse.eval.texts import TEXTS
from hisparse.eval.texts import read_text as read_built_in
from hisparse.options import check_fields, parse_object, read_text
from hisparse_bench.load.client import Request

__all__ = ["Prompts"]

#: Tokens of a block of Mooncake's traces.
_BLOCK = 512
_EXAMPLE = '{"timestamp": 0, "input_length": 512, "output_length": 64, "hash_ids": [0]}'


class _Line(TypedDict):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True)
class Prompts:
    """Makes prompts from the tokens of a text, which starts again at its end.

    Attributes:
        tokenizer: the model's.
        ids: tokens of the text.
    """

    tokenizer: Any
    ids: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Any, file: str | None) -> Prompts:
        """Prompts from a text file, or from the two built-in texts.

        Raises:
            ConfigError: the file cannot be read or is too short.
        """
        text = "\n\n".join(map(read_built_in, TEXTS)) if file is None else read_text(file, "--text")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) < _BLOCK:
            raise ConfigError(f"--text: got {len(ids)} tokens, expected {_BLOCK} or more")
        return cls(tokenizer, ids)

    def equal(self, count: int, context: int, shared: float, output: int) -> list[Request]:
        """Requests of ``context`` tokens; the share ``shared`` at their beginning is the same."""
        prefix = int(shared * context)
        # The parts that differ begin at different places of the text.
        step = max(1, len(self.ids) // (count + 1))
        return [
            Request(
                ids=[*self._slice(0, prefix), *self._slice(prefix + i * step, context - prefix)],
                output=output,
            )
            for i in range(count)
        ]

    def trace(self, file: str, count: int, longest: int) -> list[Request]:
        """Requests of a trace: those that have hash ids in common share as many tokens.

        Args:
            file: Mooncake's JSONL.
            count: requests, from the beginning; 0 for all.
            longest: tokens that the model takes, prompt and output.

        Raises:
            ConfigError: the file cannot be read, or a line is no request.
        """
        lines = [line for line in read_text(Path(file), "--trace").splitlines() if line.strip()]
        requests = [
            self._request(f"--trace {quoted(file)} line {i}", line, longest)
            for i, line in enumerate(lines[: count or None], 1)
        ]
        if not requests:
            raise ConfigError(f"--trace: got {quoted(file)} without lines, expected {_EXAMPLE}")
        return sorted(requests, key=lambda request: request.arrival_ms or 0.0)

    def _request(self, where: str, text: str, longest: int) -> Request:
        line = parse_object(text, where, _EXAMPLE)
        check_fields(where, line, _Line)
        length, output, hashes = line["input_length"], line["output_length"], line["hash_ids"]
        if min(length, output) < 1 or length + output > longest:
            raise ConfigError(
                f"{where}: got {length} and {output} tokens, expected 1 or more, and at most "
                f"{longest} in all, which the model takes"
            )
        if len(hashes) * _BLOCK < length:
            raise ConfigError(
                f"{where}: got {len(hashes)} hash_ids for {length} tokens, expected one for each "
                f"{_BLOCK} tokens"
            )
        ids = [token for each in hashes for token in self._block(each)]
        return Request(ids=ids[:length], output=max(2, output), arrival_ms=line["timestamp"])

    def _block(self, number: int) -> list[int]:
        """The tokens of a block: its number, which no other block has, then a part of the text."""
        head = self.tokenizer(f"\n\nPart {number}.\n\n", add_special_tokens=False)["input_ids"]
        return [*head, *self._slice(number * _BLOCK, _BLOCK - len(head))]

    def _slice(self, start: int, length: int) -> list[int]:
        size = len(self.ids)
        return [self.ids[(start + i) % size] for i in range(length)]
