"""Which servers exchange pages, and how the file store keeps them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from sglang.srt.layers import rotary_embedding as rotary
from sglang.srt.mem_cache.utils import get_storage_hash_str, storage_namespace_seed
from test_serializer import make_pool
from transformers import Gemma3TextConfig, LlamaConfig

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.cache.serializer import PageSerializer
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.model_config import rotary_frequencies
from hisparse.sglang import session as session_module
from hisparse.sglang.features.storage import around_request
from hisparse.sglang.features.storage.key import (
    AdapterKeys,
    make_namespace,
    model_fingerprint,
    rope_differences,
)
from hisparse.sglang.features.storage.pages import FilePages, Keys, RecordBuffer
from hisparse.sglang.ranks import LinkerRanks
from hisparse.storage import FileStore, Namespace, page_keys
from hisparse.storage.fingerprint import fingerprint, model_settings
from hisparse.types import AttentionRule
from tests.server.tiny_models import tiny_model
from tests.sizes import SWEEPS

pytestmark = pytest.mark.filterwarnings("ignore")

ALONE = LinkerRanks(rank=0, size=1, key=(0, 1), group=None)


def session_of(model: Any, **changes: Any) -> Any:
    """A session whose model attends over everything, with rotary embeddings as configured."""
    rules = (AttentionRule(0.125), AttentionRule(0.125))
    setup = {
        "algorithm": Sketch(),
        "resolved": SimpleNamespace(config=HiSparseConfig()),
        "policy": SimpleNamespace(layer_rules=rules, max_pages=4),
    }
    setup |= {name: changes.pop(name) for name in setup.keys() & changes.keys()}
    known = {"model_settings": {"layers": 2}, "model_config": LlamaConfig()}
    return SimpleNamespace(model=model, setup=SimpleNamespace(**setup), **(known | changes))


def namespace(
    algorithm: BaseSparseAlgorithm | None = None,
    seed: int = 0,
    ranks: LinkerRanks = ALONE,
    page_tokens: int = 8,
    layout: Any = "page_head",
    changes: dict[str, Any] | None = None,
    **config: Any,
) -> Namespace:
    torch.manual_seed(seed)
    session = session_of(
        torch.nn.Linear(64, 300),
        algorithm=algorithm or Sketch(),
        resolved=SimpleNamespace(config=HiSparseConfig(**config)),
        **(changes or {}),
    )
    serializer = PageSerializer(make_pool(layout), page_tokens, {})
    return make_namespace(session, model_fingerprint(session), serializer, ranks)


def test_budget_algorithm_and_layout_are_no_part_of_the_key() -> None:
    other = namespace(Quest(), layout="layer_first", budget=128, num_sink_pages=2)
    assert other == namespace()


def test_weights_pages_and_ranks_are() -> None:
    second = LinkerRanks(rank=1, size=2, key=(1, 2), group=None)
    found = [namespace(), namespace(seed=1), namespace(page_tokens=16), namespace(ranks=second)]
    assert len({each.key for each in found}) == 4


@pytest.mark.parametrize("size", [64, 3 * 2**14])
def test_each_element_of_a_weight_counts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of an embedding, or one expert, may be all that an edit changes."""
    monkeypatch.setattr("hisparse.storage.fingerprint._CHUNK", 2**14)
    weight = torch.zeros(size, dtype=torch.bfloat16)
    found = {fingerprint({}, [("embedding", weight)])}
    rng = torch.Generator().manual_seed(0)
    for at in [0, size - 1, *torch.randint(1, size - 1, (10,), generator=rng).tolist()]:
        weight[at] += 1
        found.add(fingerprint({}, [("embedding", weight)]))
    assert len(found) == 13
    rows = weight.view(8, -1)
    assert fingerprint({}, [("", rows.t())]) == fingerprint({}, [("", rows.t().contiguous())])


