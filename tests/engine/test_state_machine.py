"""Requests come, share, pause and go in any order; after each step all bytes are where they belong.

The machine plays SGLang's scheduler with its prefix cache: it admits requests, extends them by
chunks, decodes, aborts, retracts and admits again, and gives freed host pages to other requests.
``state_model.py`` holds what is expected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.kernels import operation
from hisparse.testing import Simulator
from hisparse.types import Selection
from tests.delayed import DelayedStream
from tests.engine.state_engines import ENGINES, LONGEST, NUM_SLOTS, SMALL
from tests.engine.state_model import (
    Contents,
    PageOracle,
    PrefixCache,
    Sequence,
    Vocabulary,
    bytes_of,
    page_tensors,
    positions_of,
)
from tests.sizes import sized

#: One forward in twelve.
SELDOM = st.integers(0, 11).map(lambda number: number == 7)


class Broken(Exception):
    """Ends a forward within a layer, as a fault of a model would."""


class Requests(RuleBasedStateMachine):
    """A scheduler, and the engine that serves its requests."""

    name = "quest"

    def __init__(self) -> None:
        super().__init__()
        options, algorithm = ENGINES[self.name]
        options = SMALL | options
        if "aside" in options:
            options |= {"aside": DelayedStream(options["aside"])}
        self.sim = Simulator(**options, algorithm=algorithm())
        self.longest = LONGEST[self.sim.page_size]
        few = {"num_slots": 2, "device_pages": None, "host_pages": 4, "aside": None}
        twin = Simulator(**options | few, algorithm=algorithm())
        self.words = Vocabulary(self.sim.spec, has_indexer=self.sim.algorithm.indexer)
        self.pages = PageOracle(twin, self.words)
        self.contents = Contents(self.sim, self.words)
        self.cache = PrefixCache(self.sim)
        self.live = self.cache.live
        self.waiting: list[list[int]] = []  # tokens of retracted requests
        self.known: list[list[int]] = []  # tokens of the last requests
        self.new: set[int] = set()  # slots that began after the last forward
        self.written = 0
        self.selections: dict[int, tuple[list[int], Selection]] = {}
        self.sim.coordinator.observe(self._note)

    def _note(self, layer: int, queries: Tensor, view: DecodeStep, selection: Selection) -> None:
        self.selections[layer] = view.slots.tolist(), selection

    @initialize(prompts=st.lists(st.integers(1, 35), min_size=1, max_size=3))
    def start(self, prompts: list[int]) -> None:
        """Some requests whose prompts are computed."""
        for prompt in prompts:
            self._admit(self.words.new(self.longest), prompt)
        parts = [(x, x.prompt) for x in self.live]
        self._forward(self.live, False, lambda: self.sim.prefill(*parts))
        for sequence in self.live:
            self.cache.insert(sequence)

    @property
    def prefilling(self) -> list[Sequence]:
        return [x for x in self.live if x.done < x.prompt]

    @property
    def running(self) -> list[Sequence]:
        return [x for x in self.live if x.prompt <= x.done < x.length]

    def _admit(self, tokens: list[int], prompt: int) -> None:
        slots = set(range(1, NUM_SLOTS)) - {x.slot for x in self.live}
        sequence = self.words.sequence(max(slots), tokens, prompt)
        # The last token of a prompt is always computed.
        sequence.host_pages = self.cache.match(tokens[: prompt - 1])
        sequence.done = len(sequence.host_pages) * self.sim.page_size
        self.live.append(sequence)
        self.known = [*self.known, tokens][-4:]
        self.new.add(sequence.slot)
        self.sim.coordinator.on_request_begin(sequence.slot)

    @precondition(lambda self: len(self.live) < NUM_SLOTS - 1)
    @rule(data=st.data(), share=st.booleans())
    def admit(self, data: st.DataObject, share: bool) -> None:
        """A prompt of its own, or one that begins as another request; it may be the same (n=2)."""
        tokens: list[int] = []
        prompt = data.draw(st.integers(1, self.longest - 5))
        if share and self.known:
            tokens = data.draw(st.sampled_from(self.known))
            tokens = self.words.again(tokens[: data.draw(st.integers(1, len(tokens) - 5))])
            prompt = min(len(tokens) + data.draw(st.integers(0, 12)), self.longest - 5)
        self._admit(tokens + self.words.new(self.longest - len(tokens)), prompt)

    @precondition(lambda self: self.waiting and len(self.live) < NUM_SLOTS - 1)
    @rule()
    def readmit(self) -> None:
        """A retracted request: its generated tokens are a part of its prompt now."""
        tokens = self.words.again(self.waiting.pop(0))
        self._admit(tokens + self.words.new(self.longest - len(tokens)), len(tokens))

    def _one_of(self, sequences: list[Sequence], data: st.DataObject) -> Sequence:
        slot = data.draw(st.sampled_from([x.slot for x in sequences]))
        return next(x for x in sequences if x.slot == slot)

    def _some_of(self, sequences: list[Sequence], data: st.DataObject) -> list[Sequence]:
        """One or more, in any order."""
        slots = st.sampled_from([x.slot for x in sequences])
        batch = data.draw(st.lists(slots, min_size=1, unique=True))
        return [next(x for x in sequences if x.slot == slot) for slot in batch]

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        if keep:
            self.cache.insert(sequence)
        self.sim.coordinator.on_request_end(sequence.slot)
        self.live.remove(sequence)
        self.cache.release(sequence.host_pages)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans(), retracts=st.booleans())
    def leave(self, data: st.DataObject, keep: bool, retracts: bool) -> None:
        """A request finishes, is aborted at any point, or has to wait for another admission."""
        sequence = self._one_of(self.live, data)
        if retracts and sequence in self.running:
            self.waiting.append(sequence.tokens[: sequence.done])
        self._leave(sequence, keep=keep)

    @rule(count=st.integers(1, 50))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    def _make_room(self, batch: list[Sequence], ends: list[int]) -> bool:
        """Host pages for a batch: evicts, then retracts requests outside of the batch."""
        size = self.sim.page_size
        count = sum(-(-end // size) - len(x.host_pages) for x, end in zip(batch, ends, strict=True))
        self.cache.evict(count)
        for other in [x for x in self.running if x not in batch]:
            if len(self.sim.free_host_pages) < count:
                self.waiting.append(other.tokens[: other.done])
                self._leave(other, keep=False)
        return len(self.sim.free_host_pages) >= count

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data(), keep=st.booleans(), breaks=SELDOM)
    def extend(self, data: st.DataObject, keep: bool, breaks: bool) -> None:
        """Compute a chunk of one or more prompts, often the rest; the cache may take the pages."""
        batch = self._some_of(self.prefilling, data)
        rests = [x.prompt - x.done for x in batch]
        chunks = [data.draw(st.just(n) | st.integers(1, n)) for n in rests]
        starts = [x.done for x in batch]
        if not self._make_room(batch, [a + n for a, n in zip(starts, chunks, strict=True)]):
            return
        parts = list(zip(batch, chunks, strict=True))
        outs = self._forward(batch, breaks, lambda: self.sim.prefill(*parts))
        for sequence, start, out in zip(batch, starts, outs, strict=False):
            self._check_prefill(sequence, start, out)
            if keep:
                self.cache.insert(sequence)

    @precondition(lambda self: self.prefilling and self.running)
    @rule(data=st.data(), breaks=SELDOM)
    def extend_and_decode(self, data: st.DataObject, breaks: bool) -> None:
        """Compute chunks of prompts, and decode a token of other requests, in one forward."""
        new, rows = self._some_of(self.prefilling, data), self._some_of(self.running, data)
        lengths = [data.draw(st.integers(1, x.prompt - x.done)) for x in new]
        starts, batch = [x.done for x in new], [*new, *rows]
        added = [*lengths, *(1 for _ in rows)]
        if not self._make_room(batch, [x.done + n for x, n in zip(batch, added, strict=True)]):
            return
        self.selections.clear()
        parts = list(zip(new, lengths, strict=True))
        outs = self._forward(batch, breaks, lambda: self.sim.mixed(parts, *rows))
        if breaks:
            return
        for sequence, start, out in zip(new, starts, outs[:-1], strict=True):
            self._check_prefill(sequence, start, out)
        for row, sequence in enumerate(rows):
            self._check_decode(sequence, outs[-1][:, row])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), steps=st.integers(1, 8), breaks=SELDOM)
    def decode(self, data: st.DataObject, steps: int, breaks: bool) -> None:
        self._decode(self._some_of(self.running, data), steps, breaks)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(4, 24))
    def decode_all(self, steps: int) -> None:
        self._decode(self.running, steps, breaks=False)

    def _decode(self, batch: list[Sequence], steps: int, breaks: bool) -> None:
        for _ in range(min(steps, *(x.length - x.done for x in batch))):
            if not self._make_room(batch, [x.done + 1 for x in batch]):
                return
            self.selections.clear()
            outs = self._forward(batch, breaks, lambda: self.sim.decode(*batch))
            if breaks:
                return
            for row, sequence in enumerate(batch):
                self._check_decode(sequence, outs[:, row])

    def _forward(self, batch: list[Sequence], breaks: bool, run: Callable[[], Any]) -> Any:
        """Run a forward and note what it wrote; without results if it breaks."""
        starts, outs = [x.done for x in batch], []
        attention = self.sim.coordinator.attention

        def broken(layer: int, *args: Any) -> Tensor:
            if layer == 1:
                raise Broken
            return attention(layer, *args)

        if breaks:  # After its first layer.
            self.sim.coordinator.attention = broken
        try:
            outs = run()
        except Broken:
            # The scheduler answers the batch's requests with an error.
            self.sim.coordinator.forward_abort()
        finally:
            self.sim.coordinator.attention = attention
        self.new.clear()
        self.cache.replaced.difference_update(x.slot for x in batch)
        for sequence, start in zip(batch, starts, strict=True):
            computed = range(start, sequence.done)
            self.contents.write(sequence, computed, 1 if breaks else self.sim.layers)
            self.written += len(computed)
            if breaks:
                self._leave(sequence, keep=False)
        if not breaks:
            moved = self.sim.coordinator.stats().written_bytes
            assert moved == self.written * self.sim.manager.host.format.token_bytes
        return outs

    def _check_prefill(self, sequence: Sequence, start: int, out: Tensor) -> None:
        """The chunk's outputs ``[L, n, Hq, D]`` are dense attention, unless the model is sparse."""
        if self.sim.algorithm.indexer and sequence.done > self.sim.budget:
            return
        for layer in range(self.sim.layers):
            for position in {start, (start + sequence.done) // 2, sequence.done - 1}:
                kept = [list(range(position + 1))] * self.sim.q_heads
                expected = self.contents.attention(sequence, layer, position, kept)
                got = out[layer, position - start].double()
                where = f"slot {sequence.slot}, layer {layer}, position {position}"
                assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5), where

    def _check_decode(self, sequence: Sequence, out: Tensor) -> None:
        """The step's outputs ``[L, Hq, D]`` are attention over what was selected, or over all."""
        for layer in range(self.sim.layers):
            pages = self._attended(sequence, layer)
            position = sequence.done - 1
            if "tail_estimate" in self.sim.extensions:
                expected = self.contents.attention_with_means(sequence, layer, position, pages)
            else:
                kept = [self._positions(x, position) for x in pages]
                expected = self.contents.attention(sequence, layer, position, kept)
            got, where = out[layer].double(), f"slot {sequence.slot}, layer {layer}"
            assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5), where

    def _positions(self, pages: list[int], position: int) -> list[int]:
        """Those of full pages and of the tail page, which may lose against full pages."""
        kept = positions_of(pages, position, self.sim.page_size)
        loses = self.sim.algorithm.ranks_tail and len(pages) == self.sim.policy.max_pages
        return kept[: len(pages) * self.sim.page_size] if loses else kept

    def _attended(self, sequence: Sequence, layer: int) -> list[list[int]]:
        """Full pages that each query head attends."""
        own = layer - (layer in self.sim.unindexed)  # Or of the layer before.
        slots, selection = self.selections.get(own, ([], None))
        full = (sequence.done - 1) // self.sim.page_size
        if sequence.slot not in slots:
            return [list(range(full))] * self.sim.q_heads
        policy = self.sim.policy
        rows = selection.pages[slots.index(sequence.slot)].tolist()
        chosen = [[p for p in row if p >= 0] for row in rows]
        for pages in chosen:
            if full <= policy.budget_pages:
                assert pages == list(range(full))
            forced = {*range(policy.num_sink_pages), *range(full - policy.num_recent_pages, full)}
            assert forced & {*range(full)} <= set(pages) <= {*range(full)}
            assert len(set(pages)) == len(pages) <= policy.max_pages
        return [chosen[head * policy.heads // self.sim.q_heads] for head in range(self.sim.q_heads)]

    @invariant()
    def host_pool_is_the_dictionary(self) -> None:
        self.contents.check_host()

    @invariant()
    def resident_pages_are_their_host_pages(self) -> None:
        for sequence in self.live:
            if sequence.slot not in self.new | self.cache.replaced:
                for layer in range(self.sim.layers):
                    self._check_rows(sequence, layer)

    def _check_rows(self, sequence: Sequence, layer: int) -> None:
        device, heads = self.sim.manager.device, self.sim.policy.heads
        host = [bytes_of(x) for x in self.sim.manager.host.stored(layer).tensors]
        state, capacities = device.state(layer), self.sim.manager.residency.capacities
        held, size = int(capacities.held[sequence.slot]), self.sim.page_size
        full, tail = divmod(sequence.done, size)
        for head in range(heads):
            row = sequence.slot * heads + head
            own = slice(None) if heads == 1 else [head * self.sim.kv_heads // heads]
            assert device.capacity[row] == held
            pages, order, places = (x[row].tolist() for x in state[:3])
            assert sorted(order[:held]) == list(range(held))
            assert {*pages[held:], *order[held:], *places[held:]} <= {-1}
            resident = {page: place for page, place in zip(pages, places, strict=True) if page >= 0}
            assert len(resident) == sum(page >= 0 for page in pages), "a page is there twice"
            assert set(resident) <= set(range(full))
            table = torch.tensor(sequence.host_pages)
            last = int(device.tail_pages[layer, row])
            for there, here in zip(device.stored(layer).tensors, host, strict=True):
                there = bytes_of(there[[*resident.values(), last]])
                if resident:
                    expected = here[table[list(resident)]][:, own]
                    assert torch.equal(there[:-1], expected), f"layer {layer}, row {row}"
                if tail:
                    expected = here[sequence.host_pages[full], own, :tail]
                    assert torch.equal(there[-1, :, :tail], expected), f"tail of row {row}"

    @invariant()
    def every_device_page_has_one_owner(self) -> None:
        device = self.sim.manager.device
        for layer in range(self.sim.layers):
            places = device.state(layer).device_pages
            free = device.free_pages[layer, : device.num_free[layer]]
            owned = torch.cat([places[places >= 0], free, device.tail_pages[layer]])
            assert torch.equal(owned.sort().values, torch.arange(owned.numel()).int())
            assert owned.numel() == device.stored(layer).k.shape[0]

    @invariant()
    def live_requests_are_known(self) -> None:
        live = self.sim.manager.residency.capacities.live.nonzero()[0]
        assert set(live.tolist()) == {x.slot for x in self.live}

    @invariant()
    def pages_are_summarized(self) -> None:
        """What is kept of a full page is what any other request with this page would keep."""
        size, kept = self.sim.page_size, page_tensors(self.sim)
        for sequence in self.live:
            for index in range(sequence.done // size):
                tokens = self.contents.tokens(sequence, range(index * size, (index + 1) * size))
                for name, expected in self.pages.page(tokens).items():
                    got = kept[name][:, sequence.host_pages[index]]
                    assert torch.equal(bytes_of(got), bytes_of(expected)), f"{name}, page {index}"

    def teardown(self) -> None:
        """When all requests have ended, nothing is held."""
        for sequence in tuple(self.live):
            self._leave(sequence, keep=False)
        nobody = np.empty(0, dtype=np.int64)
        self.sim.manager.start_forward(nobody, nobody)
        self.every_device_page_has_one_owner()
        device = self.sim.manager.device
        assert (device.num_free == device.free_pages.shape[1]).all()
        assert not device.capacity.any()
        self.cache.evict(self.sim.host_pages)
        assert sorted(self.sim.free_host_pages) == list(range(1, self.sim.host_pages))


@pytest.mark.sweeps
@pytest.mark.parametrize("name", ENGINES)
def test_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "quest-reference":
        monkeypatch.setattr(operation, "cpu_library", lambda: None)
    machine = type(name, (Requests,), {"name": name})
    steps = settings(max_examples=sized(4, 70), stateful_step_count=sized(20, 50))
    run_state_machine_as_test(machine, settings=steps)
