"""Prompts of real text: of equal length with a common prefix, or as a trace shares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from hisparse.errors import ConfigError, quoted
from hisparse.eval.texts import TEXTS
from hisparse.eval.texts import read_text as read_built_in
from hisparse.options import read_text
from hisparse.trace.prefix import PrefixRequest, read_prefix
from hisparse_bench.load.client import Request

#: Fewest tokens of a text.
_SHORTEST = 512


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
        if len(ids) < _SHORTEST:
            raise ConfigError(f"--text: got {len(ids)} tokens, expected {_SHORTEST} or more")
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
            file: Mooncake's JSONL, or a prefix trace of ``hisparse trace record``.
            count: requests, the earliest ones; 0 for all.
            longest: tokens that the model takes, prompt and output.

        Raises:
            ConfigError: the file cannot be read, or a request cannot be made.
        """
        trace = read_prefix(Path(file))
        return [
            self._request(f"--trace {quoted(file)} request {i}", x, trace.block_size, longest)
            for i, x in enumerate(trace.requests[: count or None], 1)
        ]

    def _request(self, where: str, request: PrefixRequest, size: int, longest: int) -> Request:
        length, output, hashes = request.input_length, request.output_length, request.hash_ids
        where += f" (at {request.timestamp:g} ms)"
        if min(length, output) < 1 or length + output > longest:
            raise ConfigError(
                f"{where}: got {length} and {output} tokens, expected 1 or more, and at most "
                f"{longest} in all, which the model takes"
            )
        # SGLang's export has whole blocks alone.
        if len(hashes) < length // size:
            raise ConfigError(
                f"{where}: got {len(hashes)} hash_ids for {length} tokens, expected one for each "
                f"{size} tokens"
            )
        ids = [token for each in hashes for token in self._block(f"Part {each}", size, where)]
        # Another place of the text for each request: they have no block in common there.
        ids += self._slice(crc32(where.encode()), max(0, length - len(ids)))
        return Request(ids=ids[:length], output=max(2, output), arrival_ms=request.timestamp)

    def _block(self, title: str, size: int, where: str) -> list[int]:
        """The tokens of a block: its title, which no other block has, then a part of the text."""
        head = self.tokenizer(f"\n\n{title}.\n\n", add_special_tokens=False)["input_ids"]
        if len(head) > size:
            raise ConfigError(f"{where}: got blocks of {size} tokens, expected {len(head)} or more")
        # The title alone decides where the text begins.
        return [*head, *self._slice(crc32(title.encode()), size - len(head))]

    def _slice(self, start: int, length: int) -> list[int]:
        size = len(self.ids)
        return [self.ids[(start + i) % size] for i in range(length)]
