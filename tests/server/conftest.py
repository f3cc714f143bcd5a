"""Dense answers of SGLang's own ``torch_native`` backend, and files of one test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import fork_server, is_started
from harness import Answer, Server
from tiny_models import tiny_model
from workload import PROMPTS, RETRACTED, SHARED, Case

from tests.sizes import MODES

DenseTokens = Callable[[str, Case], list[list[int]]]


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
def dense_tokens(log_dir: Path) -> DenseTokens:
    """``(model kind, case)`` to the tokens that ``torch_native`` gives, each prompt alone."""
    answers: dict[str, list[list[Answer]]] = {}
    cases = [PROMPTS, SHARED, RETRACTED]

    def dense(kind: str, case: Case) -> list[list[int]]:
        if kind not in answers:
            log = log_dir / f"dense-{kind}.log"
            flags = ("--max-total-tokens", "40000", "--disable-radix-cache")
            with Server(tiny_model(kind), log, *flags, backend="torch_native") as server:
                answers[kind] = [
                    [server.generate(prompt, each.new_tokens) for prompt in each.prompts]
                    for each in (cases if kind == "llama" else cases[:2])
                ]
        return [answer.ids for answer in answers[kind][cases.index(case)]]

    return dense


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``modes`` runs in that part alone: sweeps have another case of its mode."""
    if not MODES:
        for item in items:
            if item.get_closest_marker("modes"):
                item.add_marker(pytest.mark.skip(reason="more servers: make test-all PART=modes"))
