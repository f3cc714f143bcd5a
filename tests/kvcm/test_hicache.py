"""SGLang's host pages through the manager's store, in every layout, as a server with hisparse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hisparse.errors import ConfigError
from hisparse.sglang.hicache import HiCacheKVCM
from hisparse.storage.managed import ManagedStore
from tests.kvcm.manager import Manager

LAYERS, TOKENS, HEADS, WIDTH, PAGES = 3, 4, 2, 5, 6
KEYS = [f"{number:064x}" for number in range(PAGES)]
KINDS = [(False, x) for x in ("layer_first", "page_first", "page_first_direct", "page_head")]
KINDS += [(True, x) for x in ("layer_first", "page_first", "page_first_direct")]


def host_pool(is_latent: bool, layout: str) -> Any:
    """SGLang's pool without a device pool, which its constructor asks for."""
    pool = object.__new__(MLATokenToKVPoolHost if is_latent else MHATokenToKVPoolHost)
    pool.__dict__.update(
        layout=layout, page_size=TOKENS, layer_num=LAYERS, head_num=HEADS, head_dim=WIDTH,
        kv_cache_dim=WIDTH, dtype=torch.bfloat16, size=PAGES * TOKENS, page_num=PAGES,
        device="cpu", pin_memory=False, allocator=None, dcp_size=1,
        _transfer_device=SimpleNamespace(type="npu"), override_kv_cache_dim=None,
    )  # fmt: skip
    pool.kv_buffer = pool.init_kv_buffer()
    return pool


def tokens_of(pool: Any, page: int, is_latent: bool) -> torch.Tensor:
    """``[layers, parts, tokens, heads, width]`` of a page, by SGLang's meaning of its layouts."""
    data, first = pool.kv_buffer, page * TOKENS
    data = data[None] if is_latent else data
    if pool.layout == "layer_first":
        found = data[:, :, first : first + TOKENS].transpose(0, 1)
    elif pool.layout == "page_first":
        found = data[:, first : first + TOKENS].permute(2, 0, 1, 3, 4)
    elif pool.layout == "page_first_direct":
        found = data[:, page].transpose(0, 1)
    else:
        found = data[:, page].permute(3, 0, 2, 1, 4)
    return found.contiguous()


def backend(
    of: Manager, pool: Any, is_latent: bool, ranks: dict[str, int] | None = None, **extra: Any
) -> HiCacheKVCM:
    of.root.mkdir(mode=0o700, exist_ok=True)
    address = f"127.0.0.1:{of.ports['rpc']}"
    given = {"manager": address, "class_name": "HiCacheKVCM", "model": "some weights"}
    config = HiCacheStorageConfig(
        tp_rank=1, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=is_latent, enable_storage_metrics=False, is_page_first_layout=False,
        model_name="a model", extra_config=given | extra,
    )  # fmt: skip
    for name, rank in (ranks or {}).items():
        setattr(config, name, rank)
        setattr(config, name.replace("rank", "size"), 2)
    made = HiCacheKVCM(config, {})
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, "kv")
    made.on_host_pools_registered()
    return made


def write(made: HiCacheKVCM, pool: Any) -> bool:
    return made.batch_set(KEYS, [pool.get_data_page(i * TOKENS) for i in range(PAGES)])