def test_ranks_with_the_same_latents_share_a_key() -> None:
    first, second = (LinkerRanks(rank=r, size=2, key=(0, 1), group=None) for r in (0, 1))
    assert namespace(ranks=first) == namespace(ranks=second)
    assert (first.writes, second.writes) == (True, False)


def test_where_the_model_was_trained_sparse_the_budget_counts() -> None:
    budgets = [namespace(DSA(), budget=budget, page_size=1).key for budget in (64, 128, 64)]
    assert budgets[0] == budgets[2] != budgets[1]
    rounded = namespace(DSA(index_dtype="float32"), budget=64, page_size=1).key
    assert rounded != budgets[0]


@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(0.125, window=4096),
        AttentionRule(0.125, window=4097),
        AttentionRule(0.125, logit_cap=50.0),
        AttentionRule(0.0625),
    ],
    ids=["window", "a window of one more", "cap", "scale"],
)
def test_attention_as_it_is_applied_counts(rule: AttentionRule) -> None:
    """One front end may read a window of the configuration that another does not."""
    others = [AttentionRule(0.125), AttentionRule(0.125, window=4096)]
    found = {
        namespace(changes={"policy": SimpleNamespace(layer_rules=(AttentionRule(0.125), x))}).key
        for x in {*others, rule}
    }
    assert len(found) == len({*others, rule})


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
    "original_max_position_embeddings": 32768,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", [PLAIN, LLAMA3, YARN], ids=lambda x: x["rope_type"])
def test_rotary_embeddings_as_they_are_applied_count(
    rope: dict[str, Any], dtype: torch.dtype
) -> None:
    """SGLang makes its tables of some settings, transformers of others: compared by value."""
    made = {
        "default": lambda: rotary.base.RotaryEmbedding(128, 128, 8192, 10000, True, dtype),
        "llama3": lambda: rotary.rope_variant.Llama3RotaryEmbedding(
            128, 128, 8192, 500000, True, dtype, 8.0, 1.0, 4.0, 8192
        ),
        "yarn": lambda: rotary.yarn.YaRNScalingRotaryEmbedding(
            128, 128, 32768, 1000000, True, 4.0, dtype
        ),
    }
    # Outside of a server, which has a role and knows its device.
    with patch.multiple(rotary.base, publish_role=lambda: None, _is_cpu=True):
        tables = {kind: make() for kind, make in made.items()}
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters=dict(rope),
    )  # fmt: skip
    served = {kind: rope_differences(torch.nn.Sequential(x), config) for kind, x in tables.items()}
    assert served.pop(rope["rope_type"]) == []
    assert len({text for texts in served.values() for text in texts}) == 2
    model, fingerprints = torch.nn.Linear(8, 8), set()
    for kind in ("default", rope["rope_type"]):
        model.add_module("rotary", tables[kind])
        fingerprints.add(model_fingerprint(session_of(model, model_config=config)))
    assert len(fingerprints) == len({"default", rope["rope_type"]})


def test_settings_that_the_command_line_overrides_count() -> None:
    """SGLang applies --json-model-override-args to the configuration that a session has.

    Some are known to SGLang's model and not to the configuration's class.
    """
    configs = [LlamaConfig(), LlamaConfig(rms_norm_eps=1e-3), LlamaConfig(rope_parameters=YARN)]
    settings = [model_settings(x) for x in configs]
    for given in ({"rope_is_neox_style": False}, {"architectures": ["MistralForCausalLM"]}):
        settings.append(model_settings(LlamaConfig(), given))
    found = {namespace(changes={"model_settings": x}).key for x in settings}
    assert len(found) == len(settings)
    assert model_settings(configs[1], {"rms_norm_eps": 1e-3}) == settings[1]


