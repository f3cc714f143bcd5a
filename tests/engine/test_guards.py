"""Faults of algorithms and extensions: the error names them, or a counter shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.adapters.torch import TorchAdapter
from hisparse.algorithms import DecodeStep, Representation, SelectionPolicy
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.engine.extensions.tail_estimate import TailEstimate
from hisparse.errors import AlgorithmError, KernelError
from hisparse.kernels import operation
from hisparse.testing import Simulator
from hisparse.testing.recording import ReplayingSimulator
from hisparse.types import Selection
from tests.engine.test_restored_pages import LATENTS
from tests.testing.faulty_algorithms import Right

Retrieve = Callable[[Selection, DecodeStep], Any]


@dataclass(frozen=True, kw_only=True)
class Changed(Right):
    """Passes each selection through ``change``, in layer 1."""

    change: Retrieve = lambda selection, step: selection

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        selection = super().retrieve_topk(queries, layer_id, step)
        return self.change(selection, step) if layer_id == 1 else selection


def decode(algorithm: Right, steps: int = 1, **settings: Any) -> Simulator:
    """Two requests, of which the second is the longer one."""
    sim = Simulator(
        algorithm=algorithm, **{"budget": 64, "device_buffer": 128, "checked": False} | settings
    )
    requests = [sim.request(slot, 400, seed=slot) for slot in (1, 2)]
    sim.prefill((requests[0], 200), (requests[1], 380))
    for _ in range(steps):
        sim.decode(*requests)
    return sim


def with_page(selection: Selection, entry: int, page: Tensor | int) -> Selection:
    pages = selection.pages.clone()
    pages[0, 0, entry] = page
    return Selection(pages, selection.lengths)


class Namesake(Quest):
    """Keeps values of its own by the names that the engine gives to shared values."""

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        for name in ("tails of layers", "tail slots", "tail pages", "step rows", "window 20"):
            assert step.once(name, lambda name=name: f"my {name}") == f"my {name}"
        return super().retrieve_topk(queries, layer_id, step)


def test_an_algorithm_may_use_the_names_of_the_engine() -> None:
    outs = []
    for algorithm in (Quest(), Namesake()):
        sim = Simulator(algorithm=algorithm, layers=3, windows=(0, 20, 0))
        request = sim.request(1, 180, seed=1)
        sim.prefill((request, 150))
        outs.append(torch.cat([sim.decode(request) for _ in range(20)]))
    assert torch.equal(*outs)


MALFORMED: dict[str, tuple[Retrieve, str]] = {
    "none": (lambda s, step: None, r"got None, expected Selection\(pages \[2, 2, K\] int32"),
    "tuple": (lambda s, step: tuple(s), r"got \(\[2, 2, 7\] int32, \[2, 2\] int32\), expected"),
    "dtype": (lambda s, step: Selection(s.pages.long(), s.lengths), r"\[2, 2, 7\] int64, "),
    "request": (lambda s, step: Selection(s.pages[:1], s.lengths), r"Selection\(\[1, 2, 7\] int"),
    "wide": (
        lambda s, step: Selection(torch.cat([s.pages, s.pages], -1), s.lengths),
        r"got Selection\(\[2, 2, 14\] int32, .*, expected .* with K at most 7",
    ),
}
NO_PAGE: dict[str, Retrieve] = {
    "tail": lambda s, step: with_page(s, -1, step.num_pages[0]),
    "another-requests": lambda s, step: with_page(s, -1, step.num_pages[0] + 3),
    "beyond-all": lambda s, step: with_page(s, -1, 10**6),
    "none": lambda s, step: with_page(s, 2, -1),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_selection_of_the_wrong_form_is_an_error(change: Retrieve, message: str) -> None:
    with pytest.raises(AlgorithmError, match=message) as error:
        decode(Changed(change=change))
    assert str(error.value).startswith("Changed (test_guards), layer 1, retrieve_topk: got ")


@pytest.mark.parametrize("change", NO_PAGE.values(), ids=NO_PAGE)
def test_a_page_that_a_request_does_not_have_is_an_error(change: Retrieve) -> None:
    """The first of them would be another request's tokens: the table is as wide as the longest."""
    with pytest.raises(
        AlgorithmError, match=r"expected ascending pages below 25, then -1"
    ) as error:
        decode(Changed(change=change))
    assert str(error.value).startswith("Changed (test_guards), layer 1, request 0, head 0: got a ")


