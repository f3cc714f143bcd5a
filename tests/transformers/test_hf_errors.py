"""Each rejected input raises one line that names the value got and the value expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    RwkvConfig,
    T5Config,
)

from hisparse.algorithms.quest import Quest
from hisparse.config import HiSparseConfig
from hisparse.errors import AlgorithmError, CapacityError, ConfigError, HiSparseError
from hisparse.model_config import read_model_shape
from hisparse.transformers import HiSparseCache, enable
from tests.transformers.hf_models import GREEDY, ROOMY, SMALL, continuation, prompt

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@contextmanager
def _one_line(error: type[Exception], match: str) -> Iterator[None]:
    """An error of one line that says what was expected."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DeepseekV2Config(**TINY), "'deepseek_v2' with latent attention .MLA"),
        (T5Config(), "'t5' with an encoder and cross attention"),
        (MambaConfig(hidden_size=32), "'mamba' with layers of other kinds .linear_attention"),
        (RwkvConfig(hidden_size=32), "'rwkv' with no MHA or GQA attention .num_attention_heads"),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_models_that_attend_in_another_way(config: Any, message: str) -> None:
    with _one_line(ConfigError, message):
        HiSparseCache(config, ROOMY, max_length=64)


def test_a_window_that_is_off_is_no_window() -> None:
    for config in (
        MistralConfig(**TINY, sliding_window=None),
        Qwen2Config(**TINY, use_sliding_window=False, sliding_window=16),
    ):
        assert HiSparseCache(config, ROOMY, max_length=64).get_max_length() == 64


def test_the_configuration_of_a_model_that_was_saved(tmp_path: Path) -> None:
    made = LlamaForCausalLM(LlamaConfig(**TINY)).bfloat16()
    made.save_pretrained(tmp_path)
    assert made.config.dtype == "bfloat16", "a name, which this test is about"
    HiSparseCache(made.config, SMALL, max_length=64)
    assert read_model_shape(made.config, page_size=16)[0].dtype == torch.bfloat16


def test_a_model_without_the_attention_interface_stays_as_it_is() -> None:
    net = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2))
    before = net.config._attn_implementation
    with _one_line(ConfigError, "got BloomForCausalLM, which does not attend"):
        enable(net, ROOMY, max_length=64)
    assert net.config._attn_implementation == before


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"bugdet": 64}, {}, "unknown config key 'bugdet'; did you mean 'budget'"),
        (HiSparseConfig(), {"budget": 64}, "got a HiSparseConfig and also budget, expected one of"),
        (ROOMY, {"max_batch_size": 0}, "max_batch_size: got 0, expected at least 1"),
        (ROOMY, {"max_length": 0}, "max_length: got 0, expected at least 1"),
        (ROOMY, {"dense_layers": [3]}, "dense_layers: got .3., expected layers 0 to 2"),
        (ROOMY, {"host_memory": "1MiB"}, "host_memory: got 1 MiB, but one request"),
        (
            ROOMY,
            {"device_memory": "12MB", "max_batch_size": 64},
            "max_batch_size: got 64, expected",
        ),
        (
            SMALL,
            {"host_memory": "1MiB", "max_batch_size": 8, "max_length": 1024},
            "max_tokens: got 8192, expected at most 656, which host_memory limits",
        ),
    ],
)
def test_settings_and_sizes(net: Any, config: Any, options: dict[str, Any], message: str) -> None:
    before = net.config._attn_implementation
    with pytest.raises((ConfigError, CapacityError), match=message) as error:
        enable(net, config, **{"max_length": 64} | options)
    assert "\n" not in str(error.value)
    assert net.config._attn_implementation == before


def test_more_rows_than_there_is_room_for(net: Any) -> None:
    cache = enable(net, ROOMY, max_batch_size=2, max_length=64)
    with _one_line(CapacityError, r"got 3 new rows, expected at most 2"):
        continuation(net, prompt(9, seed=1, batch=3), 3, cache)
    assert len(continuation(net, prompt(9, seed=1, batch=2), 3, cache)) == 2
    with pytest.raises(CapacityError, match="max_batch_size is 2 and counts .* its forks"):
        cache.fork()
    with _one_line(HiSparseError, "got 3 rows, expected the 2 that the cache"):
        continuation(net, prompt(20, seed=1, batch=3), 3, cache)


def test_longer_than_max_length(net: Any) -> None:
    cache = enable(net, ROOMY, max_length=64)
    with pytest.raises(CapacityError, match=r"got 65 columns, expected at most max_length .64"):
        continuation(net, prompt(60, seed=1), 10, cache)
    assert cache.get_seq_length() == 64
    with _one_line(CapacityError, "got 74 columns"):
        continuation(net, prompt(74, seed=1), 1, cache)


def test_max_length_is_the_models_if_not_given(net: Any) -> None:
    assert enable(net, SMALL).get_max_length() == net.config.max_position_embeddings == 8192


def _generate(net: Any, **options: Any) -> None:
    cache = enable(net, ROOMY, max_batch_size=2, max_length=64)
    net.generate(prompt(9, seed=1), past_key_values=cache, max_new_tokens=5, **options, **GREEDY)