class Table(torch.nn.Module):
    """A rotary embedding of SGLang's, as far as its table goes."""

    def __init__(self, frequencies: torch.Tensor, is_neox_style: bool = True) -> None:
        super().__init__()
        self.is_neox_style = is_neox_style
        angles = torch.arange(8192)[:, None] * frequencies
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=1)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ("none", []), ("swapped", [0, 1]), ("1.9% faster", [0, 1]), ("one layer", [1]),
        ("order of channels", [0, 1]), ("other positions", [0]),
    ],
)  # fmt: skip
def test_each_layer_has_the_rotary_table_of_its_type(change: str, layers: list[int]) -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2, head_dim=64, layer_types=["sliding_attention", "full_attention"]
    )
    ropes = dict(rotary_frequencies(config))
    first, second = (ropes[kind][0] for kind in config.layer_types)
    if change == "swapped":
        first, second = second, first
    if change == "one layer":
        second = first
    faster = 1.019 if change == "1.9% faster" else 1.0
    made = [Table(x * faster, change != "order of channels") for x in (first, second)]
    if change == "other positions":
        made[0].cos_sin_cache[100:] = 7.0
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(
        torch.nn.ModuleDict({"rotary_emb": x}) for x in made
    )})  # fmt: skip
    assert [int(x.split()[0]) for x in rope_differences(model, config)] == layers


def test_the_dtype_of_weights_and_their_quantization_count() -> None:
    weight = torch.randn(32, 64)
    quantized = (weight / weight.abs().max() * 127).round().to(torch.int8)
    kinds = [weight, weight.to(torch.bfloat16), weight.to(torch.float8_e4m3fn), quantized]
    assert len({fingerprint({}, [("layers.0.weight", x)]) for x in kinds}) == 4


def test_salts_and_extra_keys_are_in_the_keys_of_pages() -> None:
    """SGLang's chain of keys begins with them."""
    given = [(None, None), ("a", None), (None, "a"), ("a", "b"), ("ab", None), (None, "ab")]
    assert len({storage_namespace_seed(*each) for each in given}) == len(given)


class Adapter:
    """The attributes of SGLang's ``LoRAAdapter`` that decide what it computes."""

    def __init__(self, **changes: Any) -> None:
        weights = {"layers.0.q_proj.lora_A.weight": torch.ones(8, 64)} | changes
        self.layers = [SimpleNamespace(weights={k: x for k, x in weights.items() if "lora" in k})]
        self.embedding_layers: dict[str, Any] = {}
        self.added_tokens_embeddings: dict[str, Any] = {}
        self.scaling = changes.get("scaling", 2.0)
        hf_config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
        self.config = SimpleNamespace(hf_config=hf_config, added_tokens_config=None)


def adapter_keys(*adapters: Adapter, modules: tuple[str, ...] = ("qkv_proj",)) -> AdapterKeys:
    loras = {f"{i}" * 32: x for i, x in enumerate(adapters)}
    return AdapterKeys(SimpleNamespace(loras=loras, target_modules=set(modules)))


def test_an_adapter_is_known_by_its_content() -> None:
    """SGLang's id is made of name and path, or random."""
    changed = torch.ones(8, 64)
    changed[7, 63] = 2
    known = adapter_keys(
        Adapter(), Adapter(), Adapter(scaling=1.0),
        Adapter(**{"layers.0.q_proj.lora_A.weight": changed}),
        Adapter(**{"layers.0.k_proj.lora_A.weight": torch.ones(8, 64)}),
    )  # fmt: skip
    found = [known.key(f"{i}" * 32) for i in range(5)]
    assert found[0] == found[1] and len(set(found)) == 4
    assert adapter_keys(Adapter(), modules=("all",)).key("0" * 32) not in found
    for keys in (known, AdapterKeys(None)):
        assert len({keys.key("another"), keys.key("another"), "another"}) == 3, "none is shared"


