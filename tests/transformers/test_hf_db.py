"""Contexts in a store: sessions begin with the longest stored prefix, and tokens stay the same."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from hisparse.errors import CapacityError, ConfigError, HiSparseError
from hisparse.transformers import DB, HiSparseCache, Session, disable
from hisparse.transformers.rows import RowStore
from tests.server.tiny_models import tiny_model
from tests.transformers.hf_models import (
    DOCS,
    GREEDY,
    ROOMY,
    SMALL,
    continuation,
    model,
    prompt,
    run_program,
)

#: Both indexes.
DIPR = {
    index: SMALL | {"algorithm": "dipr", "algorithm_config": {"index": index}}
    for index in ("sketch", "flat")
}
SIZES = {"max_length": 400, "max_batch_size": 3}
DOCUMENT, QUESTION, OTHER = (prompt(n, seed=n)[0] for n in (160, 21, 50))
#: Whole pages of 16 tokens, with two tokens after them.
ASKED = torch.cat([DOCUMENT, QUESTION])


@pytest.fixture
def db(net: Any, tmp_path: Path) -> Iterator[DB]:
    with DB(tmp_path / "store", net, SMALL, **SIZES) as made:
        yield made


def compute(net: Any, db: DB, ids: Tensor) -> int:
    """Prefill what the store lacks of a context and store it. Returns what was computed."""
    session, rest = db.create_session(ids)
    with session, torch.no_grad():
        net(rest[None], past_key_values=session.cache)
        assert session.store(ids) == len(ids) // 16 * 16
    return len(rest)


def answer(net: Any, session: Session, ids: Tensor, count: int = 12) -> list[int]:
    return continuation(net, ids[None], count, session.cache)[0]


def num_loaded(db: DB, ids: Tensor) -> int:
    session, rest = db.create_session(ids)
    with session:
        assert session.cache.get_seq_length() == len(ids) - len(rest)
        assert torch.equal(rest, ids[len(ids) - len(rest) :])
        return session.cache.get_seq_length()


def test_the_longest_prefix_of_any_context(net: Any, db: DB) -> None:
    branch = torch.cat([DOCUMENT[:80], OTHER])
    assert compute(net, db, DOCUMENT) == 160
    assert compute(net, db, branch) == 50, "the part that both share is loaded"
    expected = {
        "a whole one and more": (torch.cat([DOCUMENT, OTHER]), 160),
        "a part of one": (torch.cat([DOCUMENT[:100], OTHER]), 96),
        "the other branch": (torch.cat([branch, QUESTION]), 128),
        "itself, but for the end": (DOCUMENT, 144),
        "two tokens are left": (DOCUMENT[:130], 128),
        "one token is left": (DOCUMENT[:129], 112),
        "another beginning": (torch.cat([OTHER, DOCUMENT]), 0),
        "less than a page": (DOCUMENT[:15], 0),
    }
    assert {name: num_loaded(db, ids) for name, (ids, _) in expected.items()} == {
        name: length for name, (_, length) in expected.items()
    }


def test_memory_is_free_as_soon_as_nobody_holds_it(net: Any, tmp_path: Path) -> None:
    """Without a collection, which hardly comes: tensors of gigabytes are few objects."""
    gc.collect()
    gc.disable()
    try:
        with DB(tmp_path / "store", net, SMALL, **SIZES) as db:
            compute(net, db, DOCUMENT)
            assert num_loaded(db, DOCUMENT) == 144
            pool = weakref.ref(db._cache.row_store.coordinator.manager.host)
        del db
        assert pool() is None
    finally:
        gc.enable()


class OnDevice(Tensor):
    """Stands for a tensor on a GPU, and so does what is made of it until it is copied."""

    def cpu(self, *_: Any) -> Tensor:
        return self.as_subclass(Tensor)


def test_kernels_get_the_numbers_of_loaded_pages_on_the_device(
    net: Any, db: DB, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They refuse those on the host."""
    compute(net, db, DOCUMENT)
    kind, given = type(db._cache.coordinator.algorithm), list[Tensor]()
    page_table, store = RowStore.page_table, kind.store

    def spy(self: Any, keys: Tensor, layer_id: int, host_pages: Tensor, step: Any) -> None:
        given.append(host_pages)
        store(self, keys, layer_id, host_pages.as_subclass(Tensor), step)

    monkeypatch.setattr(kind, "store", spy)
    monkeypatch.setattr(
        RowStore, "page_table", lambda *args: page_table(*args).as_subclass(OnDevice)
    )
    assert num_loaded(db, DOCUMENT) == 144
    assert given
    assert all(type(pages) is OnDevice for pages in given)


