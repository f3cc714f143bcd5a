"""A context is saved, and a later process continues from the file without a prefill."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hisparse.algorithms import ALGORITHMS, PageScoreAlgorithm
from hisparse.errors import CapacityError, ConfigError, HiSparseError
from hisparse.transformers import HiSparseCache, disable, enable, tensor_file
from hisparse.types import KVSpec
from tests.server.tiny_models import tiny_model
from tests.transformers.hf_models import SMALL, continuation, left_padded, model, prompt

LENGTH = 333


@dataclass(frozen=True, kw_only=True)
class Norms(PageScoreAlgorithm):
    """Keeps pages with large keys; its representations differ from Quest's."""

    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        return (kv.num_kv_heads,)

    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        return keys.norm(dim=-1).masked_fill(~mask[..., None], 0).amax(dim=1)

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        return summaries.transpose(1, 2)


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ALGORITHMS._entries, "norms", Norms)
    return "norms"


@pytest.fixture
def net() -> Iterator[Any]:
    yield model("llama")
    disable(model("llama"))


@pytest.fixture
def stored(net: Any, tmp_path: Path) -> Path:
    """One row of ``LENGTH`` tokens with their ids."""
    ids = prompt(LENGTH, seed=1)
    cache = enable(net, SMALL, max_length=400)
    with torch.no_grad():
        net(ids, past_key_values=cache)
    cache.save(tmp_path / "context.safetensors", ids)
    return tmp_path / "context.safetensors"


def _asked(net: Any, cache: HiSparseCache, seen: list[int] | None = None) -> list[list[int]]:
    """Answers to a question about the stored row; ``seen`` gets the columns of each forward."""
    count = [] if seen is None else seen

    def look(_: object, args: tuple[Tensor, ...]) -> None:
        count.append(args[0].shape[1])

    hook = net.get_input_embeddings().register_forward_pre_hook(look)
    ids = torch.cat([prompt(LENGTH, seed=1), prompt(9, seed=2)], 1)
    try:
        return continuation(net, ids, 20, cache)
    finally:
        hook.remove()


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LATER = """
import sys, torch
from transformers import AutoModelForCausalLM
from hisparse.transformers import HiSparseCache, enable
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
settings = {"budget": 96, "device_buffer_size": 128, "max_row_capacity": 128}
enable(model, settings, max_length=32)
cache = HiSparseCache.load(sys.argv[2], model, settings, max_length=400)
question = torch.tensor([[int(x) for x in sys.argv[3].split(",")]])
ids = torch.cat([cache.token_ids, question], 1)
out = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, pad_token_id=0)
print(out[0, ids.shape[1]:].tolist())
"""


def test_another_process_goes_on_from_the_file(net: Any, stored: Path) -> None:
    question = ",".join(map(str, prompt(9, seed=2)[0].tolist()))
    command = [sys.executable, "-c", LATER, str(tiny_model("llama")), str(stored), question]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fresh = HiSparseCache(net, SMALL, max_length=400)
    assert done.stdout.strip() == str(_asked(net, fresh)[0])


def test_only_the_new_columns_are_computed(net: Any, stored: Path) -> None:
    fresh, columns = HiSparseCache(net, SMALL, max_length=400), []
    cache = HiSparseCache.load(stored, net, SMALL, max_length=400)
    assert _asked(net, cache, columns) == _asked(net, fresh)
    assert columns == [9] + [1] * 19


def test_a_decode_step_right_after_loading(net: Any, stored: Path) -> None:
    """``load`` restores the tail page, so that no prefill is needed."""
    first = HiSparseCache.load(stored, net, SMALL, max_length=400)
    with torch.no_grad():
        net(prompt(LENGTH, seed=1), past_key_values=(whole := HiSparseCache(net, SMALL)))
        for n in range(20):
            step = prompt(1, seed=n)
            got, expected = (net(step, past_key_values=c).logits for c in (first, whole))
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"host_layout": "page_first"},
        {"host_layout": "page_head", "selection_scope": "query_head"},
        {"page_size": 8},
        {"page_size": 32, "num_recent_pages": 0},
    ],
    ids=str,
)
def test_layout_scope_and_page_size_may_differ(
    net: Any, stored: Path, changed: dict[str, Any]
) -> None:
    settings = SMALL | changed
    fresh = HiSparseCache(net, settings, max_length=400)
    cache = HiSparseCache.load(stored, net, settings, max_length=400)
    assert _asked(net, cache) == _asked(net, fresh)


def test_another_algorithm_makes_its_representations_from_the_keys(
    net: Any, stored: Path, norms: str
) -> None:
    settings = SMALL | {"algorithm": norms}
    fresh = HiSparseCache(net, settings, max_length=400)
    cache = HiSparseCache.load(stored, net, settings, max_length=400)
    answer = _asked(net, cache)
    assert answer == _asked(net, fresh)
    assert answer != _asked(net, HiSparseCache(net, SMALL, max_length=400))


