"""Compiles each of Triton's kernels for one architecture and prints what it spills; needs no GPU.

.venv/bin/python tests/kernels/triton_compile.py 90
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from hisparse.kernels.triton import attention as triton_attention
from hisparse.kernels.triton import fp8 as triton_fp8
from hisparse.kernels.triton import outline as triton_outline
from hisparse.kernels.triton import sketch as triton_sketch

# The package offers functions of the same names.
triton_page_score = importlib.import_module("hisparse.kernels.triton.page_score")
triton_page_summary = importlib.import_module("hisparse.kernels.triton.page_summary")
triton_select = importlib.import_module("hisparse.kernels.triton.select")

LLAMA = {"GROUP": 4, "QUERIES": 16, "WIDTH": 128, "FIRST": 128, "FIRST_BLOCK": 128}
LLAMA |= {"REST_BLOCK": 0, "VALUE": 128, "VALUE_BLOCK": 128, "SIZE": 16}
MLA = {"GROUP": 128, "QUERIES": 32, "WIDTH": 576, "FIRST": 512, "FIRST_BLOCK": 512}
MLA |= {"REST_BLOCK": 64, "VALUE": 512, "VALUE_BLOCK": 512, "SIZE": 64}
SUMMARY = {"SIZE": 16, "SIZE_BLOCK": 16, "DIM": 128, "DIM_BLOCK": 128}
SCORE = {"RANGES": 4, "SCALED": True}
SKETCH = {"SIZE": 16, "DIM": 128, "COUNT": 40, "BLOCKS": 16, "CODE_BYTES": 4}
SKETCH_MLA = {"SIZE": 64, "DIM": 576, "COUNT": 180, "BLOCKS": 72, "CODE_BYTES": 16}
COUNT = {"COUNTED": True, "MAX_PAGES": 128, "SELECTIONS": 1}
OUTLINE = {"QUERIES": 16, "PAGES": 16, "DIM_BLOCK": 32}
POINTERS = {
    "query": "*fp32",
    "out": "*fp32",
    "lse": "*fp32",
    "lses": "*fp32",
    "partial": "*fp32",
    "scores": "*fp32",
    "combined": "*fp32",
    "page_table": "*i32",
    "seq_lens": "*i32",
    "host_page_table": "*i32",
    "num_pages": "*i32",
    "rest": "*fp32",
    "invalid_scores": "*i64",
    "host_pages": "*i64",
}
# What a block may take: a launch that asks for more fails.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
# What a launch finds out about its arguments decides how wide the loads are: without it the code is
# another. Strides of whole rows are multiples of 16 elements, those of the last dimension 1.
ALIGNED = ["key_page", "key_head", "key_token", "value_page", "value_head", "value_token"]
ALIGNED += ["scale_page", "scale_head"]
ALIGNED += ["stride_page", "stride_token", "stride_head", "stride_out_page", "stride_out_head"]
ALIGNED += ["stride_range"]
ONES = {"table_entry": 1, "stride_entry": 1, "stride_dim": 1}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    f"attend {name} {kind}": (
        triton_attention._attend_kernel,
        sizes
        | {"EXACT": kind != "fp32" and name == "GQA", "FP8": kind == "u8", "WIDE": False}
        | triton_attention.launch_options(sizes["FIRST"], getattr(torch, dtype)),
        {"keys": f"*{kind}", "values": f"*{kind}", "scales": "*u8"},
    )
    for name, sizes, kind, dtype in (
        ("GQA", LLAMA, "bf16", "bfloat16"),
        ("GQA", LLAMA, "fp32", "float32"),
        ("GQA", LLAMA, "u8", "float8_e4m3fn"),
        ("MLA", MLA, "bf16", "bfloat16"),
    )
} | {
    "encode": (
        triton_fp8._encode_kernel,
        {"WIDTH": 128, "WIDTH_BLOCK": 128, "VECTORS": 8},
        {"vectors": "*bf16", "codes": "*u8", "scales": "*u8"},
    ),
    "merge": (
        triton_attention._merge_kernel,
        {"SPLITS": 16, "STEP": 16, "VALUE": 128, "VALUE_BLOCK": 128},
        {},
    ),
    "merge 128k of MLA": (
        triton_attention._merge_kernel,
        {"SPLITS": 128, "STEP": 16, "VALUE": 512, "VALUE_BLOCK": 512},
        {},
    ),
    "summary fp32": (
        triton_page_summary._summary_kernel,
        SUMMARY | {"NARROW": True},
        {"keys": "*fp32", "summaries": "*bf16"},
    ),
    "summary bf16": (
        triton_page_summary._summary_kernel,
        SUMMARY | {"NARROW": True},
        {"keys": "*bf16", "summaries": "*bf16"},
    ),
    "summary MLA": (
        triton_page_summary._summary_kernel,
        {"SIZE": 64, "SIZE_BLOCK": 64, "DIM": 576, "DIM_BLOCK": 128, "NARROW": True},
        {"keys": "*bf16", "summaries": "*bf16"},
    ),
    "score": (
        triton_page_score._score_kernel,
        SCORE | {"GROUP": 4, "GROUP_BLOCK": 4, "DIM": 128, "DIM_BLOCK": 128, "PAGES": 16},
        {"summaries": "*bf16", "scales": "*fp32"},
    ),
    "score MLA": (
        triton_page_score._score_kernel,
        SCORE | {"GROUP": 128, "GROUP_BLOCK": 128, "DIM": 576, "DIM_BLOCK": 1024, "PAGES": 4},
        {"summaries": "*bf16", "scales": "*fp32"},
    ),
    "sketch": (
        triton_sketch._sketch_kernel,
        SKETCH | {"DIM_BLOCK": 128, "NUM_BYTES": 360},
        {"keys": "*bf16", "sketches": "*u8"},
    ),
    "sketch MLA": (
        triton_sketch._sketch_kernel,
        SKETCH_MLA | {"DIM_BLOCK": 1024, "NUM_BYTES": 3780},
        {"keys": "*bf16", "sketches": "*u8"},
    ),
    "sketch score": (
        triton_sketch._score_kernel,
        SKETCH | {"DIM_BLOCK": 32, "GROUP": 4, "QUERIES": 16, "PARTS": 1, "PAGES": 16},
        {"sketches": "*u8"},
    ),
    "sketch score MLA": (
        triton_sketch._score_kernel,
        SKETCH_MLA | {"DIM_BLOCK": 32, "GROUP": 128, "QUERIES": 16, "PARTS": 8, "PAGES": 16},
        {"sketches": "*u8"},
    ),
    "outline score": (
        triton_outline._score_kernel,
        OUTLINE | {"GROUP": 4, "PARTS": 1, "DIM": 128, "HALF": 64},
        {"outlines": "*u8"},
    ),
    "outline score MLA": (
        triton_outline._score_kernel,
        OUTLINE | {"GROUP": 128, "PARTS": 8, "DIM": 576, "HALF": 288},
        {"outlines": "*u8"},
    ),
    "share": (
        triton_select._share_kernel,
        COUNT | {"NEAR": False, "GROUP": 4, "GROUP_BLOCK": 4, "STEP": 256},
        {},
    ),
    "share MLA": (
        triton_select._share_kernel,
        COUNT | {"NEAR": False, "GROUP": 128, "GROUP_BLOCK": 128, "STEP": 16},
        {},
    ),
    "near": (
        triton_select._share_kernel,
        COUNT | {"NEAR": True, "GROUP": 4, "GROUP_BLOCK": 4, "STEP": 256},
        {},
    ),
    "count": (
        triton_select._count_kernel,
        {"MAX_PAGES": 128, "SELECTIONS": 1, "STEP": 1024},
        {},
    ),
}


def spilled_bytes(kernel: Any, arch: int, sizes: dict[str, Any], types: dict[str, str]) -> int:
    """Compile to machine code and read ptxas's report on it."""
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages") if name in sizes}
    sizes |= {name: one for name, one in ONES.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in sizes else (POINTERS | types).get(name, "i32")
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if name in ALIGNED or signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    log = io.StringIO()
    # What a cache holds has no report.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope():
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.asm["cubin"]
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    assert len(found) == 2, log.getvalue()
    assert compiled.metadata.shared <= SHARED_BYTES[arch], compiled.metadata.shared
    return sum(map(int, found))


def main() -> None:
    arch = int(sys.argv[1])
    for name, (kernel, sizes, types) in CASES.items():
        print(f"{name} sm_{arch}: {spilled_bytes(kernel, arch, dict(sizes), types)} bytes spilled")


if __name__ == "__main__":
    main()