@pytest.mark.parametrize(
    "settings",
    [ROOMY, SMALL, *DIPR.values()],
    ids=["dense", "sparse", *DIPR],
)
def test_tokens_are_those_of_a_computed_prefix(
    settings: dict[str, Any], net: Any, tmp_path: Path
) -> None:
    ids = torch.cat([DOCUMENT, prompt(40, seed=8)[0]])
    with DB(tmp_path, net, settings, **SIZES) as db:
        compute(net, db, DOCUMENT)
        session, rest = db.create_session(ids)
        assert len(rest) == 40
        got = answer(net, session, ids, 20)
    assert got == continuation(net, ids[None], 20, HiSparseCache(net, settings, max_length=400))[0]
    if settings == ROOMY:
        disable(net)
        assert got == continuation(net, ids[None], 20)[0]


def test_queries_that_the_algorithm_needs_are_left(net: Any, tmp_path: Path) -> None:
    with DB(tmp_path, net, SMALL | {"algorithm": "snapkv"}, **SIZES) as db:
        compute(net, db, DOCUMENT)
        assert num_loaded(db, DOCUMENT) == 128
        assert num_loaded(db, ASKED) == 144


def test_another_instance_with_other_settings_reads(net: Any, db: DB, tmp_path: Path) -> None:
    compute(net, db, DOCUMENT)
    other = SMALL | {"algorithm": "quest", "host_layout": "layer_first", "page_size": 8}
    with DB(tmp_path / "store", net, other, page_tokens=16, **SIZES) as reader:
        session, rest = reader.create_session(ASKED)
        assert len(rest) == 21
        got = answer(net, session, ASKED)
        assert session.store(ASKED) == 176, "what was loaded is exact"
    assert got == continuation(net, ASKED[None], 12, HiSparseCache(net, other, max_length=400))[0]
    with DB(tmp_path / "store", net, other, page_tokens=8, **SIZES) as reader:
        assert num_loaded(reader, ASKED) == 0, "pages of another size are others"


def test_pages_of_other_weights_are_not_found(net: Any, db: DB, tmp_path: Path) -> None:
    compute(net, db, DOCUMENT)
    with DB(tmp_path / "store", model("qwen2"), SMALL, **SIZES) as other:
        assert num_loaded(other, ASKED) == 0
    disable(model("qwen2"))


@pytest.fixture
def adapted(tmp_path: Path) -> Any:
    """A model with two adapters, of which "first" is active."""
    net = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    for seed, name in enumerate(("first", "second")):
        with warnings.catch_warnings():  # Of a second adapter.
            warnings.simplefilter("ignore")
            net.add_adapter(LoraConfig(r=4, target_modules=["k_proj", "v_proj"]), name)
        torch.manual_seed(seed)
        for key, weight in net.named_parameters():
            if name in key:
                weight.data.normal_(0, 0.3)
    net.set_adapter("first")
    return net


def switch(net: Any) -> None:
    net.set_adapter("second")


def turn_off(net: Any) -> None:
    net.disable_adapters()


def scale(net: Any) -> None:
    for module in net.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("first", 0.5)


def train(net: Any) -> None:
    with torch.no_grad():
        next(x for key, x in net.named_parameters() if "first" in key).mul_(2)


def replace(net: Any) -> None:
    layer = net.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())


def rotate(net: Any) -> None:
    net.model.rotary_emb.inv_freq.mul_(1.1)


def average(net: Any) -> None:
    """As scripts that merge weights do; PyTorch does not count it."""
    net.model.layers[1].mlp.down_proj.weight.data.mul_(0.5)


def hook(net: Any) -> None:
    net.model.layers[1].register_forward_hook(lambda module, args, out: out)


@pytest.mark.parametrize("change", [switch, turn_off, scale, train, replace, rotate, average, hook])
def test_a_model_that_changes_leaves_the_store_alone(
    change: Callable[[Any], None], adapted: Any, tmp_path: Path
) -> None:
    """Its pages would stay under the name of the model that it was."""
    with DB(tmp_path / "store", adapted, SMALL, **SIZES) as db:
        compute(adapted, db, DOCUMENT)
        assert num_loaded(db, ASKED) == 160
        session, _ = db.create_session(OTHER)
        change(adapted)
        for call in (
            lambda: db.create_session(ASKED),
            lambda: session.store(OTHER),
        ):
            with pytest.raises(ConfigError, match="expected the model unchanged: make another DB"):
                call()
        session.close()
    if change is hook:
        with pytest.raises(ConfigError, match="got 1 forward hooks, such as LlamaDecoderLayer"):
            DB(tmp_path / "store", adapted, SMALL, **SIZES)
        return
    with DB(tmp_path / "store", adapted, SMALL, **SIZES) as again:
        assert num_loaded(again, ASKED) == (160 if change is replace else 0)


