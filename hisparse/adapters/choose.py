"""Chooses the adapter for a device, a model and a selection scope."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from hisparse.adapters.base import ADAPTERS, BackendAdapter, DeviceLimits
from hisparse.errors import ConfigError
from hisparse.types import AttentionRule, KVSpec, SelectionScope

#: Adapters by device type in order of preference, each with the reason for the choice. Libraries
#: come after the project's kernels until their tests have passed on a GPU (``make gpu-check``). The
#: configuration key ``adapter`` overrides the order.
_ORDER: dict[str, dict[str, str]] = {
    "cuda": {
        "triton": "the project's kernel, which takes every scope, page size, dtype and MLA",
        "flash_attention": "Triton cannot be used",
        "flashinfer": "neither Triton nor FlashAttention can be used",
        "torch": "no kernel can be used",
    },
}
_OTHER_DEVICES = {"torch": "the adapter for this device"}

#: Property, requested value, supported values; None for any.
_Check = tuple[str, object, tuple[object, ...] | None]


class ChosenAdapter(NamedTuple):
    """An adapter's name, and the reason for the choice."""

    name: str
    reason: str


def choose_adapter(
    device_type: str,
    kv: KVSpec | None,
    scope: SelectionScope | None,
    wanted: str | None = None,
    *,
    scaled: str | None = None,
    device: DeviceLimits | None = None,
    rules: Iterable[AttentionRule] = (),
) -> ChosenAdapter:
    """Choose the requested adapter, or else the first supported one for the device.

    Args:
        device_type: "cuda" or "cpu", where the model runs.
        kv: shapes of the model; None if they are not known yet, which skips their checks.
        scope: selection scope; None if it is not known yet, which skips its check.
        wanted: name of the requested adapter; None for an automatic choice.
        scaled: the ``kv_cache_dtype`` of K and V with scales; None: they have none.
        device: the GPU; None if it is not known, which skips its check.
        rules: how the layers attend; none if it is not known yet, which skips the checks of logit
            cap and window.

    Raises:
        ConfigError: the adapter does not exist or does not support the rest; names those that do.
    """
    rules = tuple(rules)

    def mismatch(name: str) -> str | None:
        return _mismatch(ADAPTERS.get(name), device_type, kv, scope, scaled, device, rules)

    if wanted is not None:
        reason = mismatch(wanted)
        if reason is None:
            return ChosenAdapter(wanted, "requested")
        others = [name for name in ADAPTERS if not mismatch(name)]
        raise ConfigError(
            f"adapter {wanted!r} {reason} (adapters that can: {', '.join(others) or 'none'})"
        )
    order = _ORDER.get(device_type, _OTHER_DEVICES)
    reasons = {name: mismatch(name) for name in order}
    for name, reason in reasons.items():
        if reason is None:
            return ChosenAdapter(name, order[name])
    each = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise ConfigError(
        f"no adapter serves this model on this device: {each}; expected another --dtype or model"
    )


def _mismatch(
    cls: type[BackendAdapter],
    device_type: str,
    kv: KVSpec | None,
    scope: SelectionScope | None,
    scaled: str | None,
    device: DeviceLimits | None,
    rules: Iterable[AttentionRule],
) -> str | None:
    """Why an adapter cannot serve a model on this machine, in a few words; None if it can."""
    checks: list[_Check] = [
        (name, getattr(rule, name), ("0 (none)",))
        for rule in rules
        for name in ("logit_cap", "window")
        if getattr(rule, name) and not getattr(cls, name)
    ]
    checks.append(("device", device_type, cls.device_types))
    # An adapter that serves only latents gets no scales: latents are decoded first.
    if scaled is not None and "GQA" in cls.attention:
        checks.append(("kv_cache_dtype", scaled, None if cls.scaled else ("auto",)))
    if scope is not None:
        checks.append(("selection_scope", scope, cls.scopes))
    if kv is not None:
        dtypes = None if cls.dtypes is None else tuple(map(_dtype_name, cls.dtypes))
        checks += [
            ("attention", kv.attention, cls.attention),
            ("dtype", _dtype_name(kv.dtype), dtypes),
            ("page_size", kv.page_size, cls.page_sizes),
        ]
    for name, got, choices in checks:
        if choices is not None and got not in choices:
            return f"cannot do {name} {got}, it takes {', '.join(map(str, choices))}"
    widths = None if kv is None else cls.widths_refused(kv)
    if kv is not None and widths is not None:
        return f"cannot do heads {kv.head_dim} and {kv.v_head_dim} wide, it takes {widths}"
    if kv is not None and device is not None and (reason := cls.device_refused(kv, device)):
        return reason
    missing = cls.missing()
    return None if missing is None else f"cannot be used here: {missing}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
