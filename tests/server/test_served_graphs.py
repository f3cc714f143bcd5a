"""SGLang's own runner of CUDA graphs captures and replays decode steps; the tokens stay the same.

There is no GPU: graphs are recorded operations, of the whole model (``graphs_on_cpu.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from checks import counting
from harness import Server
from plugins import make_dummy_runs, make_plugin
from tiny_models import INDEX_TOP_K, tiny_model
from workload import tokens

COUNTS = ("hit_pages", "miss_pages", "selected_tokens", "written_bytes")
#: The recorder sees operations one by one, not what a compiler makes of some.
QUICK = {"TORCHDYNAMO_DISABLE": "1"}
TOKENS = {"page_size": 1, "num_sink_pages": 0, "num_recent_pages": 0, "budget": INDEX_TOP_K}


def ask(server: Server) -> tuple[list[list[int]], list[float]]:
    """Tokens of requests one by one and of several at once, and what was counted for the former."""
    server.flush_cache()
    with counting(server, *COUNTS) as counted:
        answers = [server.generate(tokens(n, seed=n), 40) for n in (30, 300, 701)]
        # The last request is not counted before its end.
        server.flush_cache()
    # Within the budget, beyond it, and from one to the other: 3 of a size of 4, then fewer.
    answers += server.generate_many([tokens(n, seed=n + 1) for n in (20, 110, 500)], 60)
    return [answer.ids for answer in answers], counted


@pytest.mark.parametrize(
    "kind, settings",
    [
        pytest.param(
            "llama",
            {
                "algorithm": "sketch",
                "budget": 128,
                "min_sparse_context": 400,
                "dense_layers": [1],
                "max_row_capacity": 640,
            },
            id="sketch-and-dense-contexts",
        ),
        pytest.param("deepseek_v32", TOKENS | {"algorithm": "dsa"}, id="dsa-and-experts"),
    ],
)
def test_replayed_steps_give_the_eager_tokens(
    kind: str, settings: dict[str, Any], log_dir: Path, tmp_path: Path
) -> None:
    graphs = make_plugin(
        tmp_path, "replayed_graphs:load", (Path(__file__).parent / "graphs_on_cpu.py").read_text()
    )
    config = {"host_memory": "1GiB", "device_memory": "64MB"} | settings
    switch, log = tmp_path / "eager", log_dir / f"graphs-{kind}.log"
    flags = ("--max-total-tokens", "20000", "--max-running-requests", "8")
    options = {"config": config, "env": QUICK | {"EAGER_WHILE": str(switch)}}
    options["python_path"] = [graphs, make_dummy_runs(tmp_path / "dummy-runs")]
    with Server(tiny_model(kind), log, *flags, **options) as server:
        replayed, text = ask(server), server.log()
        switch.touch()
        assert ask(server) == replayed
        assert "eager decode steps: 100\n" in server.log()
    assert "replayed decode steps: 100\n" in text
    # A dense layer that does not fit, or as many requests as no graph is for.
    assert ("eager decode steps: 10\n" in text) == (kind == "llama")
    for runner in ("EagerRunner", "DecodeCudaGraphRunner"):
        assert re.search(rf"dummy run: EXTEND of \d+ tokens by {runner}, 0 bytes written", text)
