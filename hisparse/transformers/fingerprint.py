"""The fingerprint of a transformers model, and whether the model has changed since."""

from collections.abc import Iterator
from typing import Any, Final

import torch

from hisparse.errors import ConfigError
from hisparse.model_config import rotary_frequencies
from hisparse.storage.fingerprint import fingerprint, model_settings, tensor_digests

#: What a layer of PEFT applies, and how strongly.
_ADAPTER_STATE: Final = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
#: Sampled elements of each tensor. They change if somebody writes the whole tensor.
_SAMPLES: Final = 8
#: Whose forward hooks change nothing: they record outputs, or move weights.
_OWN_HOOKS: Final = ("transformers", "accelerate", "hisparse")


def model_fingerprint(model: Any) -> str:
    """A fingerprint of a model's configuration, weights, adapters and rotary embeddings.

    See :func:`fingerprint`.

    Args:
        model: a transformers model, or its configuration.

    Returns:
        32 hexadecimal digits; "" for a configuration, which has no weights.
    """
    if not hasattr(model, "named_parameters"):
        return ""
    settings = model_settings(model.config)
    layers = [(name, x) for name, x in model.named_modules() if _is_adapted(x)]
    if layers:
        # Which adapter a matrix belongs to decides what it computes.
        named = tensor_digests(x for x in model.named_parameters() if "lora_" in x[0])
        states = [f"{name} {type(x).__name__} {_adapter_state(x)}" for name, x in layers]
        settings |= {"adapters": states, "adapter weights": named}
    if other_ropes := tensor_digests(_other_ropes(model)):
        settings["rotary tables"] = other_ropes
    return fingerprint(settings, model.named_parameters())


def _other_ropes(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Frequencies ``[D / 2]`` of rotary embeddings that are not those of the configuration."""
    expected = [frequencies for _, (frequencies, _) in rotary_frequencies(model.config)]
    for name, x in model.named_buffers():
        if name.endswith("inv_freq"):
            known = [each for each in expected if each.shape == x.shape]
            if not any(torch.allclose(x.cpu().float(), y, rtol=1e-3, atol=0) for y in known):
                yield name, x


def _is_adapted(module: Any) -> bool:
    """Whether a module is a layer of PEFT."""
    return isinstance(getattr(module, "active_adapters", None), list)


def _adapter_state(module: Any) -> str:
    return str([getattr(module, name, None) for name in _ADAPTER_STATE])


class UnchangedModel:
    """Notices that a model computes other K and V than when this object was made.

    It sees which adapters are active and how strongly, forward hooks, training mode, which tensors
    are parameters and buffers, writes that PyTorch counts, and writes to whole tensors that it does
    not count, such as to ``.data``. It does not see writes to a few elements that PyTorch does not
    count, nor attributes of modules that are replaced.

    Args:
        model: a transformers model.

    Raises:
        ConfigError: a module has a forward hook, whose effect is unknown.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._modules = model, list(model.modules())
        self._adapted = [x for x in self._modules if _is_adapted(x)]
        self._switches, self._tensors = self._read_switches(), self._read_tensors()
        if hooks := self._switches["forward hooks"]:
            raise ConfigError(
                f"model: got {len(hooks)} forward hooks, such as {hooks[0]}, which may change K "
                "and V; expected a model without them (see Module.register_forward_hook)"
            )

    def check_forward(self) -> None:
        """Require that adapters, hooks and training mode are those of before.

        It takes a fraction of a millisecond, so every forward asks: they may change back.

        Raises:
            ConfigError: one of them is another.
        """
        self._compare(self._read_switches(), self._switches)

    def check(self) -> None:
        """Require that the model is unchanged.

        Raises:
            ConfigError: it has changed.
        """
        self.check_forward()
        self._compare(self._read_tensors(), self._tensors)

    @staticmethod
    def _compare(now: dict[str, Any], before: dict[str, Any]) -> None:
        if now != before:
            names = sorted(k for k in {**now, **before} if now.get(k) != before.get(k))
            raise ConfigError(
                f"model: got another {names[0]} than when the DB was made; expected the model "
                "unchanged: make another DB"
            )

    def _read_switches(self) -> dict[str, Any]:
        return {
            "adapter": [_adapter_state(x) for x in self._adapted],
            "forward hooks": [
                f"{type(x).__name__}.{getattr(hook, '__name__', type(hook).__name__)}"
                for x in self._modules
                if x._forward_hooks or x._forward_pre_hooks
                for hook in (*x._forward_hooks.values(), *x._forward_pre_hooks.values())
                if (getattr(hook, "__module__", None) or "").partition(".")[0] not in _OWN_HOOKS
            ],
            "training mode": [x.training for x in self._modules],
        }

    def _read_tensors(self) -> dict[str, Any]:
        found = dict(_named_tensors(self._model))
        samples = [_sample(x) for x in found.values()]
        values = torch.cat(samples).view(-1, _SAMPLES).tolist() if samples else []
        return {
            name: (id(x), x.data_ptr(), -1 if x.is_inference() else x._version, str(value))
            for (name, x), value in zip(found.items(), values, strict=True)
        }


def _named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for kind in ("parameter", "buffer"):
        for name, x in getattr(model, f"named_{kind}s")():
            yield f"{kind} {name}", x


def _sample(value: torch.Tensor) -> torch.Tensor:
    """``[_SAMPLES] float64``, elements of a tensor that lie apart from each other."""
    flat = value.detach().reshape(-1)
    if not len(flat):
        return torch.zeros(_SAMPLES, dtype=torch.float64)
    # In integers: a float32 has no place beyond 2^24 to itself.
    places = torch.arange(_SAMPLES, device=flat.device) * (len(flat) - 1) // (_SAMPLES - 1)
    return flat[places].to("cpu", torch.float64)