@pytest.mark.parametrize("columns", [320, 313, 1])
def test_the_first_columns_go_on_in_another_way(net: Any, stored: Path, columns: int) -> None:
    cache = HiSparseCache.load(stored, net, SMALL, columns=columns, max_length=400)
    assert torch.equal(cache.token_ids, prompt(LENGTH, seed=1)[:, :columns])
    ids = torch.cat([cache.token_ids, prompt(30, seed=5)], 1)
    fresh = HiSparseCache(net, SMALL, max_length=400)
    assert continuation(net, ids, 20, cache) == continuation(net, ids, 20, fresh)


@pytest.mark.parametrize("columns", [0, -3, LENGTH + 1])
def test_columns_that_are_not_there(net: Any, stored: Path, columns: int) -> None:
    with pytest.raises(ConfigError, match=f"got columns {columns}, expected 1 to .* {LENGTH}"):
        HiSparseCache.load(stored, net, SMALL, columns=columns, max_length=400)


def test_rows_with_padding_and_generated_tokens(net: Any, tmp_path: Path) -> None:
    ids, mask = left_padded((200, 77), seed=3)
    cache = enable(net, SMALL, max_batch_size=2, max_length=300)
    first = continuation(net, ids, 15, cache, attention_mask=mask)
    cache.save(tmp_path / "rows", torch.cat([ids, torch.tensor(first)[:, :14]], 1))
    more = prompt(8, seed=4, batch=2)
    ids = torch.cat([ids, torch.tensor(first), more], 1)
    mask = torch.cat([mask, torch.ones(2, 15 + 8, dtype=mask.dtype)], 1)
    expected = continuation(net, ids, 15, cache, attention_mask=mask)
    other = HiSparseCache.load(tmp_path / "rows", net, SMALL, max_batch_size=2, max_length=300)
    assert other.row_lengths == (214, 91)
    assert torch.equal(other.token_ids, ids[:, :214])
    assert continuation(net, ids, 15, other, attention_mask=mask) == expected


def test_a_loaded_cache_is_saved_forked_and_cropped(net: Any, stored: Path) -> None:
    cache = HiSparseCache.load(stored, net, SMALL, max_batch_size=3, max_length=400)
    assert torch.equal(cache.token_ids, prompt(LENGTH, seed=1))
    again = stored.with_name("again")
    cache.save(again)
    assert _same(load_file(again), load_file(stored))
    with cache.fork(2) as rows:
        rows.crop(-33)
        assert torch.equal(rows.token_ids, prompt(LENGTH, seed=1)[:, :300].expand(2, -1))
        rows.save(again)
    _asked(net, cache)
    cache.save(again)
    assert HiSparseCache.load(again, net, SMALL, max_length=400).token_ids is None


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"kv_cache_dtype": "fp8_e4m3"}, "got kv_cache_dtype 'auto', expected 'fp8_e4m3'"),
        ("qwen2", {}, "got model_type 'llama', expected 'qwen2'"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    stored: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        HiSparseCache.load(stored, model(kind), SMALL | settings, max_length=400)
    assert "\n" not in str(error.value)


def test_a_file_of_another_shape_or_dtype_is_refused(net: Any, stored: Path) -> None:
    config = type(net.config).from_dict(net.config.to_dict() | {"num_key_value_heads": 4})
    with pytest.raises(ConfigError, match="got num_kv_heads 2, expected 4"):
        HiSparseCache.load(stored, config, SMALL, max_length=400)
    half = type(net)(type(net.config).from_dict(net.config.to_dict())).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="got dtype 'float32', expected 'bfloat16'"):
        HiSparseCache.load(stored, half, SMALL, max_length=400)


def test_a_file_of_another_format_is_refused(net: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ConfigError, match="No such file.*expected a file that HiSparseCache.save"):
        HiSparseCache.load(path, net, SMALL, max_length=400)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match="got format None, not 'hisparse context 2'"):
        HiSparseCache.load(path, net, SMALL, max_length=400)


def test_rows_that_do_not_fit_leave_nothing_behind(net: Any, stored: Path) -> None:
    with pytest.raises(
        CapacityError, match=r"got 333 columns, expected at most max_length \(300\)"
    ):
        HiSparseCache.load(stored, net, SMALL, max_length=300)
    with pytest.raises(CapacityError, match="host pages: got 21 to allocate"):
        HiSparseCache.load(stored, net, SMALL, max_length=400, max_tokens=300)


def test_what_cannot_be_saved(net: Any, tmp_path: Path) -> None:
    cache = enable(net, SMALL, max_length=400)
    with pytest.raises(HiSparseError, match="save: got an empty cache"):
        cache.save(tmp_path / "file")
    with torch.no_grad():
        net(prompt(20, seed=1), past_key_values=cache)
    with pytest.raises(HiSparseError, match=r"token_ids of shape \[1, 7\], expected .* \[1, 20\]"):
        cache.save(tmp_path / "file", prompt(7, seed=1))
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_old_file(
    net: Any, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored.read_bytes()

    def fail(tensors: object, path: str, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(tensor_file, "save_file", fail)
    cache = HiSparseCache.load(stored, net, SMALL, max_length=400)
    with pytest.raises(HiSparseError, match="cannot write .*no space left"):
        cache.save(stored)
    assert stored.read_bytes() == before
    assert [p.name for p in stored.parent.iterdir()] == [stored.name]
    assert load_file(stored)["token_ids"].shape == (1, LENGTH)
