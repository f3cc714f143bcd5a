"""``hisparse plan`` of hybrids, whose other layers keep states on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import KimiLinearConfig
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from hisparse.errors import ConfigError
from hisparse.plan.shapes import shape_per_rank, state_bytes
from tests.command import Command
from tests.plan.test_plan import LATENT, MEMORY, SMALL

#: Layers as published of Qwen's first model of the kind, and 36 of linear attention beside them.
QWEN4 = Qwen4ExpTextConfig(
    **SMALL | {"num_hidden_layers": 48, "num_attention_heads": 24, "head_dim": 256},
    layer_types=(["linear_attention"] * 3 + ["indexed_attention"]) * 12,
    indexer_n_heads=4,
    indexer_kv_heads=1,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["--config", '{"algorithm": "qsa", "page_size": 4, "dense_layers": [3]}'],
         "dense_layers: got [3] in the plan of qwen4_exp_text"),
        (["--config", '{"algorithm": "qsa"}'],
         "page_size: got 16, expected 4, the tokens that qwen4_exp_text"),
    ],
)  # fmt: skip
def test_what_a_hybrid_is_not_planned_with(
    line: list[str], reason: str, tmp_path: Path, command: Command
) -> None:
    QWEN4.save_pretrained(tmp_path)
    flags = ["--model", str(tmp_path), *MEMORY, "--weights", "100MiB", *line]
    assert reason in command.refused("plan", *flags)


def test_the_plan_counts_index_keys_the_pending_tokens_and_states(
    tmp_path: Path, command: Command
) -> None:
    QWEN4.save_pretrained(tmp_path)
    line = ["--model", str(tmp_path), *MEMORY, "--weights", "100MiB", "--device-memory", "80GiB"]
    found = command.json("plan", *line, "--context", "4096")
    assert (found["algorithm"], found["budget"]) == ("qsa", 2048)
    ours = found["hisparse"]
    assert ours["host_bytes_per_token"] == 12 * 2048
    assert ours["device_bytes_per_token"] == 12 * 64 + 12 * 2048 // 512
    assert f"--max-mamba-cache-size {5 * ours['max_requests']} " in found["command"]
    assert ours["device_bytes_per_request"] > 5 * state_bytes(QWEN4, 1) + 12 * 1120
    assert "states of a request" in found["estimate"]["assumptions"][-1]


def test_states_of_unknown_size() -> None:
    kinds = ["linear_attention", "full_attention"]
    config = KimiLinearConfig(**SMALL | LATENT | {"num_hidden_layers": 2, "layer_types": kinds})
    with pytest.raises(ConfigError, match="'kimi_linear' with layers of linear attention"):
        shape_per_rank(config, 16, 1)
