"""The requests of a soak: what each sends, what it must get, and what it got."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

from harness import Answer, Server
from workload import tokens

#: Tokens of the prefixes that half of the prompts begin with.
_PREFIXES = (160, 500, 1000, 1500)
_TURNS = 3
#: Ways to divide a prompt that are tried for an answer that differs: alone, and the first ones
#: also beside copies of the request.
_PARTITIONS, _WITH_COPIES = 40, 10
_COPIES = (1, 6, 12)


@dataclass(frozen=True)
class Expected:
    """What a request gets when it runs alone.

    Attributes:
        ids: its tokens.
        leads: of each token, logprob over that of the second best.
        cached: prompt tokens from the radix cache.
    """

    ids: list[int]
    leads: list[float]
    cached: int

    @classmethod
    def of(cls, answer: Answer) -> Expected:
        """From an answer with the two best logprobs of each token."""
        pairs = (sorted(top.values()) for top in answer.top_logprobs)
        return cls(answer.ids, [best - second for second, best in pairs], answer.cached)

    def differs(self, ids: Sequence[int]) -> int | None:
        """The first place where an answer, or the beginning of one, differs; None: nowhere."""
        pairs = enumerate(zip(ids, self.ids, strict=False))
        return next((i for i, (got, expected) in pairs if got != expected), None)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how many tokens follow it.

    Attributes:
        ids: its tokens.
        new_tokens: number of tokens that follow.
        adapter: the LoRA adapter that computes them; None: the model alone.
    """

    ids: list[int]
    new_tokens: int
    adapter: str | None = None


@dataclass
class Conversation:
    """Turns that each begin with the turn before and its answer.

    Attributes:
        first: the first turn.
        replies: tokens that the user adds for each later turn.
        expected: of each turn, when the conversation runs alone.
    """

    first: Prompt
    replies: list[list[int]]
    expected: list[Expected] = field(default_factory=list)

    def turn(self, number: int, before: Sequence[int], answer: Sequence[int]) -> Prompt:
        """The prompt of a turn after the first, from the prompt and the answer before it."""
        ids = [*before, *answer, *self.replies[number - 1]]
        return replace(self.first, ids=ids)


@dataclass
class Traffic:
    """Prompts that many requests share, and conversations that one client has each.

    Attributes:
        prompts: each used by several requests.
        conversations: each used once. So the K/V of a turn's answer, which later turns attend, are
            those of its own decode steps.
        adapters: folders of LoRA adapters.
        expected: of each prompt.
    """

    prompts: list[Prompt]
    conversations: list[Conversation]
    adapters: Mapping[str, Path]
    expected: list[Expected] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        num_prompts: int,
        num_conversations: int,
        longest: int,
        seed: int,
        adapters: Mapping[str, Path],
    ) -> Traffic:
        """Random tokens; half of the prompts begin with one of a few prefixes.

        The model and its adapters take turns.
        """
        rng, turns = random.Random(seed), cycle([None, *adapters])
        prefixes = [tokens(n, seed=n) for n in _PREFIXES if n < longest]

        def prompt(longest: int) -> Prompt:
            prefix = rng.choice(prefixes) if rng.random() < 0.5 else []
            # As many short ones as long ones, on a scale of factors.
            own = int(20 * (max(longest - len(prefix), 40) / 20) ** rng.random())
            ids = (prefix + tokens(own, seed=rng.randrange(2**30)))[:longest]
            return Prompt(ids, rng.randrange(8, 64), next(turns))

        def conversation() -> Conversation:
            later = [tokens(rng.randrange(5, 100), rng.randrange(2**30)) for _ in range(_TURNS - 1)]
            return Conversation(prompt(longest // 2), later)

        return cls(
            [prompt(longest) for _ in range(num_prompts)],
            [conversation() for _ in range(num_conversations)],
            adapters,
        )


def answer_alone(server: Server, traffic: Traffic) -> None:
    """Fill in what each prompt and turn gets when nothing else runs and nothing else is cached."""
    for name, folder in traffic.adapters.items():
        server.load_adapter(name, folder)
    for prompt in traffic.prompts:
        server.flush_cache()
        traffic.expected.append(_ask(server, prompt))
    for talk in traffic.conversations:
        server.flush_cache()
        prompt = talk.first
        talk.expected.append(_ask(server, prompt))
        for number in range(1, _TURNS):
            prompt = talk.turn(number, prompt.ids, talk.expected[-1].ids)
            talk.expected.append(_ask(server, prompt))
    server.flush_cache()


def is_rounding(server: Server, turns: Sequence[Prompt], ids: Sequence[int], cached: int) -> bool:
    """Whether the request alone gives ``ids`` too if its sums are added in another order.

    The length of a piece of the prompt and the size of the batch decide how matrix products add.
    Keys and queries then differ in the last bits, a quantised one now and then by a whole step,
    and a page may take the place of another whose score is the same but for that. So an answer
    that differs is asked for again with a part of the prompt in the radix cache, alone or beside
    copies of itself. What the pages of another request would give, none of these gives.

    Args:
        server: idle.
        turns: the prompt; of a conversation those of the turns before it too.
        ids: the answer, up to the first token that differs.
        cached: tokens of the first prompt that the radix cache had.
    """
    first, rng = turns[0].ids, random.Random(len(turns[0].ids))
    # The radix cache of the answer first: it ends one piece for certain.
    partitions = [[cached]] + [_cuts(len(first), rng) for _ in range(_PARTITIONS)]
    for number, cuts in enumerate(partitions):
        for copies in _COPIES if number < _WITH_COPIES else _COPIES[:1]:
            server.flush_cache()
            for cut in filter(None, cuts):
                server.generate(first[:cut], 1, lora_path=turns[0].adapter)
            for prompt in turns:
                answers = server.generate_many(
                    [prompt.ids] * copies, prompt.new_tokens, lora_path=prompt.adapter
                )
            if any(answer.ids[: len(ids)] == list(ids) for answer in answers):
                return True
    return False


def _cuts(length: int, rng: random.Random) -> list[int]:
    """Whole pages at which a prompt is divided, ascending; at most five."""
    pages = range(1, max(length // 16, 2))
    return sorted(16 * page for page in rng.sample(pages, min(rng.randrange(1, 6), len(pages))))


def _ask(server: Server, prompt: Prompt) -> Expected:
    answer = server.generate(
        prompt.ids, prompt.new_tokens, top_logprobs=2, lora_path=prompt.adapter
    )
    return Expected.of(answer)
