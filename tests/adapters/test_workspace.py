"""The sizing formula charges the memory that adapters keep between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.adapters import ADAPTERS, Attended, merge_attended
from hisparse.config import HiSparseConfig
from hisparse.engine.build import EngineSetup, resolve
from hisparse.types import AttentionRule, PagedKV
from tests.adapters.interpreter import Interpreter
from tests.shapes import TWO_LAYERS as SPEC
from tests.shapes import machine

REQUESTS = 4
CONTEXT = 1200 * 16


def plan(adapter: str, chunk_tokens: int = 0, **settings: Any) -> EngineSetup:
    config = HiSparseConfig(adapter=adapter, budget=256, **settings)
    sizes = {"host_bytes": 1 << 30, "device_bytes": 1 << 30, "context_length": CONTEXT}
    sizes |= {"max_requests": REQUESTS, "chunk_tokens": chunk_tokens}
    resources = machine(**sizes, device_type="cuda")
    return resolve(config, SPEC, 0.125, resources)


def kept_bytes(adapter: Any) -> int:
    """Tensors of all wrappers, each once."""
    tensors = {
        x.data_ptr(): x.nbytes
        for planned in adapter._wrappers.values()
        for holder in (planned, planned._wrapper)
        for x in vars(holder).values()
        if isinstance(x, Tensor)
    }
    return sum(tensors.values())


@pytest.mark.parametrize("scope", ["kv_head", "layer", "query_head"])
@pytest.mark.parametrize(
    ("settings", "widest", "tile"),
    [
        pytest.param({}, 16, 0, id="sparse"),
        # Contexts of up to 700 pages on the device, in tiles if their rows have no room.
        pytest.param({"min_sparse_context": 700 * 16}, 700, 512, id="dense-contexts"),
        pytest.param({"dense_layers": (1,)}, 1201, 512, id="dense-layers"),
    ],
)
def test_flashinfer_is_charged_for_all_its_wrappers(
    interpreter: Interpreter, settings: dict[str, Any], widest: int, tile: int, scope: str
) -> None:
    """Every number of requests, with tables of every width."""
    planned = plan("flashinfer", selection_scope=scope, **settings)
    assert planned.sizing.max_requests == REQUESTS
    adapter, heads = ADAPTERS.get("flashinfer")(), planned.policy.heads

    def attend(rows: int, queries: int, stored_heads: int, width: int) -> None:
        pages = torch.zeros(1, 16, stored_heads, 64, dtype=torch.bfloat16).transpose(1, 2)
        table = torch.zeros(rows, width, dtype=torch.int32)
        q = torch.zeros(rows, queries, 64, dtype=torch.bfloat16)
        lens = torch.zeros(rows, dtype=torch.int32)
        adapter.attend(q, PagedKV(pages, pages), table, lens, AttentionRule(0.125))

    for width in (1, 16, 17, 512, 513, 1024, 1025, 1201):
        for requests in range(1, REQUESTS + 1):
            if width <= widest:
                attend(requests * heads, 8 // heads, 2 if heads == 1 else 1, width)
        if width <= tile:
            attend(1, 8, 2, width)
    # FlashInfer's buffer for prefill, of which there is one.
    assert planned.sizing.device["workspace of the adapter"] == kept_bytes(adapter) + (32 << 20)


def test_a_tail_estimate_has_tables_of_the_whole_context(interpreter: Interpreter) -> None:
    without, planned = (
        plan("flashinfer", extensions={"tail_estimate": x}).sizing for x in (False, True)
    )
    # Rows of 2, 4 and 8, each with lists for up to 512, 1,024 and 2,048 pages of one mean.
    lists = 4 * (2 + 4 + 8) * (512 + 1024 + 2048)
    queries = 3 * (2 + 4 + 8) * 4 * 64 * 2
    ends = 3 * 4 * sum(3 * rows + 2 for rows in (2, 4, 8))
    more = 9 * (9 << 20) + lists + queries + ends
    assert (
        planned.device["workspace of the adapter"]
        == without.device["workspace of the adapter"] + more
    )


@pytest.mark.parametrize("name", ["torch", "triton", "flash_attention"])
def test_a_prefill_is_charged_for_its_outputs(
    monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter, name: str
) -> None:
    """While a tile of the prefix is merged into what was attended before it."""
    monkeypatch.setattr(ADAPTERS.get(name), "missing", classmethod(lambda cls: None))
    tile = Attended(torch.ones(64, 8, 64, dtype=torch.bfloat16), torch.zeros(64, 8))
    before = merge_attended(tile, tile)
    after = merge_attended(tile, before)
    held = sum(x.nbytes for attended in (tile, before, after) for x in attended)
    weights = 2 * tile.lse.nbytes
    assert plan(name, chunk_tokens=64).sizing.device["workspace of the adapter"] == held + weights


@pytest.mark.parametrize("name", ["torch", "triton", "flash_attention"])
def test_the_others_keep_nothing(
    monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter, name: str
) -> None:
    monkeypatch.setattr(ADAPTERS.get(name), "missing", classmethod(lambda cls: None))
    sizing = plan(name).sizing
    assert sizing.device["workspace of the adapter"] == 0
    assert "workspace" not in sizing.describe()