def _other_cache(net: Any) -> None:
    enable(net, ROOMY, max_length=64)
    continuation(
        net, prompt(9, seed=1), 3, HiSparseCache(LlamaConfig(**TINY), ROOMY, max_length=64)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net: _generate(net, num_beams=2), "got 2 beams, expected num_beams=1"),
        (
            lambda net: _generate(net, prompt_lookup_num_tokens=3),
            "assisted generation.* expected generate without",
        ),
        (
            lambda net: net(prompt(9, seed=1), past_key_values=enable(net, ROOMY, max_length=64)),
            "requires_grad=True.* expected inference",
        ),
        (
            lambda net: continuation(
                net, prompt(9, seed=1), 3, HiSparseCache(net, ROOMY, max_length=64)
            ),
            "layer 0: got attention without hisparse",
        ),
        (
            lambda net: (
                enable(net, ROOMY, max_length=64) and continuation(net, prompt(9, seed=1), 3)
            ),
            "keys without a HiSparseCache, expected .*: pass",
        ),
        (_other_cache, "heads and width of q .4, 32., expected .2, 16."),
    ],
    ids=["beams", "prompt lookup", "gradients", "not enabled", "no cache", "another model's"],
)
def test_ways_to_run_a_model(net: Any, call: Callable[[Any], object], message: str) -> None:
    with _one_line(HiSparseError, message):
        call(net)


def test_rows_are_not_moved(net: Any) -> None:
    cache = enable(net, ROOMY, max_length=64)
    for call, message in (
        (lambda: cache.batch_repeat_interleave(3), r"expected cache.fork\(3\)"),
        (lambda: cache.batch_select_indices(torch.tensor([0])), r"got \[0\], expected one or more"),
        (lambda: cache.crop(5), "crop: got 5, expected 0 to 0"),
        (lambda: cache.fork(0), "fork: got 0 rows for each row, expected at least 1"),
    ):
        with _one_line(HiSparseError, message):
            call()


def test_masks(net: Any) -> None:
    cache = enable(net, ROOMY, max_batch_size=2, max_length=64)
    ids, mask = prompt(9, seed=1, batch=2), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad():
        with _one_line(HiSparseError, r"got shape .2, 1, 9, 9., expected .2, 9."):
            net(ids, attention_mask=torch.ones(2, 1, 9, 9).bool(), past_key_values=cache)
        net(ids[:1], past_key_values=cache)
        cache.reset()
        net(ids, attention_mask=mask, past_key_values=cache)
        for changed, message in (
            (torch.ones(2, 10), "row 1 has 9 tokens in the 9 cached columns, expected the same 5"),
            (torch.ones(2, 9), r"got shape .2, 9., expected .2, 10.: 9 cached columns and 1 new"),
        ):
            with _one_line(HiSparseError, message):
                net(ids[:, :1], attention_mask=changed, past_key_values=cache)
    assert cache.row_lengths == (9, 5)


def test_a_scale_that_a_configuration_does_not_tell() -> None:
    # Random weights may choose any token, the one that ends an answer too.
    config = GraniteConfig(**TINY, attention_multiplier=0.5, eos_token_id=None)
    net = GraniteForCausalLM(config).eval()
    enable(net, ROOMY, max_length=64)
    cache = HiSparseCache(net.config, ROOMY, max_length=64)
    with _one_line(HiSparseError, "softmax scale 0.5, expected 0.25; make the"):
        continuation(net, torch.tensor([[1, 2, 3]]), 3, cache)
    cache = HiSparseCache(net, ROOMY, max_length=64)
    assert len(continuation(net, torch.tensor([[1, 2, 3]]), 3, cache)[0]) == 3


@torch.no_grad()
def test_a_failing_algorithm_is_named_and_the_cache_goes_on_as_if_it_had_not_failed(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that failed leaves nothing behind, neither columns nor half-loaded pages."""
    config = SMALL | {"algorithm": "quest", "checked": False}
    monkeypatch.setattr(Quest, "recordable", False)  # An author's algorithm runs in every step.
    ids = torch.cat([prompt(150, seed=seed) for seed in (1, 2)])

    def decode(fail_at: int | None) -> list[list[int]]:
        retrieve, chosen = Quest.retrieve_topk, []
        with enable(net, config, max_batch_size=2, max_length=256) as cache:
            logits = net(ids, past_key_values=cache).logits
            for step in range(10):
                chosen.append(logits[:, -1].argmax(-1).tolist())
                token = torch.tensor(chosen[-1])[:, None]
                if step == fail_at:

                    def wrong(self: Quest, queries: Any, layer_id: int, view: Any) -> Any:
                        pages, lengths = retrieve(self, queries, layer_id, view)
                        if layer_id == 1:
                            pages[1, 0, -1] = 999
                        return type(retrieve(self, queries, layer_id, view))(pages, lengths)

                    monkeypatch.setattr(Quest, "retrieve_topk", wrong)
                    with pytest.raises(AlgorithmError, match="Quest .*, layer 1, request 1, head"):
                        net(token, past_key_values=cache)
                    monkeypatch.setattr(Quest, "retrieve_topk", retrieve)
                logits = net(token, past_key_values=cache).logits
        return chosen

    assert decode(fail_at=4) == decode(fail_at=None)
