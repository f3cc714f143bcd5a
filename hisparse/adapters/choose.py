"""Which adapter serves a model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hisparse.adapters.base import ADAPTERS, BackendAdapter
from hisparse.errors import ConfigError
from hisparse.types import KVSpec, SelectionScope

__all__ = ["ChosenAdapter", "choose_adapter"]

#: What is tried in turn, with the reason to take it. A library comes after the project's kernels
#: until it has been run on a GPU (``make gpu-check``); asked for by name, it is taken.
_ORDER: dict[str, dict[str, str]] = {
    "cuda": {
        "triton": "the project's kernel, which takes every scope, page size, dtype and MLA",
        "flash_attention": "Triton cannot be used",
        "flashinfer": "neither Triton nor FlashAttention can be used",
        "torch": "no kernel can be used",
    },
}
_ELSEWHERE = {"torch": "the adapter for this device"}
_ATTENTION = {False: "MHA and GQA", True: "MLA"}

#: What is checked, what is asked for, and what there is; None: all.
_Check = tuple[str, object, tuple[object, ...] | None]


class ChosenAdapter(NamedTuple):
    """An adapter's name, and why it was taken."""

    name: str
    reason: str


def choose_adapter(
    device_type: str,
    kv: KVSpec | None,
    scope: SelectionScope | None,
    wanted: str | None = None,
    *,
    fp8: bool = False,
) -> ChosenAdapter:
    """The adapter that is asked for, or else the first of those for the device that fits.

    Args:
        device_type: "cuda" or "cpu", where the model runs.
        kv: shapes of the model; None: not known yet, any will do.
        scope: for whom pages are selected; None: likewise.
        wanted: a name; None: chosen.
        fp8: whether K and V are stored in eight bits, if no model says so.

    Raises:
        ConfigError: there is no such adapter, or it does not fit; names those that do.
    """

    def refusal(name: str) -> str | None:
        return _refusal(ADAPTERS.get(name), device_type, kv, scope, fp8=fp8)

    if wanted is not None:
        refused = refusal(wanted)
        if refused is None:
            return ChosenAdapter(wanted, "asked for")
        others = [name for name in ADAPTERS if not refusal(name)]
        raise ConfigError(
            f"adapter {wanted!r} {refused} (adapters that can: {', '.join(others) or 'none'})"
        )
    for name, reason in _ORDER.get(device_type, _ELSEWHERE).items():
        if refusal(name) is None:
            return ChosenAdapter(name, reason)
    raise ConfigError(f"device {device_type!r}: no adapter takes it and {kv}")


def _refusal(
    cls: type[BackendAdapter],
    device_type: str,
    kv: KVSpec | None,
    scope: SelectionScope | None,
    *,
    fp8: bool,
) -> str | None:
    """Why an adapter cannot serve a model here, in a few words; None: it can."""
    checks: list[_Check] = [("device", device_type, cls.device_types)]
    if fp8 or (kv is not None and kv.fp8):
        checks.append(("kv_cache_dtype", "fp8_e4m3", None if cls.fp8 else ("auto",)))
    if scope is not None:
        checks.append(("selection_scope", scope, cls.scopes))
    if kv is not None:
        dtypes = None if cls.dtypes is None else tuple(map(_dtype_name, cls.dtypes))
        checks += [
            ("attention", _ATTENTION[kv.latent], tuple(_ATTENTION[x] for x in cls.latent)),
            ("dtype", _dtype_name(kv.dtype), dtypes),
            ("page_size", kv.page_size, cls.page_sizes),
        ]
    for what, got, choices in checks:
        if choices is not None and got not in choices:
            return f"cannot do {what} {got}, it takes {', '.join(map(str, choices))}"
    widths = None if kv is None else cls.widths_refused(kv)
    if kv is not None and widths is not None:
        return f"cannot do heads {kv.head_dim} and {kv.v_head_dim} wide, it takes {widths}"
    missing = cls.missing()
    return None if missing is None else f"cannot be used here: {missing}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
