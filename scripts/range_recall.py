"""Which pages in range the sketches of ``dipr`` find, and the time to build them.

``python -m scripts.range_recall MODEL CONTEXT FILE`` prints JSON; FILE keeps q, k and v for other
runs. A page is in range if it weighs at least a hundredth of the heaviest one. Queries are those
of the last 512 tokens of the built-in texts, each query head alone; keys are those of the layers
that attend the whole context.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hisparse.doctor import provenance
from hisparse.eval.models import resolve
from hisparse.eval.texts import TEXTS, read_text
from hisparse.kernels import HostKeys, SketchLayout, key_score, page_sketch, sketch_score

LAST, STRIDE, SIZE, ALPHA = 512, 16, 16, 0.01
#: How many times as many pages sketches may choose as there are in range.
TIMES = (1, 2, 4)


def found_pages(exact: Tensor, estimated: Tensor) -> dict[str, Tensor]:
    """Share of the pages in range that sketches rank high enough, ``[Hq]`` by allowed number.

    ``exact [T, Hq, P]``, ``estimated [T, Hq, P]``, -inf beyond a query's pages.
    """
    in_range = exact >= exact.amax(-1, keepdim=True) + math.log(ALPHA)
    count = in_range.sum(-1, keepdim=True)
    order = estimated.argsort(-1, descending=True)
    found = in_range.gather(-1, order).cumsum(-1)
    shares = {"pages": count[..., 0].float().mean(0)}
    for times in TIMES:
        last = (count * times).clamp(max=exact.shape[-1]) - 1
        shares[f"recall, {times} times as many"] = (found.gather(-1, last) / count)[..., 0].mean(0)
    return shares


def measured(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """Figures of a layer, ``[Hq]`` or a number: ``query [T, Hq, D]``, ``key [N, Hkv, D]``."""
    pages = key[: len(key) // SIZE * SIZE].unflatten(0, (-1, SIZE))
    count, _, heads, dim = pages.shape
    layout = SketchLayout(dim, SIZE, dim, numbered=False, bits=4)
    sketches = torch.zeros(count, heads, layout.num_bytes, dtype=torch.uint8)
    start = time.process_time()
    page_sketch(pages, sketches, torch.arange(count), layout)
    spent = time.process_time() - start
    numbers = ((torch.arange(len(query)) - len(query) + 1) * STRIDE + len(key) - 1) // SIZE
    table = torch.arange(count, dtype=torch.int32).repeat(len(query), 1)
    keys, scaled = HostKeys(pages.transpose(1, 2)), query.float() * dim**-0.5
    exact = key_score(scaled, keys, table, numbers.int(), reduce="lse")
    inputs = query, sketches, table, numbers.int(), layout
    estimated = sketch_score(*inputs, scale=dim**-0.5)[0]
    absent = torch.arange(count) >= numbers[:, None, None]
    return found_pages(exact, estimated.masked_fill(absent, -math.inf)) | {
        "build_s": torch.tensor(spent)
    }


def record(name: str, context: int) -> dict[str, Any]:
    """Attention's inputs in each layer of a float32 model, and the processor time to read the text.

    ``q [512, Hq, D]`` of the last tokens, ``k`` and ``v [N, Hkv, D]`` of all, bfloat16.
    """
    folder = resolve(name)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("\n\n".join(map(read_text, TEXTS))).input_ids
    layers, ours = list[dict[str, Tensor]](), 0.0
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def keep(module: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Any:
        nonlocal ours
        start = time.process_time()
        parts = {"q": q[0, :, -LAST:], "k": k[0], "v": v[0]}
        layers.append({n: x.transpose(0, 1).bfloat16().contiguous() for n, x in parts.items()})
        ours += time.process_time() - start
        return usual(module, q, k, v, *more, **named)

    ALL_ATTENTION_FUNCTIONS.register("keep", keep)
    net.config._attn_implementation = "keep"
    start = time.process_time()
    with torch.no_grad():
        net(torch.tensor([ids[:context]]), logits_to_keep=1, use_cache=False)
    return {"layers": layers, "forward_s": time.process_time() - start - ours}


def recorded(name: str, context: int, file: str) -> dict[str, Any]:
    """What :func:`record` returns, kept in ``file``: a model takes minutes to read a text."""
    if not Path(file).exists():
        made = record(name, context)
        tensors = {
            f"{i}.{x}": t for i, layer in enumerate(made["layers"]) for x, t in layer.items()
        }
        save_file(tensors, file, {"forward_s": str(made["forward_s"])})
    with safe_open(file, "pt") as stored:
        count = len(stored.keys()) // 3
        layers = [{x: stored.get_tensor(f"{i}.{x}") for x in "qkv"} for i in range(count)]
        return {"layers": layers, "forward_s": float(stored.metadata()["forward_s"])}


def main(name: str, context: int, file: str) -> None:
    """Print the result of a model."""
    found = recorded(name, context, file)
    figures = defaultdict[str, list[Tensor]](list)
    for layer in found["layers"]:
        late = layer["q"][::STRIDE].contiguous()
        for what, share in measured(late, layer["k"]).items():
            figures[what].append(share)
    seconds = {"forward": found["forward_s"]}
    seconds["build"] = float(torch.stack(figures.pop("build_s")).sum())
    rows = {}
    for what, shares in figures.items():
        heads = torch.cat(shares)
        rows[what] = {"mean": float(heads.mean()), "least": float(heads.min())}
    about = {"line": f"python -m scripts.range_recall {name} {context} FILE", **provenance.origin()}
    about |= {"model": name, "context": context, "queries": LAST // STRIDE, "processor_s": seconds}
    print(json.dumps(about | {"heads": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
