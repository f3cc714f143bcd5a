"""Storage formats of other packages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.adapters import BackendAdapter
from hisparse.cache.formats.base import Attend
from hisparse.cache.formats.latent import LatentFormat
from hisparse.config import LATENT_FORMATS, HiSparseConfig
from hisparse.engine.capabilities import check_capabilities
from hisparse.errors import ConfigError
from hisparse.testing import Simulator
from hisparse.types import PagedKV, StoredKV


class Halves(LatentFormat):
    """Latents of a model in float32, stored in bfloat16."""

    name = "bfloat16 latents of float32"
    dtype = torch.bfloat16

    def encode(self, k: Tensor, v: Tensor) -> StoredKV:
        return self.join([k.to(self.dtype)])

    def decode(self, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
        if out is None:
            return self.plain.join([stored.k.to(self.kv.dtype)]).kv
        out.k.copy_(stored.k)
        return out

    def attend_with(self, adapter: BackendAdapter, max_pages: int) -> Attend:
        return lambda q, stored, *table: adapter.attend(q, self.decode(stored), *table)


def test_latents_may_have_a_format_that_other_attention_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All of them are loaded first: what is loaded meanwhile would be forgotten.
    registered = {name: LATENT_FORMATS.get(name) for name in LATENT_FORMATS}
    monkeypatch.setattr(LATENT_FORMATS, "_entries", registered)
    LATENT_FORMATS.register("halves")(Halves)
    check_capabilities(HiSparseConfig(kv_cache_dtype="halves"), "cpu")
    shape = {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}
    sim = Simulator(**shape, kv_cache_dtype="halves", budget=96, device_buffer=96, max_row=96)
    request = sim.request(1, 90, seed=1)
    for stream in (request.k, request.v):
        stream.copy_(stream.bfloat16().float())
    sim.prefill((request, 70))
    for _ in range(20):
        out = sim.decode(request)
        want = sim.dense(request, request.done - 1, request.done).float()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"unknown kv_cache_dtype 'halfs'; did you mean 'halves'"):
        HiSparseConfig(kv_cache_dtype="halfs")
    with pytest.raises(ConfigError, match="unknown kv_cache_dtype 'halves'"):
        Simulator(kv_cache_dtype="halves")
