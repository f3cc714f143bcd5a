"""A transformers cache gives the tokens of the server, at a budget far below the context."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Server
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from workload import NEW_TOKENS, PROMPTS

from hisparse.transformers import enable

#: One row cannot stay resident, in the server or in the cache.
CONFIG = {
    "budget": 128,
    "device_buffer_size": 128,
    "max_row_capacity": 256,
    "host_memory": "1GiB",
    "device_memory": "100MB",
}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tokens_are_those_of_the_server(kind: str, log_dir: Path) -> None:
    with Server(
        tiny_model(kind),
        log_dir / f"transformers-{kind}.log",
        *("--max-total-tokens", "40000"),
        config=CONFIG,
    ) as server:
        served = [server.generate(p, NEW_TOKENS).ids for p in PROMPTS.prompts]
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind)).eval()
    cache = enable(model, CONFIG, max_length=4096)
    answers = []
    for prompt in PROMPTS.prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, ids.shape[1] :].tolist())
        cache.reset()
    assert cache.stats().miss_pages > 0, "nothing was read from host memory"
    assert answers == served