def test_a_request_has_the_key_of_its_adapters_content(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(adapter_key=adapter_keys(Adapter()).key)
    session = SimpleNamespace(get=lambda cls: state)
    monkeypatch.setattr(session_module, "_session", session)

    def init(request: Any, lora_id: str | None, extra_key: str | None) -> None:
        """As SGLang's ``Req``."""
        request.lora_id = lora_id
        request.extra_key = extra_key if lora_id is None else (extra_key or "") + lora_id

    found = []
    for lora_id, extra_key in [("0" * 32, None), ("0" * 32, "mine"), (None, "mine"), (None, None)]:
        request = SimpleNamespace()
        around_request(init, request, lora_id, extra_key=extra_key)
        found.append(request.extra_key)
    content = state.adapter_key("0" * 32)
    assert content != "0" * 32
    assert found == [f"adapter {content} ", f"adapter {content} client mine", "client mine", None]
    request = SimpleNamespace()
    around_request(init, request, None, extra_key=found[0])
    assert request.extra_key != found[0], "a client cannot name an adapter"
    monkeypatch.setattr(session_module, "_session", None)
    around_request(init, request, "0" * 32, extra_key="mine")
    assert request.extra_key == "mine" + "0" * 32, "without a store as SGLang has it"


class ForeignDSA(DSA):
    """An algorithm of somebody else that decides what a prompt attends."""


def test_what_decides_what_prompts_attend_needs_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of DSA says nothing of what a subclass computes."""
    with pytest.raises(ConfigError, match="no store_version, expected one that declares it, or no"):
        namespace(ForeignDSA(), budget=64, page_size=1)
    keys = set()
    for version in (1, 2):
        monkeypatch.setattr(ForeignDSA, "store_version", version)
        keys.add(namespace(ForeignDSA(), budget=64, page_size=1).key)
    assert len(keys) == 2


@pytest.mark.skipif(not SWEEPS, reason="SGLang compiles: make test-all PART=sweeps")
@pytest.mark.sweeps
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_keys_of_pages_are_those_of_sglang(page_tokens: int) -> None:
    ids = torch.randint(0, 2**32, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = get_storage_hash_str(ids[: 200 // page_tokens * page_tokens], None, page_tokens)
    assert page_keys(np.array(ids), page_tokens) == expected
    assert page_keys(np.array(ids[:page_tokens]), page_tokens) == expected[:1]


@pytest.mark.skipif(not SWEEPS, reason="SGLang loads models: make test-all PART=sweeps")
@pytest.mark.sweeps
def test_a_model_has_one_fingerprint_in_sglang_and_in_transformers() -> None:
    """Their rotary tables agree, too."""
    kinds = ("llama", "qwen2", "mistral", "gemma3", "smollm3")
    folders = [str(tiny_model(kind)) for kind in kinds]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.fingerprints", *folders],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pairs = [line.split() for line in done.stdout.splitlines() if len(line) == 65]
    assert [here for here, _ in pairs] == [there for _, there in pairs]
    assert len({here for here, _ in pairs}) == len(kinds)


def test_the_file_store_keeps_namespaces_apart_and_tells_damage(tmp_path: Path) -> None:
    first, second = namespace(), namespace(seed=1)
    buffer = RecordBuffer(1, 4, first.page_bytes)
    storage = FilePages(FileStore(tmp_path), buffer)
    names = ["aa" * 32, "bb" * 32]
    keys, others = Keys(first, names), Keys(second, names)
    records = torch.randint(0, 256, (2, first.page_bytes), dtype=torch.uint8)
    buffer.data[:2] = records
    assert storage.put(keys, [0, 1])
    assert storage.put(keys, [0, 1]), "they are there already"
    assert [storage.find(each) for each in (keys, others, keys[:0])] == [2, 0, 0]
    assert storage.get(others, [2, 3]) == [None, None]
    assert storage.get(keys, [2, 3]) == [True, True]
    assert torch.equal(buffer.data[2:], records)
    assert storage.put(others[:1], [1])
    storage.remover.remove(others.namespace, others[:1].pages)
    assert storage.get(others[:1], [2]) == [None]
    file = tmp_path / "pages" / first.key / names[0]
    data = bytearray(file.read_bytes())
    data[100] ^= 4
    file.write_bytes(data)
    assert storage.get(keys[:1], [2]) == [False]
    assert storage.find(keys) == 0
    storage.close()
