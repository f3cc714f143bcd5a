"""A decode step of ``dipr`` by sketches beside ``"index": "flat"``, on a model's own q, k and v.

``python -m scripts.range_step MODEL CONTEXT FILE`` prints JSON; FILE is that of
``scripts.range_recall``. Tokens are decoded in each layer by both in turn, on one thread; times are
processor time, which other work on the machine disturbs less. Without FILE it times how the model
reads a prompt.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.config import HiSparseConfig
from hisparse.doctor import provenance
from hisparse.eval.models import resolve
from hisparse.eval.texts import TEXTS, read_text
from hisparse.kernels import SketchLayout, page_sketch
from hisparse.transformers import disable, enable
from hisparse.types import KVSpec
from hisparse_bench.random_requests import RandomRequests
from scripts.range_recall import LAST, SIZE, recorded

INDEXES = ("flat", "sketch")
#: Decoded tokens: some are checked, some warm up.
CHECKED, WARMUPS, TOKENS = 4, 8, 60
BUDGET, BUFFER, RUNS = 2048, 8192, 5
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(kw_only=True)
class LayerRequest(RandomRequests):
    """A request with a layer's keys and values, selected by an index of ``dipr``."""

    layer: dict[str, Tensor]
    index: str

    def _make_algorithm(self, config: HiSparseConfig) -> BaseSparseAlgorithm:
        return super()._make_algorithm(replace(config, algorithm_config={"index": self.index}))

    def _begin_requests(self) -> None:
        pages = self.context // self.kv.page_size
        for pool, name in zip(self.host.layer(0), "kv", strict=True):
            own = self.layer[name][: self.context].to(pool.dtype).unflatten(0, (pages, -1))
            pool[self.table[0, :pages].long()] = own.transpose(1, 2)
        super()._begin_requests()

    def decode(self, token: int) -> tuple[Tensor, float]:
        """Output ``[1, Hq, D]`` of a token after the context, and the processor time."""
        self.begin_token()
        q, k, v = (self.layer[name][token - LAST, None].to(self.kv.dtype) for name in "qkv")
        start = time.process_time()
        out = self.coordinator.attention(0, q, k, v)
        spent = time.process_time() - start
        self.coordinator.forward_end()
        return out, spent

    def check(self, token: int) -> set[tuple[int, int]]:
        """Decode a token, held to float64 attention over the selection; the selected pages."""
        self.coordinator.observe(self.observe)
        out, _ = self.decode(token)
        self.coordinator.observe(None)
        q = self.layer["q"][token - LAST, None].to(self.kv.dtype)
        near = TOLERANCE[self.kv.dtype]
        torch.testing.assert_close(out.double(), self.attend(0, q), atol=near, rtol=near)
        rows = self._selection[0][0].tolist()
        return {(row, page) for row, pages in enumerate(rows) for page in pages if page >= 0}


def request(layer: dict[str, Tensor], dtype: torch.dtype, buffer: int, index: str) -> LayerRequest:
    """A request that can decode the last tokens; all pages are resident if ``buffer`` is 0."""
    (length, heads, dim), query_heads = layer["k"].shape, layer["q"].shape[1]
    return LayerRequest(
        kv=KVSpec(
            num_layers=1,
            num_q_heads=query_heads,
            num_kv_heads=heads,
            head_dim=dim,
            v_head_dim=dim,
            page_size=SIZE,
            dtype=dtype,
        ),
        batch=1,
        context=length - LAST,
        budget=BUDGET,
        row_tokens=buffer or length,
        max_new_tokens=LAST,
        device=torch.device("cpu"),
        algorithm="dipr",
        layer=layer,
        index=index,
    )


def step_figures(layers: list[dict[str, Tensor]], dtype: torch.dtype, buffer: int) -> Any:
    """Times of a layer's step by index, their ratio, and how the selections differ."""
    times, tokens = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    shares, apart = list[float](), list[float]()
    for layer in layers:
        found = {index: request(layer, dtype, buffer, index) for index in INDEXES}
        for token in range(CHECKED):
            flat, sketch = (found[index].check(token) for index in INDEXES)
            shares.append(len(flat & sketch) / len(flat))
        for token in range(CHECKED, TOKENS):
            outs = {}
            for index in INDEXES if token % 2 else INDEXES[::-1]:
                outs[index], spent = found[index].decode(token)
                if token >= CHECKED + WARMUPS:
                    times[index].append(spent * 1e3)
            apart.append(float((outs["flat"] - outs["sketch"]).norm() / outs["flat"].norm()))
        for index, each in found.items():
            stats = each.stats
            tokens[index].append(stats.selected_tokens / stats.selections)
    medians = {index: statistics.median(spent) for index, spent in times.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "device_buffer_size": buffer or "all",
        "step_ms": medians,
        "flat/sketch": medians["flat"] / medians["sketch"],
        "steps": len(times["flat"]),
        "tokens": {index: statistics.mean(x) for index, x in tokens.items()},
        "share of flat's pages": statistics.mean(shares),
        "relative difference of outputs": statistics.mean(apart),
    }


def build_seconds(layers: list[dict[str, Tensor]], dim: int) -> float:
    """Median time to build sketches of 8 heads; heads wider than the model's are some in a row."""
    keys = torch.cat([layer["k"] for layer in layers], 1).flatten(1)[:, : 8 * dim]
    pages = keys.unflatten(1, (8, dim)).contiguous().unflatten(0, (-1, SIZE))
    layout = SketchLayout(dim, SIZE, dim, numbered=False, bits=4)
    sketches = torch.zeros(len(pages), 8, layout.num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        page_sketch(pages, sketches, torch.arange(len(pages)), layout)
        times.append(time.process_time() - start)
    return statistics.median(times)


def prompt_figures(name: str, context: int) -> dict[str, Any]:
    """Processor time to read a prompt with each index, in pairs."""
    folder = resolve(name)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("\n\n".join(map(read_text, TEXTS))).input_ids
    prompt, pairs = torch.tensor([ids[:context]]), []
    for run in range(RUNS):
        times, logits = {}, {}
        for index in INDEXES if run % 2 else INDEXES[::-1]:
            config = {"algorithm": "dipr", "budget": BUDGET, "algorithm_config": {"index": index}}
            cache = enable(net, config, max_length=context + SIZE)
            start = time.process_time()
            with torch.no_grad():
                out = net(prompt, past_key_values=cache, logits_to_keep=1)
            times[index], logits[index] = time.process_time() - start, out.logits
            disable(net)
        assert torch.equal(logits["flat"], logits["sketch"])
        pairs.append(times)
    ratio = statistics.median(x["sketch"] / x["flat"] for x in pairs)
    return {"prompt_s": pairs, "sketch/flat": ratio}


def main(name: str, context: str, *file: str) -> None:
    """Print the result of a model."""
    torch.set_num_threads(1)
    line = " ".join(("python -m scripts.range_step", name, context, *("FILE" for _ in file)))
    about = {"line": line, **provenance.origin(), "model": name, "context": int(context)}
    about["instruction_sets"] = provenance.instruction_sets()
    if not file:
        print(json.dumps(about | prompt_figures(name, int(context)), indent=1))
        return
    layers = recorded(name, int(context), file[0])["layers"]
    about["build_s of 8 heads"] = {f"D {dim}": build_seconds(layers, dim) for dim in (64, 128)}
    about["steps"] = [
        step_figures(layers, dtype, buffer)
        for dtype in (torch.float32, torch.bfloat16)
        for buffer in (BUFFER, 0)
    ]
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
