"""``hisparse bench speculate`` on a tiny model."""

from __future__ import annotations

import pytest

from hisparse.cli import main
from hisparse.transformers import disable
from hisparse_bench.speculate import WARMUPS, SpeculateBench
from tests.transformers.hf_models import model, prompt

CONTEXT, STEPS = 300, 12


@pytest.mark.parametrize("kind", ["step", "layer"])
def test_pages_are_waited_for_or_brought_in_ahead(kind: str) -> None:
    net = model("llama")
    bench = SpeculateBench(
        model=net,
        ids=prompt(CONTEXT + WARMUPS + STEPS, seed=1)[0].tolist(),
        context=CONTEXT,
        budget=96,
        algorithm="quest",
        kinds=[kind],
        thresholds=[-1.0, 1.0],
        num_steps=STEPS,
    )
    try:
        case = bench.run()
    finally:
        disable(net)
    assert case.gate == "passed"
    plain, never, always = "selects", f"{kind} above -1", f"{kind} above 1"
    assert [result.impl for result in case.results] == [plain, never, always]
    late, early, corrected = (
        case.params[name] for name in ("late_pages", "early_pages", "corrected_ratio")
    )
    assert late[plain] > 0 == early[plain]
    # Nobody predicts the first layer's query.
    assert late[never] <= (0 if kind == "step" else late[plain] / 2)
    assert early[never] > 0
    assert corrected == {plain: 1.0, never: 0.0, always: 1.0}
    assert case.params["selected_pages"][never] == case.params["selected_pages"][plain]


def test_a_threshold_that_is_no_cosine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "speculate", "--threshold", "high"])
    assert "got 'high', expected cosines such as" in capsys.readouterr().err