def flip(store: Path, key: str) -> None:
    """Flip a bit of a page."""
    (file,) = store.glob(f"pages/*/{key}")
    data = bytearray(file.read_bytes())
    data[9000] ^= 16
    file.write_bytes(data)


def test_the_prefix_ends_before_a_damaged_page(net: Any, db: DB, tmp_path: Path) -> None:
    expected = continuation(net, ASKED[None], 12, HiSparseCache(net, SMALL, max_length=400))[0]
    compute(net, db, DOCUMENT)
    keys = db._pages.keys(DOCUMENT.numpy())
    flip(tmp_path / "store", keys[4])
    session, rest = db.create_session(ASKED)
    assert len(ASKED) - len(rest) == 64
    with session:
        assert answer(net, session, ASKED) == expected
        assert session.store(ASKED) == 176
    assert db.counters["damaged"] == 1
    assert num_loaded(db, ASKED) == 176, "the page was stored again"
    flip(tmp_path / "store", keys[0])
    session, rest = db.create_session(ASKED)
    assert len(rest) == len(ASKED)
    with session:
        assert answer(net, session, ASKED) == expected


def test_a_context_that_was_computed_elsewhere(net: Any, db: DB, tmp_path: Path) -> None:
    disable(net)
    dense = DynamicCache(config=net.config)
    with torch.no_grad():
        net(DOCUMENT[None], past_key_values=dense)
    assert db.import_(DOCUMENT, dense) == 160
    with DB(tmp_path / "store", net, ROOMY, **SIZES) as reader:
        session, rest = reader.create_session(ASKED)
        assert len(rest) == 21
        got = answer(net, session, ASKED)
    disable(net)
    assert got == continuation(net, ASKED[None], 12)[0]


def stored_tokens(net: Any, db: DB, steps: int) -> int:
    """Tokens that a session stores after a prompt of 150 tokens and some steps."""
    session, _ = db.create_session(DOCUMENT[:150])
    with session:
        out = net.generate(
            DOCUMENT[None, :150], past_key_values=session.cache, max_new_tokens=steps + 1, **GREEDY
        )
        return session.store(out[0])


def test_tokens_of_sparse_steps_never_enter(net: Any, db: DB, tmp_path: Path) -> None:
    assert stored_tokens(net, db, 40) == 144
    with DB(tmp_path / "dense", net, ROOMY, **SIZES) as dense:
        assert stored_tokens(net, dense, 40) == 176


def test_tokens_after_sparse_steps_never_enter(net: Any, db: DB) -> None:
    session, _ = db.create_session(DOCUMENT)
    out = net.generate(DOCUMENT[None], past_key_values=session.cache, max_new_tokens=20, **GREEDY)
    with session, torch.no_grad():
        more = torch.cat([out[0], OTHER])
        net(more[None, session.cache.get_seq_length() :], past_key_values=session.cache)
        assert session.store(more) == 160
        session.cache.crop(160 - session.cache.get_seq_length())
        net(OTHER[None], past_key_values=session.cache)
        assert session.store(torch.cat([DOCUMENT, OTHER])) == 208


def test_a_copy_of_a_page_is_as_exact_as_the_page(net: Any, db: DB) -> None:
    """A fork copies the page that a sparse step has begun into one that was exact before."""
    compute(net, db, torch.cat([OTHER, OTHER, OTHER, OTHER]))
    ids = DOCUMENT[:150]
    session, _ = db.create_session(ids)
    out = net.generate(ids[None], past_key_values=session.cache, max_new_tokens=6, **GREEDY)
    child = session.cache.fork()
    session.close()
    with Session(child, db._pages) as forked, torch.no_grad():
        net(OTHER[None], past_key_values=child)
        assert forked.store(torch.cat([out[0, :-1], OTHER])) == 144


