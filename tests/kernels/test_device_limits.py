"""What is said of attention's shared memory, against what Triton compiles. Needs no GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from hisparse.adapters.torch import attention_shared_bytes
from tests.fake_cuda.device import SHARED_BYTES
from tests.fake_cuda.engine import model
from tests.fake_cuda.variants import Setting, Variant, variants
from tests.kernels.triton_compile import compile_one
from tests.sizes import sized

# Triton says once in which release a default will change.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
#: A GPU with little: 99 KiB.
SMALL = (8, 9)
_CASES = [
    ("GQA", torch.bfloat16),
    ("MLA", torch.float32),
    ("GQA", torch.float32),
    ("MLA", torch.bfloat16),
]
WIDTHS = ("width", "first", "first_block", "value_width", "value_block")


def with_heads_of_256(variant: Variant, dtype: torch.dtype) -> Variant:
    """The same kernel for the widest heads, with what it is then launched with."""
    # The package offers a function of a module's name.
    module = importlib.import_module(variant.module)
    of_chunk = variant.name == "_chunk_kernel"
    chosen = getattr(module, "chunk_options" if of_chunk else "launch_options")
    tile, options = chosen(256, dtype, SHARED_BYTES[SMALL])
    rows = {"rows": tile[0], "tokens": tile[1]} if of_chunk else {"tokens": tile}
    changed = dict.fromkeys(WIDTHS, 256) | rows
    return replace(
        variant,
        constants=tuple(
            (at, value._replace(**changed) if isinstance(value, tuple) else value)
            for at, value in variant.constants
        ),
        options=tuple((name, options[name]) for name in ("num_warps", "num_stages")),
    )


@pytest.mark.sweeps
@pytest.mark.parametrize(("kind", "dtype"), sized(_CASES[:2], _CASES), ids=str)
def test_attention_takes_the_shared_memory_that_is_said(kind: str, dtype: torch.dtype) -> None:
    """Whoever changes a kernel changes the number: a start is refused by it."""
    page_size = 64 if kind == "MLA" else 16
    setting = Setting(algorithm="sketch", kind=kind, page_size=page_size, dtype=dtype)
    by_text = {str(v): v for v in variants((setting,), SMALL) if "attention" in v.module}
    # The one that merges parts takes none.
    found = [v for v in by_text.values() if v.name != "_merge_kernel"]
    assert {v.name for v in found} == {"_attend_kernel", "_chunk_kernel"}
    if kind == "GQA":
        found += [with_heads_of_256(v, dtype) for v in found]
    usages = [compile_one(v, 89) for v in found]
    assert not any(u.error for u in usages), usages
    said = attention_shared_bytes(replace(model(kind), dtype=dtype))
    assert said - 4096 <= max(u.shared for u in usages) <= said, usages
    # What a GPU with little shared memory serves: all but latents in float32.
    assert (said <= SHARED_BYTES[SMALL]) == ((kind, dtype) != ("MLA", torch.float32))