@pytest.fixture(params=KINDS, ids=lambda x: f"{'MLA' if x[0] else 'MHA'}-{x[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[bool, str]:
    found: tuple[bool, str] = request.param
    return found


@pytest.fixture
def name(kind: tuple[bool, str]) -> str:
    return "-".join(map(str, kind))


@pytest.fixture
def store(shared: Manager) -> Iterator[ManagedStore]:
    with closing(ManagedStore(f"127.0.0.1:{shared.ports['rpc']}", "default", 5.0)) as store:
        yield store


def test_pages_are_those_of_a_server_with_hisparse(
    shared: Manager, store: ManagedStore, kind: tuple[bool, str], name: str
) -> None:
    """A record is [layers, K and V, tokens, heads, width], whatever the layout."""
    is_latent, _ = kind
    pool, other = host_pool(*kind), host_pool(is_latent, "layer_first")
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    made = backend(shared, pool, is_latent, model=name)
    space = made._namespace
    kv_dtype = "bfloat16 [3, 1, 5, 0]" if is_latent else "bfloat16 [3, 2, 5, 5]"
    assert (space.kv_dtype, space.model, space.page_size) == (kv_dtype, name, TOKENS)
    assert (space.rank, space.num_ranks) == ((0, 1) if is_latent else (1, 2))
    assert made.batch_exists(KEYS) == 0 and not made.exists(KEYS[0])
    assert write(made, pool)
    records = [bytearray(space.page_bytes) for _ in KEYS]
    assert store.get(space, KEYS, records) == [True] * PAGES
    for page, record in enumerate(records):
        expected = tokens_of(pool, page, is_latent).view(torch.uint8).flatten()
        assert bytes(record) == expected.numpy().tobytes(), page
    # A pool in another layout reads the same tokens.
    reader = backend(shared, other, is_latent, model=name)
    assert reader.batch_exists([*KEYS, "ff" * 32]) == PAGES
    targets = [torch.zeros_like(other.get_data_page(0)) for _ in KEYS]
    for page, data in enumerate(reader.batch_get([*KEYS[:5], "ff" * 32], targets)):
        assert (data is None) is (page == 5)
        if data is not None:
            other.set_from_flat_data_page(page * TOKENS, data)
            assert torch.equal(tokens_of(other, page, is_latent), tokens_of(pool, page, is_latent))
    for each in (made, reader):
        each.close()


@pytest.mark.parametrize("group", ["pp", "attn_cp", "dcp"])
def test_ranks_that_hold_other_layers_or_tokens_share_nothing(shared: Manager, group: str) -> None:
    def opened(rank: int) -> HiCacheKVCM:
        return backend(shared, host_pool(True, "layer_first"), True, {f"{group}_rank": rank})

    first, second = opened(0), opened(1)
    assert first._namespace.key != second._namespace.key
    for each in (first, second):
        each.close()


def test_single_pages(shared: Manager) -> None:
    pool = host_pool(False, "page_first")
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    made = backend(shared, pool, False, model="single")
    page = pool.get_data_page(0)
    assert made.get(KEYS[0], torch.zeros_like(page)) is None
    assert made.set(KEYS[0], page) and not made.exists(KEYS[1])
    assert torch.equal(made.get(KEYS[0], torch.zeros_like(page)), page)
    made.close()


def test_no_manager_is_a_miss_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    pool = host_pool(False, "page_first")
    nobody: Any = SimpleNamespace(ports={"rpc": 1}, root=SimpleNamespace(mkdir=lambda **_: None))
    made = backend(nobody, pool, False)
    with caplog.at_level("WARNING", "hisparse"):
        assert made.batch_exists(KEYS) == 0 and not write(made, pool)
        targets = [torch.zeros_like(pool.get_data_page(0)) for _ in KEYS]
        assert made.batch_get(KEYS, targets) == [None] * PAGES
    (record,) = caplog.records
    assert "UNAVAILABLE" in record.getMessage() and "\n" not in record.getMessage()
    made.close()


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"manager": None}, "manager is not set; expected HOST:PORT"),
        ({"model": None}, "model is not set; expected what a server with hisparse logs"),
        ({"manager": "host"}, "manager: got 'host', expected HOST:PORT"),
        ({"interface_v1": 1}, "unknown .*'interface_v1'"),
        ({"model": "\n"}, "model: got .*, expected 1 to 256 printable ASCII characters"),
    ],
)
def test_options_that_are_wrong(shared: Manager, extra: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        backend(shared, host_pool(False, "page_first"), False, **extra)


def test_models_with_other_state_are_refused(shared: Manager) -> None:
    made = backend(shared, host_pool(False, "page_first"), False)
    made.register_mem_host_pool_v2(None, "mamba")
    with pytest.raises(ConfigError, match=r"hicache: got memory for \['mamba'\], expected only"):
        made.on_host_pools_registered()
    other = host_pool(False, "page_first")
    other.layout = "page_unified"
    with pytest.raises(ConfigError, match="got MHATokenToKVPoolHost in layout page_unified"):
        made.register_mem_pool_host(other)
    made.close()