REPEATED: dict[str, Retrieve] = {
    "twice": lambda s, step: with_page(s, 2, s.pages[0, 0, 1]),
    "length": lambda s, step: Selection(s.pages, s.lengths - torch.tensor([[1, 0], [0, 0]]).int()),
}


@pytest.mark.parametrize("change", REPEATED.values(), ids=REPEATED)
def test_malformed_selections_are_counted_and_an_error_if_checked(change: Retrieve) -> None:
    assert decode(Changed(), 3).coordinator.stats().malformed_selections == 0
    assert decode(Changed(change=change), 3).coordinator.stats().malformed_selections == 3
    with pytest.raises(
        AlgorithmError, match=r"Changed \(test_guards\), layer 1, request 0, head 0"
    ):
        decode(Changed(change=change), checked=True)


@pytest.mark.parametrize("change", NO_PAGE.values(), ids=NO_PAGE)
def test_where_nothing_raises_the_row_attends_its_tail_alone(
    change: Retrieve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: attention reads no page -1, which would be memory of another request."""
    monkeypatch.setattr(operation, "cpu_library", lambda: None)
    attended = []

    def attend(self: TorchAdapter, q: Tensor, kv: Any, table: Tensor, *others: Any) -> Any:
        attended.append((table, others[0]))
        return original(self, q, kv, table, *others)

    original = TorchAdapter.attend
    monkeypatch.setattr(TorchAdapter, "attend", attend)
    stats = decode(Changed(change=change), 3).coordinator.stats()
    assert stats.malformed_selections == 3
    for table, seq_lens in attended:
        entry = torch.arange(table.shape[1])
        assert (table[entry * 8 < seq_lens[:, None]] >= 0).all()
    # Two rows for each request; its tail page has one token.
    assert [seq_lens[0] for _, seq_lens in attended[:2]] == [7 * 8 + 1, 1]
    assert attended[1][1][1] == 7 * 8 + 1


@dataclass(frozen=True, kw_only=True)
class Scores(Right):
    """Scores a page of the first request with ``value`` in each layer."""

    value: float = 0.0
    raises: bool = False

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        scores = super().score(query, summaries)
        place = torch.zeros_like(scores, dtype=torch.bool)
        place[0, 0, 5] = True
        return scores.masked_fill(place, self.value)


@pytest.mark.parametrize(
    ("value", "counted"),
    [(torch.nan, True), (torch.inf, True), (-torch.inf, False), (3e38, False)],
)
def test_scores_that_are_no_numbers_are_counted_and_an_error_if_checked(
    value: float, counted: bool
) -> None:
    stats = decode(Scores(value=value), 3).coordinator.stats()
    # One row of one request in each of two layers.
    assert stats.invalid_scores == 6 * counted
    if counted:
        match = r"Scores \(test_guards\), layer 0, retrieve_topk: got NaN or \+inf among the "
        with pytest.raises(AlgorithmError, match=rf"{match}scores of 1 of 4 selections, expected"):
            decode(Scores(value=value), checked=True)
    else:
        decode(Scores(value=value), checked=True)


def test_captured_steps_count_too() -> None:
    """A graph with padding counts the real requests and their real pages."""
    for kind in (Simulator, ReplayingSimulator):
        sim = kind(algorithm=Scores(value=torch.nan), checked=False)
        requests = [sim.request(slot, 400, seed=slot) for slot in (1, 2, 3)]
        sim.prefill(*((request, 200) for request in requests))
        for _ in range(3):
            sim.decode(*requests)
        assert sim.coordinator.stats().invalid_scores == 6
        assert sim.coordinator.stats().malformed_selections == 0


def fails(*args: Any, **kwargs: Any) -> Any:
    return {}["planted"]


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("retrieve_topk", "layer 0, retrieve_topk"),
        ("score", "layer 0, retrieve_topk"),
        ("construct_representations", "layer 0, construct_representations"),
        ("select_prefill", "layer 0, select_prefill"),
        ("update_representations", "layer 0, update_representations"),
        ("initialize", "initialize"),
    ],
)
def test_an_exception_names_the_method_and_keeps_its_cause(
    method: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(self: Right, *args: Any) -> Any:
        return fails()

    raising.__name__ = method
    monkeypatch.setattr(Right, method, raising)
    line = r"got KeyError: 'planted' \(test_guards.py, line \d+\), expected no exception"
    with pytest.raises(AlgorithmError, match=line) as error:
        decode(Right(), 12)
    assert f"Right ({Right.__module__}), {where}: got" in str(error.value)
    assert isinstance(error.value.__cause__, KeyError)


WRONG: dict[str, tuple[str, Callable[..., Any], str]] = {
    "refused-by-a-kernel": (
        "score", lambda *_: torch.zeros(2, 3, 48), "layer 0, retrieve_topk: .* 3 heads",
    ),
    "no-scores": ("score", lambda *_: None, r"layer 0, score_pages: got .*\[2, heads, 48\]"),
    "few-scores": (
        "score", lambda *_: torch.zeros(2, 2, 5), r"layer 0, score_pages: got .*\[2, heads, 48\]",
    ),
    "scores-without-heads": (
        "score", lambda *_: torch.zeros(2, 48), r"layer 0, score_pages: got .*\[2, heads, 48\]",
    ),
    "text": (
        "select_prefill", lambda *_: "text", r"select_prefill: got str, .*positions \[200, K\]",
    ),
    "a-vector": (
        "select_prefill", lambda *_: torch.zeros(3), r"select_prefill: got .*positions \[200, K\]",
    ),
    "few-positions": (
        "select_prefill",
        lambda *_: torch.zeros(3, 4).int(),
        r"select_prefill: got .*positions \[200, K\] int32",
    ),
    "more-positions-than-declared": (
        "select_prefill",
        lambda *_: torch.zeros(200, 4).int(),
        r"expected positions \[200, K\] int32 with K at most 0 \(prefill_choices\)",
    ),
    "no-representations": ("representations", fails, "representations: got KeyError"),
}  # fmt: skip


def test_what_a_model_s_indexer_gives_is_declared() -> None:
    """A store would lose it otherwise."""

    class OfKV(DSA):
        def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
            every = super().representations(policy)
            return {name: replace(each, source="kv") for name, each in every.items()}

    with pytest.raises(AlgorithmError, match="index_key, index_scale of source 'kv', expected"):
        Simulator(algorithm=OfKV(), **LATENTS)


@pytest.mark.parametrize(("method", "returned", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_names_the_algorithm(
    method: str, returned: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replacement(self: Right, *args: Any) -> Any:
        return returned(*args)

    replacement.__name__ = method
    monkeypatch.setattr(Right, method, replacement)
    with pytest.raises(AlgorithmError, match=f"Right .*, {message}") as error:
        decode(Right())
    if "3 heads" in message:
        assert isinstance(error.value.__cause__, KernelError)


@pytest.mark.parametrize("method", ["before_layer", "refine_selection", "store_pages"])
def test_an_exception_of_an_extension_names_it(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(self: TailEstimate, *args: Any) -> Any:
        return fails()

    raising.__name__ = method
    monkeypatch.setattr(TailEstimate, method, raising)
    owner = r"TailEstimate \(hisparse.engine.extensions.tail_estimate\)"
    match = rf"{owner}, layer 0, {method}: got KeyError"
    with pytest.raises(AlgorithmError, match=match):
        decode(Right(), extensions={"tail_estimate": True})
