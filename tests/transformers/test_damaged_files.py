"""A stored context that is damaged, torn or of another model is one clear error."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hisparse.errors import ConfigError, HiSparseError
from hisparse.eval.models import load
from hisparse.transformers import HiSparseCache, disable, enable, tensor_file
from hisparse.transformers.context_file import read_rows
from hisparse.transformers.fingerprint import model_fingerprint
from hisparse.transformers.rows import RowStore
from tests.server.tiny_models import tiny_model
from tests.transformers.hf_models import SMALL, left_padded, model

COLUMNS = 40


@dataclass(frozen=True)
class Saved:
    """Two rows of 40 and 21 tokens, and a store that may take them."""

    data: bytes
    path: Path
    net: Any
    store: RowStore

    def read(self, columns: int | None = None) -> list[int]:
        """Read the file and free its rows; their lengths."""
        rows = read_rows(self.path, self.store, self.net, COLUMNS, columns)
        self.store.close(rows.slots, rows.lengths)
        return rows.lengths.tolist()

    def refused(self, data: bytes, columns: int | None = None) -> str:
        """The one line that a file of ``data`` gets; nothing of it stays in the store."""
        self.path.write_bytes(data)
        free = self.store.pages.num_free
        with pytest.raises(ConfigError) as caught:
            self.read(columns)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1_500
        assert str(self.path) in str(caught.value)
        assert self.store.pages.num_free == free
        assert self.store.open(2).size == 2
        self.store.close(np.array([2, 1]), np.zeros(2, dtype=np.int64))
        return str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("contexts") / "context"
    net = model("llama")
    ids, mask = left_padded((COLUMNS, 21), seed=1)
    cache = enable(net, SMALL, max_batch_size=2, max_length=COLUMNS)
    with torch.no_grad():
        net(ids, past_key_values=cache, attention_mask=mask)
    cache.save(path, ids)
    cache.reset()
    disable(net)
    return Saved(path.read_bytes(), path, net, cache._store)


def header_bytes(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.data())
def test_any_flipped_bit_of_the_header_is_found(saved: Saved, data: st.DataObject) -> None:
    bits = 8 * header_bytes(saved.data)
    saved.refused(flipped(saved.data, data.draw(st.integers(0, bits - 1))))


def test_a_renamed_tensor_is_found(saved: Saved) -> None:
    renamed = saved.data.replace(b'"1.0.k":', b'"1.0.j":', 1)
    assert "its tensors are not those with checksums" in saved.refused(renamed)


@given(st.data())
def test_any_flipped_bit_of_the_data_is_found(saved: Saved, data: st.DataObject) -> None:
    """Also where the tensor is not needed, such as the representations for fewer columns."""
    first, end = 8 * header_bytes(saved.data), 8 * len(saved.data)
    bit = data.draw(st.integers(first, end - 1))
    columns = data.draw(st.sampled_from([None, 17]))
    message = saved.refused(flipped(saved.data, bit), columns)
    assert "does not match its checksum: the file is damaged" in message


@given(st.data())
def test_a_file_that_was_cut_or_grew_is_refused(saved: Saved, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(saved.data) - 1))
    saved.refused(saved.data[:length])
    saved.refused(saved.data + saved.data[:length] + b"\0")
    saved.refused(saved.data[:length] + b"\0" * (len(saved.data) - length - 1) + b"\x55")


@given(st.binary(max_size=300))
def test_any_other_file_is_refused(saved: Saved, content: bytes) -> None:
    saved.refused(content)
    saved.refused(len(content).to_bytes(8, "little") + content)


def test_what_is_no_file_is_refused(saved: Saved, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path, tmp_path / "pipe", loop, tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match=r"expected a file that HiSparseCache\.save") as error:
            read_rows(path, saved.store, saved.net, COLUMNS, None)
        assert "\n" not in str(error.value)


def rewritten(saved: Saved, **changes: Any) -> bytes:
    """The file with other metadata or tensors, or without those that are None; its checksums are
    right."""
    with safe_open(saved.path, "pt") as file:
        metadata = file.metadata() | {k: v for k, v in changes.items() if isinstance(v, str)}
    tensors = load_file(saved.path) | {k: v for k, v in changes.items() if not isinstance(v, str)}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    name = metadata.pop("format")
    tensor_file.write_tensors(saved.path, name, metadata, tensors)
    return saved.path.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.0.k": None}, "tensor '1.0.k' is absent"),
        ({"1.2.v": torch.zeros(21, 2, 31)}, "torch.float32 [21, 2, 31], expected torch.float32"),
        ({"1.2.k": torch.zeros(20, 2, 32)}, "got torch.float32 [20, 2, 32], expected"),
        ({"0.0.v": torch.zeros(40, 2, 32).half()}, "got torch.float16 [40, 2, 32], expected"),
        ({"real": torch.ones(80, dtype=torch.bool)}, "torch.bool [80], expected torch.bool [any"),
        ({"real": torch.ones(2, 40)}, "got torch.float32 [2, 40], expected torch.bool"),
        ({"token_ids": torch.zeros(2, 39).long()}, "[2, 39], expected torch.int64 [2, 40]"),
        ({"shape": "[" * 5000}, "nested too deep"),
        ({"shape": "{}"}, "got model_type None, expected 'llama'"),
        ({"shape": '{"model_type": "' + "x" * 5000 + '"}'}, "got model_type 'xxx"),
        ({"model": "0" * 32}, "got a context of another model (fingerprint '000"),
        ({"model": "0" * 5000}, "got a context of another model (fingerprint '000"),
        ({"format": "x" * 5000}, "got format 'xxx"),
        ({"real": torch.ones([1] * 999)}, "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ...]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_whole_file_with_other_contents_is_refused(
    saved: Saved, change: dict[str, Any], message: str
) -> None:
    saved.path.write_bytes(saved.data)
    assert message in saved.refused(rewritten(saved, **change))


def test_files_of_format_1_are_refused(saved: Saved, tmp_path: Path) -> None:
    """Nobody can tell whether they are damaged."""
    saved.path.write_bytes(saved.data)
    save_file(load_file(saved.path), tmp_path / "old", {"format": "hisparse context 1"})
    message = saved.refused((tmp_path / "old").read_bytes())
    assert "got format 'hisparse context 1', not 'hisparse context 2'" in message
    assert "have no checksums" in message


def test_an_undamaged_file_is_read_after_all_these(saved: Saved) -> None:
    saved.path.write_bytes(saved.data)
    assert saved.read() == [40, 21]


def test_a_fingerprint_tells_models_apart_and_not_their_copies(tmp_path: Path) -> None:
    net = model("llama")
    found = model_fingerprint(net)
    net.save_pretrained(tmp_path)
    copy = type(net).from_pretrained(tmp_path)
    assert model_fingerprint(copy) == found
    enable(copy, SMALL, max_length=64)
    assert model_fingerprint(copy) == found, "switching hisparse on changes no weight"
    disable(copy)
    weight = copy.model.layers[2].mlp.down_proj.weight
    with torch.no_grad():
        weight.mul_(1.001)
    assert model_fingerprint(copy) != found
    with torch.no_grad():
        weight.copy_(net.model.layers[2].mlp.down_proj.weight)
    assert model_fingerprint(copy) == found
    copy.config.rms_norm_eps *= 2
    assert model_fingerprint(copy) != found
    assert model_fingerprint(net.config) == "", "a configuration has no weights"


def test_a_cache_of_a_configuration_reads_and_writes_without_a_fingerprint(saved: Saved) -> None:
    saved.path.write_bytes(saved.data)
    config, options = saved.net.config, {"max_batch_size": 2, "max_length": COLUMNS}
    cache = HiSparseCache.load(saved.path, config, SMALL, device="cpu", **options)
    cache.save(saved.path)
    again = HiSparseCache.load(saved.path, saved.net, SMALL, **options)
    assert again.row_lengths == (40, 21)


def test_a_file_takes_its_name_when_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    sync, replace = tensor_file._sync, Path.replace
    monkeypatch.setattr(tensor_file, "_sync", lambda path: (done.append(path), sync(path)))
    monkeypatch.setattr(
        Path, "replace", lambda path, to: (done.append("rename"), replace(path, to))[1]
    )
    tensor_file.write_tensors(tmp_path / "x", "test 1", {}, {"a": torch.ones(3)})
    temporary, rename, folder = done
    assert (temporary.parent, rename, folder) == (tmp_path, "rename", tmp_path)
    assert temporary.name != "x"


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    tensor_file.write_tensors(path, "test 1", {}, {"a": torch.ones(3)})
    before = path.read_bytes()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "_sync", full)
    with pytest.raises(HiSparseError, match=r"cannot write .*/x': OSError: .*No space left"):
        tensor_file.write_tensors(path, "test 1", {}, {"a": torch.zeros(3)})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    with pytest.raises(HiSparseError, match=r"cannot write .*: FileNotFoundError: .*No such file"):
        tensor_file.write_tensors(tmp_path / "no" / "x", "test 1", {}, {"a": torch.zeros(3)})


def test_metadata_are_json_objects(saved: Saved) -> None:
    """So that another program can read them, and verify the file itself."""
    saved.path.write_bytes(saved.data)
    with safe_open(saved.path, "pt") as file:
        metadata = file.metadata()
        assert set(json.loads(metadata["checksums"])) == set(file.keys())
    assert json.loads(metadata["shape"])["head_dim"] == 32


def test_a_model_with_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read: SafetensorError: ") as caught:
        load(AutoModelForCausalLM, str(tmp_path / "model"))
    assert "\n" not in str(caught.value)
    (tmp_path / "model" / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="cannot be read: "):
        load(AutoConfig, str(tmp_path / "model"))
