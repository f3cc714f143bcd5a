"""Wraps an algorithm under test and records the calls of the coordinator and their results."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hisparse.algorithms import BaseSparseAlgorithm, DecodeStep, PrefillStep
from hisparse.cache import check_selection
from hisparse.engine.contract import check_positions, require_selection
from hisparse.errors import HiSparseError, shorten
from hisparse.testing.operations import Violation
from hisparse.types import Selection

#: The selections of one request: (tokens of the request, layer) to the pages of each head. For
#: algorithms with sparse prefill it has entries for the prompt too, which hold positions.
Trace = dict[tuple[int, int], list[list[int]]]


@dataclass(frozen=True)
class Call:
    """A call of an algorithm's method.

    Attributes:
        method: name of the method.
        layer_id: layer number.
        tensors: tensors, by name, that the method must not change.
        host_pages: host pages whose representations the method may write.
        slots: request slots whose representations the method may write.
    """

    method: str
    layer_id: int
    tensors: dict[str, Tensor]
    host_pages: Tensor
    slots: Tensor

    def __str__(self) -> str:
        return f"{self.method}, layer {self.layer_id}"


#: A context manager that is entered around every call; an exception that it raises ends the check.
Guard = Callable[[Call], AbstractContextManager[None]]


@dataclass(frozen=True)
class Retrieved:
    """A selection as the algorithm returned it.

    Attributes:
        layer_id: layer number.
        slots: ``[B]``, request slots.
        seq_lens: ``[B]``, tokens of each request.
        num_pages: ``[B]``, full pages of each request.
        pages: ``[B][H][K]``, selected pages.
        lengths: ``[B][H]``, number of selected pages.
    """

    layer_id: int
    slots: list[int]
    seq_lens: list[int]
    num_pages: list[int]
    pages: list[list[list[int]]]
    lengths: list[list[int]]


@dataclass
class Recorder:
    """Passes calls on to an algorithm, records its selections and enters guards around the calls.

    Attributes:
        algorithm: the algorithm under test.
        guards: entered around every call.
        retrieved: selections in the order of the calls.
        traces: request slot to :data:`Trace`.
        constructed: host pages that each chunk completed, for each chunk and layer.
    """

    algorithm: BaseSparseAlgorithm
    guards: list[Guard] = field(default_factory=list)
    retrieved: list[Retrieved] = field(default_factory=list)
    traces: dict[int, Trace] = field(default_factory=dict)
    constructed: list[list[int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    @contextmanager
    def _guarded(self, call: Call) -> Iterator[None]:
        with ExitStack() as stack:
            for guard in self.guards:
                stack.enter_context(guard(call))
            yield

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        self.constructed.append(step.host_pages.tolist())
        inputs = {"keys": keys, "queries": queries, "step.host_pages": step.host_pages}
        slot = torch.tensor([step.slot])
        own = step.host_pages
        if self.algorithm.indexer:
            # Keys of a model's indexer are written while their page is not full.
            own = step.context_pages[step.start // step.policy.kv.page_size :]
        call = Call("construct_representations", layer_id, inputs, own, slot)
        with self._guarded(call):
            self.algorithm.construct_representations(keys, queries, layer_id, step)

    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        chosen = self.algorithm.select_prefill(layer_id, step)
        own = torch.arange(step.start, step.start + step.length)[:, None]
        attended = torch.arange(int(own[-1]) + 1).expand(len(own), -1)
        if chosen is not None:
            check_positions(chosen, self.algorithm, layer_id, step)
            attended = chosen
        if attended.ndim == 2:
            attended = attended[:, None].expand(-1, step.policy.heads, -1)
        if chosen is not None:
            owns = own.repeat_interleave(attended.shape[1], 0)
            _check_values(layer_id, attended.flatten(0, 1), owns)
        if self.algorithm.prefill_choices(step.policy):
            trace = self.traces.setdefault(step.slot, {})
            for token, heads in enumerate(attended.tolist(), step.start):
                kept = [sorted(p for p in positions if 0 <= p <= token) for positions in heads]
                trace[token + 1, layer_id] = kept
        return chosen

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        inputs = {"keys": keys, "host_pages": host_pages} | _step_tensors(step)
        call = Call("update_representations", layer_id, inputs, host_pages, step.slots)
        with self._guarded(call):
            self.algorithm.update_representations(keys, layer_id, host_pages, step)

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        inputs = {"queries": queries} | _step_tensors(step)
        nowhere = torch.empty(0, dtype=torch.int64)
        call = Call("retrieve_topk", layer_id, inputs, nowhere, step.slots)
        with self._guarded(call):
            selection = self.algorithm.retrieve_topk(queries, layer_id, step)
        require_selection(selection, self.algorithm, "retrieve_topk", layer_id, step)
        try:
            check_selection(layer_id, selection, step)
        except HiSparseError as error:
            raise Violation(str(error)) from None
        self._record(layer_id, selection, step)
        return selection

    def _record(self, layer_id: int, selection: Selection, step: DecodeStep) -> None:
        new = Retrieved(
            layer_id,
            step.slots.tolist(),
            step.seq_lens.tolist(),
            step.num_pages.tolist(),
            selection.pages.tolist(),
            selection.lengths.tolist(),
        )
        self.retrieved.append(new)
        for slot, tokens, pages in zip(new.slots, new.seq_lens, new.pages, strict=True):
            heads = [[page for page in head if page >= 0] for head in pages]
            self.traces.setdefault(slot, {})[tokens, layer_id] = heads


def _step_tensors(step: DecodeStep) -> dict[str, Tensor]:
    names = ("slots", "num_pages", "tail_lens", "host_page_table")
    return {f"step.{name}": getattr(step, name) for name in names}


def _check_values(layer_id: int, chosen: Tensor, own: Tensor) -> None:
    """Require ``chosen [T, K]`` to be unique positions, none after the query's ``own [T, 1]``."""
    ordered = chosen.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    wrong = (chosen > own).any(-1) | (chosen < -1).any(-1) | twice.any(-1)
    if wrong.any():
        query = int(wrong.int().argmax())
        got = shorten(chosen[query].tolist())
        raise Violation(
            f"select_prefill, layer {layer_id}: got positions {got} for the "
            f"query at {int(own[query])}, expected unique positions up to its own, or -1"
        )
