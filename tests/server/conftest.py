"""Dense answers, and files of one test run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from fork_server import fork_server, is_started
from hugging_face import greedy_batch, load
from tiny_models import tiny_model
from workload import Case, DenseTokens

from tests.sizes import MODES


@pytest.fixture(scope="session", autouse=True)
def _end_of_fork_server() -> Iterator[None]:
    yield
    if is_started():
        fork_server().stop()


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers write their logs."""
    return tmp_path_factory.mktemp("server-logs")


@pytest.fixture(scope="session")
def dense_tokens() -> DenseTokens:
    """``(model kind, case)`` to the tokens that transformers gives, each prompt alone."""
    model = cache(lambda kind: load(tiny_model(kind)))
    found: dict[tuple[str, int], list[list[int]]] = {}

    def dense(kind: str, case: Case) -> list[list[int]]:
        key = kind, id(case)
        if key not in found:
            # Prompts of one length are a batch, which is quicker.
            one_length = len(set(map(len, case.prompts))) == 1
            batches = [case.prompts] if one_length else [[prompt] for prompt in case.prompts]
            answers = [
                ids for x in batches for ids in greedy_batch(model(kind), x, case.new_tokens)
            ]
            # A model that repeats itself, or says the same to every prompt, would hide errors.
            assert len(set(map(tuple, answers))) == len(answers)
            assert min(len(set(answer)) for answer in answers) > 10
            found[key] = answers
        return found[key]

    return dense


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``modes`` runs only in that part: sweeps have another case of its mode."""
    if not MODES:
        for item in items:
            if item.get_closest_marker("modes"):
                item.add_marker(pytest.mark.skip(reason="more servers: make test-all PART=modes"))
