"""Storage below host memory: prefixes of the radix cache that servers keep and share.

SGLang's external linker (``linker.py``) looks prefixes up, loads and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.sglang.features.base import Feature
from hisparse.sglang.features.storage.key import AdapterKeys
from hisparse.sglang.features.storage.setup import check_told_apart, request_linker
from hisparse.sglang.features.storage.state import COUNTERS, StorageState
from hisparse.sglang.session import ServerSession, current_state
from hisparse.sglang.start import STORAGE, Option, Start
from hisparse.storage.fingerprint import model_settings

__all__ = ["Storage", "around_request"]


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
    """Let the storage rest before anything writes to the weights.

    SGLang selects the models for each update, for the beginning and the end of one in several
    requests, and for ``/weights_checker``, which can write random weights.
    """
    state = current_state(StorageState)
    if state is not None:
        state.note_update(updater)
    return original(updater, selector)


def _offloaded(start: Start) -> str:
    mode = getattr(start.args, "offload_mode", "cpu")
    offloads = mode != "cpu" and start.args.offload_group_size > 0
    return f"--offload-mode {mode}" if offloads else ""


#: Weights of which this process has shapes alone, so that its fingerprint does not tell them apart.
OFFLOADED = Option(given=_offloaded, expected="--offload-mode cpu")
#: SGLang moves experts between ranks while it serves, and reads missing ones from files.
EPLB = Option(
    given=lambda start: "--enable-eplb true" if getattr(start.args, "enable_eplb", False) else "",
    expected="it unset",
)


class Storage(Feature):
    """SGLang's external linker is switched on, and pages are told apart by what they depend on."""

    name = "storage"
    serves = (STORAGE,)
    excludes = {EPLB: (STORAGE,), OFFLOADED: (STORAGE,)}
    hooks = {
        "sglang.srt.managers.schedule_batch.Req.__init__": around_request,
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        "._select_runners": _around_select_runners,
    }
    counters = COUNTERS

    def prepare(self, start: Start) -> HiSparseConfig:
        """Ask SGLang for the linker."""
        request_linker(start.args, start.config)
        return start.config

    def check(self, server_args: Any, config: HiSparseConfig) -> None:
        """Require that the keys of pages name all that K and V depend on."""
        from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

        check_told_apart(resolved_view(server_args), model_config_of(server_args))

    def begin(self, session: ServerSession, configurator: Any) -> None:
        """Keep what the fingerprint of the model is made of."""
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
