"""The fingerprint of a transformers model, and whether the model has changed since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hisparse.engine.fingerprint import fingerprint, model_settings, tensor_digests
from hisparse.errors import ConfigError

__all__ = ["UnchangedModel", "model_fingerprint"]


def model_fingerprint(model: Any) -> str:
    """A fingerprint of a model's configuration, weights and adapters; see :func:`fingerprint`.

    Args:
        model: a transformers model, or its configuration.

    Returns:
        32 hexadecimal digits; "" for a configuration, which has no weights.
    """
    if not hasattr(model, "named_parameters"):
        return ""
    settings = model_settings(model.config)
    if adapters := list(_adapter_states(model)):
        # Which adapter a matrix belongs to decides what it computes.
        named = tensor_digests(x for x in model.named_parameters() if "lora_" in x[0])
        settings |= {"adapters": adapters, "adapter weights": named}
    return fingerprint(settings, model.named_parameters())


def _adapter_states(model: Any) -> Iterator[str]:
    """Which adapters each layer of PEFT applies, and how strongly."""
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, list):
            state = {
                x: getattr(module, x, None)
                for x in ("disable_adapters", "merged_adapters", "scaling")
            }
            yield f"{name} {type(module).__name__} {active} {state}"


class UnchangedModel:
    """Notices that a model computes other K and V than when this object was made.

    It compares which adapters are active and how strongly, which tensors are the parameters, and
    how often PyTorch saw each of them written. A check reads no weight: it takes milliseconds. It
    does not notice writes that PyTorch does not see, such as through NumPy.

    Args:
        model: a transformers model.

    Raises:
        ConfigError: a module has a hook of a forward, whose effect nobody can tell.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._state = self._read()
        if hooks := self._state[1]:
            raise ConfigError(
                f"model: got forward hooks on {len(hooks)} modules, such as "
                f"{hooks[0] or 'the model itself'}, which may change K and V; expected a model "
                "without them (see Module.register_forward_hook)"
            )

    def check(self) -> None:
        """Require that the model is unchanged.

        Raises:
            ConfigError: it has changed.
        """
        for now, before in zip(self._read(), self._state, strict=True):
            changed = [x for x in now if x not in before] or [x for x in before if x not in now]
            if changed:
                raise ConfigError(
                    "model: got other weights, adapters or hooks than when the DB was made "
                    f"({str(changed[0])[:200]}); expected the model unchanged: make another DB"
                )

    def _read(self) -> tuple[list[Any], list[Any], list[Any]]:
        model = self._model
        hooks = [
            name for name, x in model.named_modules() if x._forward_hooks or x._forward_pre_hooks
        ]
        weights = [
            (name, id(x), x.data_ptr(), -1 if x.is_inference() else x._version)
            for name, x in model.named_parameters()
        ]
        return list(_adapter_states(model)), hooks, weights
