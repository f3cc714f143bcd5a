"""Storage below host memory: prefixes of the radix cache that servers keep and share.

SGLang's external linker (``linker.py``) looks prefixes up, loads and writes them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, quoted
from hisparse.sglang.features.base import STORAGE, Feature, Option, Start
from hisparse.sglang.features.storage.calls import COUNTERS
from hisparse.sglang.features.storage.key import AdapterKeys, StorageState
from hisparse.sglang.features.storage.swap import around_release_req
from hisparse.sglang.session import ServerSession, current_state
from hisparse.storage.fingerprint import model_settings, rope_types

_LINKER: Final = {
    "linker": "HiSparseLinker",
    "linker_module_path": "hisparse.sglang.features.storage.linker",
}
#: Names of a rotary embedding of which SGLang picks the long or the short factors by the longest
#: position of a whole batch.
_LONGROPE: Final = {"longrope", "su"}


def around_request(original: Callable[..., None], request: Any, *args: Any, **options: Any) -> None:
    """Let the key of a request's pages name its LoRA adapter by content, not by SGLang's id.

    What a client gives as ``extra_key`` is marked, so that it cannot name an adapter.
    """
    original(request, *args, **options)
    state, lora_id = current_state(StorageState), request.lora_id
    if state is None or state.adapter_key is None or request.extra_key is None:
        return
    given = request.extra_key.removesuffix(lora_id or "")
    adapter = "" if lora_id is None else f"adapter {state.adapter_key(lora_id)} "
    request.extra_key = adapter + (f"client {given}" if given else "")


def _around_select_runners(
    original: Callable[..., list[Any]], updater: Any, selector: str = "all"
) -> list[Any]:
    """Stop using the store before the weights change.

    SGLang calls the function for each update, at the beginning and the end of an update that takes
    several requests, and for ``/weights_checker``, which can write random weights.
    """
    state = current_state(StorageState)
    if state is not None:
        state.note_update(updater)
    return original(updater, selector)


def _offloaded(start: Start) -> str:
    mode = getattr(start.args, "offload_mode", "cpu")
    offloads = mode != "cpu" and start.args.offload_group_size > 0
    return f"--offload-mode {mode}" if offloads else ""


#: This process has only the shapes of offloaded weights, so its fingerprint would ignore them.
OFFLOADED = Option(given=_offloaded, expected="--offload-mode cpu")
#: SGLang moves experts between ranks while it serves, and reads missing ones from files.
EPLB = Option(
    given=lambda start: "--enable-eplb true" if getattr(start.args, "enable_eplb", False) else "",
    expected="it unset",
)


def request_linker(server_args: Any, config: HiSparseConfig) -> None:
    """Set SGLang's flags for the key ``storage``.

    Raises:
        ConfigError: the radix cache is off, or the command line asks for a linker.
    """
    if server_args.disable_radix_cache:
        raise ConfigError(
            "--disable-radix-cache is given, but storage keeps prefixes of the radix cache; "
            "expected one of the two"
        )
    if config.storage is None:
        raise ConfigError(
            "--enable-unified-cache-external-linker is given; expected it unset, and storage in "
            "--hisparse-config for the only linker that reads hisparse's host pool"
        )
    wanted = _LINKER | {"linker_extra_config": asdict(config.storage)}
    given = server_args.unified_cache_external_linker_config
    if given not in (None, wanted):
        raise ConfigError(
            f"storage is set and --unified-cache-external-linker-config is {quoted(given)}; "
            "expected one of the two"
        )
    server_args.enable_unified_cache_external_linker = True
    server_args.unified_cache_external_linker_backend = "dynamic"
    server_args.unified_cache_external_linker_config = wanted


def check_told_apart(server_args: Any, model: Any) -> None:
    """Require that the keys of pages name all that K and V depend on.

    Args:
        server_args: SGLang's arguments, resolved.
        model: SGLang's ``ModelConfig``.

    Raises:
        ConfigError: they depend on more.
    """
    if server_args.forward_hooks:
        got = "--forward-hooks, whose code may change K and V"
    elif rope_types(model.hf_text_config) & _LONGROPE:
        got = "a model with longrope, whose keys depend on the other requests of a batch"
    elif model.is_multimodal:
        got = (
            "a model of images or audio, of which SGLang's keys name the content and not the shape"
        )
    else:
        return
    raise ConfigError(
        f"storage: got {got}; expected no storage, or a model and flags with which only its "
        "weights and the tokens decide K and V"
    )


class Storage(Feature):
    """Switches SGLang's external linker on, and names in keys what K and V depend on."""

    name = "storage"
    serves = (STORAGE,)
    excludes = {EPLB: (STORAGE,), OFFLOADED: (STORAGE,)}
    hooks = {
        "sglang.srt.managers.schedule_batch.Req.__init__": around_request,
        "sglang.srt.managers.schedule_batch.release_req": around_release_req,
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        "._select_runners": _around_select_runners,
    }
    counters = COUNTERS

    def prepare(self, start: Start) -> Mapping[str, Any]:
        """Ask SGLang for the linker."""
        request_linker(start.args, start.config)
        return {}

    def check(self, server_args: Any, config: HiSparseConfig) -> None:
        """Require that the keys of pages name all that K and V depend on."""
        from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

        check_told_apart(resolved_view(server_args), model_config_of(server_args))

    def begin(self, session: ServerSession, configurator: Any) -> None:
        """Keep the model and its configuration for the fingerprint."""
        config = configurator.model_config.hf_config
        overrides = json.loads(configurator.server_args.json_model_override_args or "{}")
        session.add(
            StorageState(
                model=configurator.model,
                model_config=config,
                model_settings=model_settings(config, overrides),
            )
        )

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Name adapters by their content."""
        state = session.get(StorageState)
        assert state is not None, "added when the session began"
        state.adapter_key = AdapterKeys(model_runner.lora_manager).key

    def totals(self, session: ServerSession) -> Mapping[str, int]:
        """What the storage has done."""
        state = session.get(StorageState)
        return {} if state is None else state.counters.totals()


FEATURE = Storage()
