"""``hisparse bench prefetch`` on a tiny model."""

from __future__ import annotations

from hisparse.transformers import disable
from hisparse_bench.prefetch import WARMUPS, PrefetchBench
from tests.command import Command
from tests.transformers.hf_models import model, prompt

CONTEXT, STEPS = 300, 12


def test_pages_are_waited_for_or_brought_in_ahead() -> None:
    net = model("llama")
    bench = PrefetchBench(
        model=net,
        ids=prompt(CONTEXT + WARMUPS + STEPS, seed=1)[0].tolist(),
        context=CONTEXT,
        budget=96,
        algorithm="quest",
        min_cosines=[-1.0, 1.0],
        num_steps=STEPS,
    )
    try:
        case = bench.run()
    finally:
        disable(net)
    assert case.gate == "passed"
    plain, never, always = "off", "min_cosine -1", "min_cosine 1"
    assert [result.impl for result in case.results] == [plain, never, always]
    late, early, corrected = (
        case.params[name] for name in ("late_pages", "early_pages", "corrected_ratio")
    )
    assert late[plain] > 0 == early[plain]
    assert late[never] == 0 < early[never]
    assert corrected == {plain: 1.0, never: 0.0, always: 1.0}
    assert case.params["selected_pages"][never] == case.params["selected_pages"][plain]


def test_a_min_cosine_that_is_no_number_is_refused(command: Command) -> None:
    line = command.refused("bench", "prefetch", "--min-cosine", "high")
    assert "got 'high', expected cosines such as" in line
