"""Tensors that an operation cannot use are refused by one line that names them, before a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import (
    DecodeRows,
    HostKeys,
    LatentRow,
    NewTokens,
    RowState,
    SelectRule,
    SketchLayout,
    TailPages,
    TailPools,
    append_tokens,
    chunk_attention,
    chunk_index_score,
    decode_latents,
    dequantize,
    diff_tables,
    drop_pages,
    encode_latents,
    gather_pages,
    gather_tokens,
    index_score,
    key_score,
    merge_attention,
    outline_bytes,
    outline_score,
    page_outline,
    page_score,
    page_sketch,
    page_summary,
    paged_attention,
    promote_tail,
    quantize,
    rebalance,
    reset_rows,
    scatter_tokens,
    select,
    sketch_score,
    store_index_keys,
)
from hisparse.kernels.operation import OPERATIONS
from hisparse.types import IndexerInputs, PagedKV, Selection, StoredKV
from tests.kernels.world import i32

FP8 = torch.float8_e4m3fn


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def u8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def pool(*shape: int) -> PagedKV:
    return PagedKV(f32(*shape), f32(*shape))


def state(*shape: int) -> RowState:
    return RowState(*(torch.zeros(shape, dtype=torch.int32) for _ in range(3)))


SKETCH, LATENT, SLOT = SketchLayout(8, 4, 3, False), LatentRow(64, 16), torch.tensor([0])
EIGHT = quantize(f32(2, 1, 4, 8), f32(2, 1, 4, 8), torch.int8)
TAIL = TailPages(StoredKV(f32(4, 1, 4, 8), f32(4, 1, 4, 8), None), i32([1] * 4), i32([1] * 4))
TOKENS = NewTokens(f32(2, 2, 8), f32(2, 2, 8), StoredKV(*pool(9, 2, 4, 8)), torch.tensor([0, 4]),
                   torch.arange(4) * 4)  # fmt: skip
NEW = IndexerInputs(f32(1, 2, 8), f32(1, 8), f32(1, 2))
ROWS = DecodeRows(SLOT, i32([4]), i32([1]), i32([[0] * 9]), i32([9]), i32([7]), i32([5]))


class Call(NamedTuple):
    """An operation, and arguments that it takes."""

    operation: Callable[..., object]
    given: dict[str, Any]


CALLS = {
    call.operation.__name__: call
    for call in (
        Call(append_tokens, {"k": f32(1, 2, 8), "v": f32(1, 2, 8), "host": pool(9, 2, 4, 8),
                             "host_slots": SLOT, "device": pool(40, 1, 4, 8),
                             "tail_slots": torch.tensor([0, 4])}),
        Call(chunk_attention, {"query": f32(5, 4, 8), "k": f32(5, 2, 8), "v": f32(5, 2, 8),
                               "causal": True}),
        Call(decode_latents, {"pages": u8(3, 2, 112), "table": i32([0]), "row": LATENT,
                              "out": f32(1, 2, 80)}),
        Call(dequantize, {"stored": EIGHT, "out": pool(2, 1, 4, 8)}),
        Call(diff_tables, {"selection": Selection(i32([[4]]), i32([1])), "rows": ROWS,
                           "state": state(1, 6), "page_size": 16}),
        Call(drop_pages, {"rows": SLOT, "stale": torch.zeros(4, dtype=torch.bool),
                          "states": state(1, 1, 4)}),
        Call(encode_latents, {"latents": f32(2, 1, 80), "row": LATENT}),
        Call(gather_pages, {"src": pool(10, 2, 4, 8), "src_pages": i32([[0, 1]]),
                            "dst": pool(10, 2, 4, 8), "dst_pages": i32([[0, 1]])}),
        Call(gather_tokens, {"src": pool(10, 2, 4, 8), "slots": SLOT}),
        Call(chunk_index_score, {"new": NEW, "keys": f32(4, 8), "host_page_table": i32([0] * 3),
                                 "num_tokens": i32([3])}),
        Call(index_score, {"new": NEW, "keys": f32(4, 8), "host_page_table": i32([[0] * 3]),
                           "num_pages": i32([0])}),
        Call(key_score, {"query": f32(1, 4, 8), "keys": HostKeys(f32(3, 2, 4, 8)),
                         "host_page_table": i32([[1, 2]]), "num_pages": i32([2])}),
        Call(outline_score, {"query": f32(1, 2, 8), "outlines": u8(4, 2, outline_bytes(8)),
                             "host_page_table": i32([[0]]), "num_pages": i32([1])}),
        Call(page_outline, {"sketches": u8(4, 2, SKETCH.num_bytes), "layout": SKETCH}),
        Call(page_score, {"query": f32(1, 2, 8), "summaries": f32(9, 1, 1, 16),
                          "host_page_table": i32([[3]]), "num_pages": i32([1])}),
        Call(page_sketch, {"keys": f32(2, 4, 1, 8), "sketches": u8(4, 1, SKETCH.num_bytes),
                           "host_pages": i32([1, 2]), "layout": SKETCH}),
        Call(merge_attention, {"out": f32(2, 2, 8), "lse": f32(2, 2), "other_out": f32(2, 2, 8),
                               "other_lse": f32(2, 2), "sinks": f32(2)}),
        Call(page_summary, {"keys": f32(2, 4, 1, 8), "summaries": f32(4, 1, 1, 16),
                            "host_pages": i32([1, 2])}),
        Call(paged_attention, {"query": f32(1, 1, 8), "kv": EIGHT, "page_table": i32([[0]]),
                               "seq_lens": i32([1])}),
        Call(promote_tail, {"rows": SLOT, "page_index": i32([7]), "filled": torch.tensor([True]),
                            "capacity": i32([4]), "state": state(2, 4), "tail_pages": i32([0, 1])}),
        Call(quantize, {"k": f32(2, 1, 4, 8), "v": f32(2, 1, 4, 8), "dtype": torch.int8}),
        Call(rebalance, {"rows": SLOT, "new_capacity": i32([4]), "capacity": i32([4, 4]),
                         "states": state(1, 2, 4), "free_pages": i32([[0] * 3]),
                         "num_free": i32([3])}),
        Call(reset_rows, {"rows": SLOT, "capacity": i32([4, 4]), "states": state(1, 2, 4)}),
        Call(scatter_tokens, {"k": f32(1, 2, 8), "v": f32(1, 2, 8), "dst": pool(10, 2, 4, 8),
                              "slots": SLOT}),
        Call(select, {"scores": f32(1, 2, 4), "num_pages": i32([3]),
                      "rule": SelectRule(heads=2, max_pages=2)}),
        Call(sketch_score, {"query": f32(2, 4, 8), "sketches": u8(4, 2, SKETCH.num_bytes),
                            "host_page_table": i32([[1, 1]] * 2), "num_pages": i32([1, 1]),
                            "layout": SKETCH, "tail": TAIL}),
        Call(store_index_keys, {"new": f32(1, 8), "keys": f32(4, 8), "host_pages": i32([1])}),
    )
}  # fmt: skip

#: An operation, what is changed, and the error.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("append_tokens", {"tail_slots": torch.tensor([0, 4, 8])}, "got 3 for 1 tokens of 2 heads"),
    ("append_tokens", {"tail_slots": SLOT}, r"device.k: got shape \[40, 1, 4, 8\], expected \[any"),
    ("append_tokens", {"tail_slots": i32([0, 4])}, "tail_slots: got dtype torch.int32"),
    ("chunk_attention", {"k": f32(4, 2, 8), "v": f32(4, 2, 8)}, "k: got 4 keys, expected one"),
    ("chunk_attention", {"k": f32(5, 3, 8), "v": f32(5, 3, 8)}, "k: got 3 heads, expected"),
    ("chunk_attention", {"first_key": -3}, "k: got .* and of 3 tokens before them"),
    ("chunk_attention", {"v": f32(5, 1, 8)}, r"v: got shape \[5, 1, 8\]"),
    ("decode_latents", {"pages": u8(3, 2, 100)}, "pages: got shape"),
    ("decode_latents", {"out": f32(2, 2, 80)}, "out: got shape"),
    ("decode_latents", {"table": i32([3]), "impl": "cpu"}, "got 3 in entry 0, expected at most 2"),
    ("dequantize", {"stored": EIGHT._replace(scales=None)}, "scales: got None"),
    ("dequantize", {"out": (f32(2, 1, 4, 8), f32(1, 1, 4, 8))}, r"out.v: got shape \[1, 1, 4, 8\]"),
    ("diff_tables", {"rows": ROWS._replace(tail_pages=SLOT)}, "tail_pages: got dtype torch.int64"),
    ("diff_tables", {"rows": ROWS._replace(num_pages=i32([1, 2]))}, r"num_pages: got shape \[2\]"),
    ("diff_tables", {"rows": ROWS._replace(dense=i32([1]))}, "dense: got dtype torch.int32"),
    ("diff_tables", {"rows": ROWS._replace(tail_lens=i32([5]).to("meta"))}, "tail_lens: got dev"),
    ("diff_tables", {"selection": Selection(i32([[4]]), i32([1, 1]))}, "lengths: got shape"),
    ("diff_tables", {"selection": None}, "width: got none without a selection"),
    ("diff_tables", {"width": 0}, "width: got 0, expected at least 1"),
    ("diff_tables", {"selection": None, "width": -1}, "width: got -1, expected"),
    ("drop_pages", {"stale": f32(4)}, "stale: got dtype"),
    ("drop_pages", {"stale": torch.zeros(2, 2, dtype=torch.bool)}, "stale: got shape"),
    ("drop_pages", {"states": state(1, 1, 4)._replace(slot_pages=f32(1, 1, 4))}, "slot_pages: got"),
    ("drop_pages", {"states": state(1, 1, 4)._replace(lru_order=i32([[[0]]]))}, "lru_order: got"),
    ("encode_latents", {"latents": f32(2, 1, 81)}, "latents: got shape"),
    ("decode_latents", {"pages": u8(0, 2, 112)}, r"pages: got .*, expected \[1 or more, any,"),
    ("decode_latents", {"pages": u8(3, 2, 224)[..., ::2], "impl": "triton"}, "pages: got stride 2"),
    ("gather_pages", {"dst": pool(4, 3, 4, 8)}, "got pages of 3 heads, expected .* 2, or 1 head"),
    ("gather_pages", {"src_pages": SLOT[None]}, "src_pages: got dtype torch.int64, expected torch"),
    ("gather_pages", {"heads": 0}, "heads: got 0, expected 1 or more"),
    ("gather_pages", {"src": pool(3, 4, 1, 2, 8), "dst": pool(2, 4, 1, 2, 8)},
     r"dst.k: got shape \[2, 4, 1, 2, 8\]"),
    ("gather_tokens", {"slots": i32([0])}, "slots: got dtype torch.int32, expected torch.int64"),
    ("gather_tokens", {"src": pool(1, 1, 10, 2, 4, 8)}, r"src\.k: got shape"),
    ("gather_tokens", {"src": pool(4, 8)}, r"src\.k: got shape"),
    ("index_score", {"new": NEW._replace(weights=f32(1, 3))}, "new.weights: got shape"),
    ("index_score", {"new": NEW._replace(keys=f32(1, 7))}, "new.keys: got shape"),
    ("index_score", {"keys": f32(4, 9)}, r"keys: got shape \[4, 9\]"),
    ("index_score", {"keys": f32(4, 8).half()}, "keys: got dtype torch.float16, expected one of"),
    ("index_score", {"keys": f32(4, 8).to(FP8)}, "scales: got None, expected them"),
    ("index_score", {"scales": f32(4)}, "scales: got them, expected None for torch.float32"),
    ("index_score", {"keys": f32(4, 16)[..., ::2], "impl": "triton"}, "keys: got stride 2 in"),
    ("index_score", {"num_pages": f32(1)}, "num_pages: got dtype torch.float32"),
    ("key_score", {"query": f32(1, 4, 8).half()}, "query: got dtype torch.float16, expected"),
    ("key_score", {"keys": HostKeys(f32(3, 2, 4, 8).char())},
     "keys.scales: got None, expected them for torch.int8"),
    ("key_score", {"keys": HostKeys(f32(3, 2, 4, 8), u8(3, 2, 4, 2))},
     "keys.scales: got them, expected None for torch.float32"),
    ("key_score", {"keys": HostKeys(i32([[[[1] * 8]]]))}, "keys.k: got dtype torch.int32"),
    ("key_score", {"keys": HostKeys(u8(3, 1, 4, 112))},
     "keys.row: got None, expected one for torch.uint8"),
    ("key_score", {"keys": HostKeys(f32(3, 1, 4, 8), row=LATENT)},
     r"keys.row: got LatentRow\(rank=64, rope=16\), expected None for torch.float32"),
    ("key_score", {"keys": HostKeys(u8(3, 1, 4, 112), row=LATENT)},
     "query: got width 8, expected 80, that of the latents"),
    ("key_score", {"keys": HostKeys(u8(3, 1, 4, 96), row=LATENT), "query": f32(1, 4, 80)},
     "keys.k: got width 96, expected 112"),
    ("key_score", {"keys": HostKeys(f32(3, 2, 0, 8))}, r"keys.k: got .*, expected \[1 or more,"),
    ("key_score", {"keys": HostKeys(f32(3, 2, 4, 6))}, "keys.k: got width 6, expected 8"),
    ("key_score", {"keys": HostKeys(f32(3, 2, 4, 16)[..., ::2])}, "keys.k: got stride 2 in its"),
    ("key_score", {"keys": HostKeys(f32(3, 3, 4, 8))},
     "keys.k: got 3 heads, expected a divisor of the 4"),
    ("key_score", {"reduce": "sum"}, "reduce: got 'sum', expected max or lse"),
    ("key_score", {"host_page_table": i32([[2, 3]]), "impl": "cpu"},
     "host_page_table: got 3 in row 0, entry 1, expected 0 to 2"),
    ("outline_score", {"outlines": u8(0, 2, 9)}, r"outlines: got .*, expected \[1 or more,"),
    ("outline_score", {"query": f32(1, 3, 8)}, "outlines: got 2 heads, expected a divisor of"),
    ("outline_score", {"query": f32(1, 2, 40)}, r"outlines: got shape \[4, 2, 9\]"),
    ("outline_score", {"outlines": f32(4, 2, 9)}, "outlines: got dtype torch.float32"),
    ("outline_score", {"outlines": u8(4, 2, 18)[..., ::2], "impl": "triton"}, "outlines: got str"),
    ("outline_score", {"num_pages": i32([1, 1])}, r"num_pages: got shape \[2\], expected \[1\]"),
    ("page_outline", {"sketches": f32(4, 2, SKETCH.num_bytes)}, "sketches: got dtype torch.float"),
    ("page_outline", {"sketches": i32([[0] * SKETCH.num_bytes])}, "got dtype torch.int32"),
    ("page_outline", {"sketches": u8(4, 2, SKETCH.num_bytes + 16)}, "sketches: got shape"),
    ("page_score", {"query": f32(1, 2, 8).double()}, "query: got dtype torch.float64, expected"),
    ("page_score", {"summaries": f32(9, 0, 1, 16)}, r"expected \[1 or more, 1 or more, any, 16\]"),
    ("page_score", {"summaries": f32(9, 1, 1, 8)}, r"summaries: got shape \[9, 1, 1, 8\]"),
    ("page_score", {"summaries": f32(9, 1, 1, 16).int()}, "summaries: got dtype torch.int32, exp"),
    ("page_score", {"summaries": f32(9, 1, 1, 16).to("meta")}, "summaries: got device meta"),
    ("page_score", {"summaries": f32(9, 1, 3, 16)}, "summaries: got 3 heads, expected a divisor"),
    ("page_score", {"summaries": f32(9, 1, 1, 32)[..., ::2], "impl": "triton"}, "summaries: got s"),
    ("page_score", {"host_page_table": SLOT[None]}, "host_page_table: got dtype torch.int64"),
    ("page_score", {"num_pages": i32([1]).to("meta")}, "num_pages: got device meta, expected cpu"),
    ("page_score", {"scales": f32(9, 1, 2)}, r"scales: got shape \[9, 1, 2\]"),
    ("page_sketch", {"keys": f32(2, 4, 1, 9)}, r"keys: got shape \[2, 4, 1, 9\]"),
    ("page_sketch", {"keys": f32(2, 4, 1, 8).int()}, "keys: got dtype torch.int32, expected one"),
    ("page_sketch", {"sketches": u8(4, 1, 99)}, r"sketches: got shape \[4, 1, 99\]"),
    ("page_sketch", {"host_pages": i32([0] * 3)}, r"host_pages: got shape \[3\], expected \[2\]"),
    ("page_sketch", {"host_pages": f32(2)}, "host_pages: got dtype torch.float32"),
    ("page_sketch", {"keys": f32(2, 0, 1, 8), "layout": SketchLayout(8, 0, 3)},
     r"keys: got shape \[2, 0, 1, 8\], expected \[any, 1 or more, any, 8\]"),
    ("page_sketch", {"layout": SketchLayout(8, 4, 9)}, "got 9 detailed channels, expected 0 to 8"),
    ("page_summary", {"keys": f32(2, 0, 1, 8)}, r"keys: got .*, expected \[any, 1 or mor"),
    ("page_summary", {"summaries": f32(4, 1, 1, 16).half()}, "summaries: got dtype"),
    ("page_summary", {"summaries": f32(4, 1, 1, 15)}, r"summaries: got shape \[4, 1, 1, 15\]"),
    ("page_summary", {"summaries": f32(4, 3, 1, 16)}, "got 3 ranges, expected a divisor of"),
    ("page_summary", {"scales": f32(4, 1, 1)}, "scales: got them, expected None for torch.float32"),
    ("page_summary", {"summaries": f32(4, 1, 1, 16).to(FP8)}, "scales: got None, expected them"),
    ("merge_attention", {"other_out": None}, "other_lse: got one of other_out and other_lse, exp"),
    ("merge_attention", {"other_lse": f32(2, 3)}, r"other_lse: got shape \[2, 3\], expected \[2"),
    ("merge_attention", {"sinks": f32(3)}, r"sinks: got shape \[3\], expected \[2\]"),
    ("merge_attention", {"lse": f32(2, 2).half()}, "lse: got dtype torch.float16, expected"),
    ("page_summary", {"host_pages": i32([0] * 3)}, r"host_pages: got shape \[3\], expected \[2\]"),
    ("page_summary", {"host_pages": f32(2)}, "host_pages: got dtype torch.float32"),
    ("paged_attention", {"kv": EIGHT._replace(scales=u8(2, 1, 2, 2))}, "kv.scales: got shape"),
    ("paged_attention", {"heads": 2}, "heads: got 2, expected 1, or a multiple of the 1 heads of "),
    ("paged_attention", {"kv": pool(0, 1, 4, 8)}, r"kv.k: got .*, expected \[1 or more, any, 1 or"),
    ("paged_attention", {"page_table": i32([[9]]), "impl": "cpu"},
     "page_table: got 9 in row 0, entry 0, expected 0 to 1"),
    ("paged_attention", {"query": f32(2, 1, 8), "page_table": i32([[0]] * 2),
                         "seq_lens": i32([1, 1]), "heads": 2, "impl": "triton"},
     "heads: got 2 on cpu with impl 'triton', expected 1"),
    ("paged_attention", {"seq_lens": i32([9]), "impl": "cpu"}, "got 9, expected 0 to 4, the token"),
    ("promote_tail", {"filled": i32([1])}, "filled: got dtype torch.int32, expected torch.bool"),
    ("promote_tail", {"pools": TailPools(f32(2, 1, 4, 8), f32(1, 1, 4, 8))},
     r"pools.v: got shape \[1, 1, 4, 8\], expected \[2, 1, 4, any\]"),
    ("promote_tail", {"rows": torch.tensor([0, 1]), "filled": torch.tensor([True, True]),
                      "capacity": i32([4, 4]), "pools": TailPools(f32(2, 1, 4, 8), None, 3)},
     "rows: got 2 of each request, expected as many as it has KV heads, 3, or a multiple"),
    ("promote_tail", {"pools": TailPools(f32(2, 1, 4, 8), None, 0)}, "pools.kv_heads: got 0, exp"),
    ("promote_tail", {"pools": TailPools(f32(2, 1, 4, 8), u8(2, 1, 4, 8))},
     "pools.v: got dtype torch.uint8, expected torch.float32"),
    ("quantize", {"k": i32([[[0]]]), "v": i32([[[0]]])}, "k: got dtype torch.int32"),
    ("quantize", {"v": f32(1, 1, 4, 8)}, "v: got shape"),
    ("quantize", {"k": f32(8), "v": f32(8)}, r"k: got .*, expected \[..., 1 or more, 1 or more\]"),
    ("quantize", {"dtype": torch.uint8}, "got torch.uint8, expected one of torch.float8_e4m3fn, "),
    ("rebalance", {"free_pages": i32([[0] * 3] * 2)}, r"free_pages: got shape \[2, 3\], expected"),
    ("reset_rows", {"capacity": i32([4])}, r"slot_pages: got shape \[1, 2, 4\], expected \[any, 1"),
    ("scatter_tokens", {"v": f32(1, 2, 9)}, r"v: got shape \[1, 2, 9\], expected \[1, 2, 8\]"),
    ("scatter_tokens", {"dst": pool(2, 10, 2, 4, 8)},
     r"k: got shape \[1, 2, 8\], expected \[2, any, 2, 8\]"),
    ("select", {"scores": f32(1, 3, 4)}, "scores: got 3 heads, expected a multiple or a divisor"),
    ("select", {"scores": f32(1, 2, 4).double()}, "scores: got dtype torch.float64"),
    ("select", {"num_pages": i32([3, 3])}, r"num_pages: got shape \[2\], expected \[1\]"),
    ("select", {"num_pages": i32([3]).to("meta")}, "num_pages: got device meta, expected cpu"),
    ("select", {"forced": f32(1, 3).bool()}, r"forced: got shape \[1, 3\], expected \[1, 4\]"),
    ("select", {"forced": f32(1, 4)}, "forced: got dtype torch.float32, expected torch.bool"),
    ("select", {"rest": f32(1, 3)}, r"rest: got shape \[1, 3\], expected \[1, 2\]"),
    ("select", {"rest": f32(1, 2).to("meta")}, "rest: got device meta, expected cpu"),
    ("select", {"rule": SelectRule(heads=2, max_pages=2, invalid_scores=f32(1))},
     "invalid_scores: got dtype torch.float32, expected torch.i"),
    ("sketch_score", {"sketches": u8(0, 2, SKETCH.num_bytes)}, r"sketches: got .*expected \[1 or"),
    ("sketch_score", {"tail": TAIL._replace(lens=None)}, "tail.lens: got None, expected a tensor"),
    ("sketch_score", {"tail": TAIL._replace(pages=i32([1] * 3))}, r"tail.lens: got shape \[4\]"),
    ("sketch_score", {"tail": TAIL._replace(pages=i32([1] * 3), lens=i32([1] * 3))},
     "tail.pages: got 3 pages of 1 heads, expected 2 pages of 2 heads, or a multiple of 4"),
    ("sketch_score", {"tail": TAIL._replace(kv=StoredKV(*[f32(4, 1, 4, 9)] * 2, None))},
     "tail.kv.k: got shape"),
    ("sketch_score", {"tail": TAIL._replace(kv=TAIL.kv._replace(v=f32(4, 1, 4, 8).char()))},
     "tail.kv.v: got dtype torch.int8, expected torch.float32"),
    ("sketch_score", {"tail": TAIL._replace(new=TOKENS._replace(tail_slots=None))},
     "tail.new.tail_slots: got None, expected a tensor, as tail.new.k is one"),
    ("sketch_score", {"tail": TAIL._replace(new=TOKENS._replace(k=f32(2, 2, 9)))},
     r"tail.new.k: got shape \[2, 2, 9\], expected \[2, 2, 8\]"),
    ("sketch_score", {"tail": TAIL._replace(new=TOKENS._replace(host=StoredKV(*pool(9, 2, 5, 8))))},
     r"tail.new.host.k: got shape .*expected \[1 or more, 2, 4, 8\]"),
    ("sketch_score", {"tail": TAIL._replace(kv=TAIL.kv._replace(v=f32(0, 1, 4, 8)))},
     r"tail.kv.v: got shape \[0, 1, 4, 8\], expected \[4, 1, 4, any\]"),
    ("store_index_keys", {"new": f32(1, 9)}, r"keys: got shape \[4, 8\], expected \[any, 9\]"),
    ("store_index_keys", {"keys": f32(4, 8).half()}, "keys: got dtype torch.float16, expected one"),
    ("store_index_keys", {"host_pages": i32([1, 2])}, r"host_pages: got shape \[2\], expected"),
    ("store_index_keys", {"keys": f32(4, 8).to(FP8)}, "scales: got None, expected them"),
]  # fmt: skip


#: An operation, a tensor that it writes, rows that are not dense, and the layout that is expected.
STRIDED: list[tuple[str, str, Tensor, str]] = [
    ("decode_latents", "out", f32(1, 2, 160)[..., ::2], "a contiguous tensor"),
    ("decode_latents", "out", f32(1, 2, 81)[..., :80], "a contiguous tensor"),
    ("page_sketch", "sketches", u8(4, 1, 2 * SKETCH.num_bytes)[..., ::2], "1 in the last dim"),
    ("page_summary", "summaries", f32(4, 1, 1, 32)[..., ::2], "a contiguous tensor"),
    ("page_summary", "summaries", f32(4, 3, 1, 16)[:, :1], "a contiguous tensor"),
    ("store_index_keys", "keys", f32(4, 16)[..., ::2], "1 in the last dimension"),
]


def test_every_operation_has_a_call() -> None:
    assert set(OPERATIONS) <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_the_table_are_taken(name: str) -> None:
    operation, given = CALLS[name]
    operation(**{key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()})


@pytest.mark.parametrize(
    ("name", "change", "message"), REFUSED, ids=[f"{name}-{msg[:24]}" for name, _, msg in REFUSED]
)
def test_the_error_names_the_tensor(
    name: str, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Refused before a kernel is launched, so Triton need not be able to run.
    monkeypatch.setattr("hisparse.kernels.operation.why_no_triton", lambda: None)
    monkeypatch.setattr("hisparse.kernels.operation._INTERPRETED", True)
    operation, given = CALLS[name]
    with pytest.raises(KernelError, match=message):
        operation(**(given | change))


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu", "triton"])
@pytest.mark.parametrize(
    ("name", "tensor", "strided", "expected"), STRIDED, ids=[f"{x[0]}-{x[3][:4]}" for x in STRIDED]
)
def test_a_written_tensor_without_dense_rows_is_refused(
    name: str, tensor: str, strided: Tensor, expected: str, impl: str
) -> None:
    """Also after a call with dense ones, which is remembered as checked."""
    operation, given = CALLS[name]
    operation(**given)
    before = strided.clone()
    with pytest.raises(KernelError, match=rf"{tensor}: got strides \[.*\], expected {expected}"):
        operation(**(given | {tensor: strided, "impl": impl}))
    assert torch.equal(strided, before)
