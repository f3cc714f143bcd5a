"""What is said of kernels' shared memory, against what Triton compiles. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from hisparse.kernels.device_limits import attention_shared_bytes
from hisparse.types import KVSpec

ROOT = Path(__file__).parents[2]

#: Compiles attention for sm_89 and prints the shared memory of each kind.
COMPILE = """
    import json
    import torch, triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from tests.kernels import triton_compile as cases

    kernel, found = cases.triton_attention._attend_kernel, {}
    wide = {name: 256 for name in ("WIDTH", "FIRST", "FIRST_BLOCK", "VALUE", "VALUE_BLOCK")}
    for name, latent, sizes, kind, dtype in (
        ("latent float32", True, cases.MLA, "fp32", torch.float32),
        ("latent bfloat16", True, cases.MLA, "bf16", torch.bfloat16),
        ("float32", False, cases.LLAMA | wide, "fp32", torch.float32),
        ("bfloat16", False, cases.LLAMA, "bf16", torch.bfloat16),
        ("bfloat16 256", False, cases.LLAMA | wide, "bf16", torch.bfloat16),
    ):
        exact = not latent and dtype != torch.float32
        sizes = sizes | {"EXACT": exact, "FP8": False, "WIDE": False}
        sizes |= cases.triton_attention.launch_options(sizes["FIRST"], dtype)
        options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
        sizes |= {name: one for name, one in cases.ONES.items() if name in kernel.arg_names}
        types = cases.POINTERS | {"keys": f"*{kind}", "values": f"*{kind}", "scales": "*u8"}
        signature = {
            name: "constexpr" if name in sizes else types.get(name, "i32")
            for name in kernel.arg_names
        }
        places = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, name in enumerate(kernel.arg_names)
            if name in cases.ALIGNED or signature[name].startswith("*")
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options)
        found[name] = compiled.metadata.shared
    print(json.dumps(found))
"""


def spec(dtype: torch.dtype, *, latent: bool) -> KVSpec:
    return KVSpec(
        num_layers=1,
        num_q_heads=128,
        num_kv_heads=1 if latent else 8,
        head_dim=576 if latent else 128,
        v_head_dim=512 if latent else 128,
        dtype=dtype,
        page_size=64,
        latent=latent,
    )


def test_attention_takes_the_shared_memory_that_is_said() -> None:
    """Whoever changes the kernel changes the number: a start is refused by it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(COMPILE)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    said = {
        name: attention_shared_bytes(
            spec(getattr(torch, name.split(" ")[-1]), latent=name.startswith("latent"))
        )
        for name in ("latent float32", "latent bfloat16", "float32", "bfloat16")
    }
    compiled["bfloat16"] = max(compiled["bfloat16"], compiled.pop("bfloat16 256"))
    assert all(compiled[name] <= said[name] for name in said), (compiled, said)