@pytest.mark.parametrize("settings", [SMALL, *DIPR.values()], ids=["default", *DIPR])
def test_an_engine_that_runs_its_own_layers(
    settings: dict[str, Any], net: Any, tmp_path: Path
) -> None:
    db = DB(tmp_path, net, settings, **SIZES)
    compute(net, db, DOCUMENT)
    calls: list[tuple[Tensor, ...]] = []
    session, _ = db.create_session(ASKED)
    attend = session.cache.attend

    def record(layer_id: int, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        out = attend(layer_id, q, k, v, *args)
        calls.append((torch.tensor(layer_id), q, k, v, out))
        return out

    session.cache.attend = record
    answer(net, session, ASKED, 5)
    own, _ = db.create_session(ASKED)
    for layer, q, k, v, expected in calls:
        own.update(q, k, v, int(layer))
        assert torch.equal(own.attention(q, int(layer)), expected)
    assert own.cache.get_seq_length() == session.cache.get_seq_length() == len(ASKED) + 4
    with pytest.raises(HiSparseError, match="got layer 0 after an update of nothing, expected"):
        own.attention(q, 0)
    own.update(q, k, v, 0)
    with pytest.raises(HiSparseError, match=r"got q \[1, 4, 0, 32\], expected \[1, 4, 1, 32\]"):
        own.attention(q[:, :, :0], 0)
    own.close()
    session.close()
    db.close()


def test_several_sessions_are_one_batch(net: Any, db: DB) -> None:
    compute(net, db, DOCUMENT)
    sessions = [db.create_session(ASKED)[0] for _ in range(2)]
    batch = HiSparseCache.join([session.cache for session in sessions])
    got = continuation(net, torch.stack([ASKED, ASKED]), 12, batch)
    assert got == 2 * continuation(net, ASKED[None], 12, HiSparseCache(net, SMALL, max_length=400))
    batch.reset()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (DOCUMENT[None], r"got shape \[1, 160\], expected a vector of one or more token ids"),
        ([], r"got shape \[0\]"),
        ("text", "got 'text', expected"),
        ([1, -1], "got numbers of -1 to 1, expected"),
        ([1.5], "got torch.float32, expected"),
        ([2**32], "got numbers of 4294967296 to 4294967296"),
    ],
)
def test_what_are_no_tokens(ids: Any, message: str, db: DB) -> None:
    with pytest.raises(ConfigError, match=message):
        db.create_session(ids)


def test_other_tokens_than_those_of_the_session(net: Any, db: DB) -> None:
    compute(net, db, DOCUMENT)
    session, rest = db.create_session(ASKED)
    with session, torch.no_grad():
        net(rest[None], past_key_values=session.cache)
        wrong = ASKED.clone()
        wrong[7] += 1
        with pytest.raises(ConfigError, match="at position 7, expected .* as in create_session"):
            session.store(wrong)
        fork = session.cache.fork(2)
        with pytest.raises(HiSparseError, match="store: got 2 rows"):
            Session(fork, db._pages).store(ASKED)
        fork.reset()
    with db.create_session(OTHER)[0] as empty:
        assert empty.store(OTHER) == 0, "nothing was computed"


def test_wrong_arguments_are_one_line(net: Any, db: DB, tmp_path: Path) -> None:
    long = prompt(401, seed=1)[0]
    with pytest.raises(CapacityError, match=r"got 401 tokens, expected at most max_length \(400\)"):
        db.create_session(long)
    half = torch.zeros(2, 160, 32, dtype=torch.float16)
    short = torch.zeros(2, 150, 32)
    cases: list[tuple[Sequence[Any], str]] = [
        ([(half, half)] * 3, "kv: layer 0: k: got torch.float16, expected torch.float32"),
        ([(short, short)] * 3, r"kv: layer 0: k: got \[2, 150, 32\], expected \[2, 160, 32\]"),
        ([(half.float(), half.float())] * 2, "kv: got 2 layers, expected 3"),
        ([(half.float(), None)] * 3, "kv: layer 0: v: got NoneType, expected torch.float32"),
        ([(half.float(),)] * 3, "kv: layer 0: got 1 tensors, expected K and V"),
    ]
    for kv, message in cases:
        with pytest.raises(ConfigError, match=message):
            db.import_(DOCUMENT, kv)
    for options, message in (
        ({"page_tokens": 24}, r"page_tokens: got 24, expected a multiple of page_size \(16\)"),
        ({"size": "5 parsecs"}, "size: got '5 parsecs'"),
        ({"ttl_s": 0}, "ttl_s: got 0"),
        ({"budget": 256}, "got a HiSparseConfig and also budget"),
    ):
        with pytest.raises(ConfigError, match=message):
            DB(tmp_path / "new", net, SMALL, **SIZES, **options)
    with pytest.raises(ConfigError, match="got a LlamaConfig without weights, expected a model"):
        DB(tmp_path / "new", net.config, SMALL, **SIZES)


@pytest.mark.parametrize("index", ["sketch", "flat"])
def test_the_program_of_the_docs(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model, which has more tokens in the same text."""
    printed = re.search(r"decode sparsely:\n\n```\n(.*?)\n```", DOCS, re.DOTALL)[1]
    run_program(monkeypatch, tmp_path / "store", {"index": index})
    first, second, choices = capsys.readouterr().out.splitlines()
    assert choices == printed.splitlines()[2]
    got = re.sub(r"\d+", "N", f"{first}\n{second}")
    assert got == re.sub(r"\d+", "N", printed.rpartition("\n")[0])
    assert first.split()[0] == first.split()[2] > second.split()[0]
    assert int(second.split()[0]) < 60
