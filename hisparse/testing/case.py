"""A case of the contract suite: shapes, requests, and how a simulator serves them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, cast

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.testing.recorder import Recorder, Trace
from hisparse.testing.simulator import Request, Simulator
from hisparse.types import SelectionScope


@dataclass
class Run:
    """A simulator and the recorded calls of its algorithm.

    Attributes:
        sim: the simulator.
        recorder: wraps the algorithm and records its calls.
    """

    sim: Simulator
    recorder: Recorder

    def trace(self, request: Request) -> Trace:
        """The selections of a request so far."""
        return self.recorder.traces.get(request.slot, {})

    def finish(self, *requests: Request, steps: int) -> Self:
        """Decode ``steps`` tokens of all requests in one batch."""
        for _ in range(steps):
            self.sim.decode(*requests)
        return self


@dataclass(frozen=True)
class Case:
    """Shapes and requests with which an algorithm is checked.

    The *typical request* has a prompt of ``pages`` full pages and a part of another one.

    Attributes:
        make: returns a new instance of the algorithm.
        scope: selection scope.
        page_size: tokens per page.
        pages: full pages of the prompt of the typical request.
        seed: seed of its K, V and queries.
    """

    make: Callable[[], BaseSparseAlgorithm]
    scope: SelectionScope
    page_size: int
    pages: int
    seed: int = 0

    @classmethod
    def of(
        cls, make: Callable[[], BaseSparseAlgorithm], scope: SelectionScope, page_size: int
    ) -> Self:
        """The case in its full size; :meth:`smaller` ones help to understand a fault."""
        return cls(make, scope, page_size, pages=20 if page_size > 1 else 40)

    def smaller(self) -> list[Self]:
        """The same case with shorter prompts, the shortest first; all exceed the budget."""
        first = self.budget_pages + 2
        return [replace(self, pages=n) for n in (first, 2 * first) if n < self.pages]

    def __str__(self) -> str:
        return (
            f"selection scope {self.scope}, page size {self.page_size}, {self.prompt} prompt "
            f"tokens, budget {self.budget} tokens ({self.budget_pages} pages and the tail page), "
            f"{self.settings['q_heads']} query heads, {self.settings['kv_heads']} KV heads, "
            f"2 layers, seed {self.seed}"
        )

    @property
    def budget_pages(self) -> int:
        """Full pages in the budget: a sink page, two recent pages and some that are chosen."""
        return 6 if self.page_size > 1 else 12

    @property
    def budget(self) -> int:
        """The budget in tokens, tail page included."""
        return (self.budget_pages + 1) * self.page_size

    @property
    def prompt(self) -> int:
        """Tokens of the typical prompt, which ends within a page."""
        return self.pages * self.page_size + self.page_size // 2

    @property
    def steps(self) -> int:
        """Number of decode steps: enough to fill two pages."""
        return max(8, 3 * self.page_size // 2 + 1)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the simulator. Sizes differ from one another, so that mix-ups show."""
        return {
            "scope": self.scope,
            "page_size": self.page_size,
            "budget": self.budget,
            "device_buffer": 2 * self.budget,
            "max_row": 2 * self.budget,
            "num_sink_pages": 1,
            "num_recent_pages": 2,
            "q_heads": 6,
            "kv_heads": 2,
            "head_dim": 32,
            "host_pages": 6 * (self.pages + 60),
            "checked": False,
        }

    def start(self, **settings: Any) -> Run:
        """Put a new instance of the algorithm into a new simulator."""
        recorder = Recorder(self.make())
        algorithm = cast(BaseSparseAlgorithm, recorder)
        return Run(Simulator(**self.settings | settings, algorithm=algorithm), recorder)

    def serve(self, *others: int, order: Sequence[int] | None = None, **settings: Any) -> Run:
        """Serve the typical request in slot 1 and other requests in the slots after it.

        Args:
            others: by how many pages the prompt of each other request is longer.
            order: order of the requests in the decode batch; None: by slot.
            settings: settings of the simulator that differ from :attr:`settings`.
        """
        run = self.start(**settings)
        requests = []
        for slot, pages in enumerate((0, *others), 1):
            prompt = self.prompt + pages * self.page_size
            request = run.sim.request(slot, prompt + self.steps, self.seed + slot, prompt=prompt)
            run.sim.prefill((request, prompt))
            requests.append(request)
        return run.finish(*(requests[i] for i in order or range(len(requests))), steps=self.steps)

    @cached_property
    def alone(self) -> Run:
        """A run of only the typical request, its prompt in one chunk."""
        return self.serve()

    @cached_property
    def together(self) -> Run:
        """A run of the typical request with a shorter and a longer one."""
        return self.serve(-1, 4)
