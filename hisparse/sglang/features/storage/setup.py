"""Switches SGLang's external linker on, and makes the store that it uses."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError, one_line, quoted
from hisparse.options import StorageOptions, from_options
from hisparse.storage import size_in_bytes
from hisparse.storage.fingerprint import rope_types

_LINKER: Final = {
    "linker": "HiSparseLinker",
    "linker_module_path": "hisparse.sglang.features.storage.linker",
}
_FLAG: Final = "--unified-cache-external-linker-config"
#: Names of a rotary embedding of which SGLang picks the long or the short factors by the longest
#: position of a whole batch.
_LONGROPE: Final = {"longrope", "su"}


def request_linker(server_args: Any, config: HiSparseConfig) -> None:
    """Set SGLang's flags for the key ``storage``, or check those of the command line.

    Raises:
        ConfigError: the radix cache is off, or the flags ask for another linker than that of
            hisparse.
    """
    if server_args.disable_radix_cache:
        raise ConfigError(
            "--disable-radix-cache is given, but storage keeps prefixes of the radix cache; "
            "expected one of the two"
        )
    if config.storage is not None:
        wanted = _LINKER | {"linker_extra_config": asdict(config.storage)}
        given = server_args.unified_cache_external_linker_config
        if given not in (None, wanted):
            raise ConfigError(
                f"storage is set and {_FLAG} is {quoted(given)}; expected one of the two"
            )
        server_args.enable_unified_cache_external_linker = True
        server_args.unified_cache_external_linker_backend = "dynamic"
        server_args.unified_cache_external_linker_config = wanted
    linker = server_args.unified_cache_external_linker_config or {}
    found = {name: linker.get(name) for name in _LINKER}
    if server_args.unified_cache_external_linker_backend != "dynamic" or found != _LINKER:
        raise ConfigError(
            f"--unified-cache-external-linker-backend is "
            f"{server_args.unified_cache_external_linker_backend} with {quoted(linker)}; expected "
            f"dynamic with {_LINKER}, the only linker that reads hisparse's host pool"
        )
    read_options(linker.get("linker_extra_config") or {})


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
        f"storage: got {got}; expected no storage, or a model and flags with which its weights and "
        "the tokens alone decide K and V"
    )


def read_options(extra_config: Any) -> StorageOptions:
    """The options of the storage in ``linker_extra_config``.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    return from_options(StorageOptions, "storage", _FLAG, dict(extra_config or {}))


def create_backend(options: StorageOptions, buffer: Any, rank: int, num_ranks: int) -> Any:
    """SGLang's ``HiCacheStorage`` for the options.

    Args:
        options: of the storage.
        buffer: host memory that the backend reads and writes.
        rank: of this process, among ``num_ranks``.
        num_ranks: of the server.

    Raises:
        HiSparseError: the backend cannot be made.
    """
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    name, extra = options.backend, dict(options.options)
    if name == "file":
        # SGLang's own "file" keeps one file a page, and checks nothing that it reads.
        name, extra = "dynamic", _file_options(options)
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=num_ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        # Keys name the rank, so that backends need not: to them each record is whole.
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="hisparse",
        extra_config=extra,
    )
    try:
        return StorageBackendFactory.create_backend(name, config, buffer)
    except HiSparseError:
        raise
    except Exception as error:
        raise HiSparseError(
            f"storage: got backend {quoted(options.backend)}, which did not start: "
            f"{one_line(error)}; expected one that SGLang can make of its options"
        ) from error


def _file_options(options: StorageOptions) -> dict[str, Any]:
    assert options.path is not None, "StorageOptions checks it"
    try:
        path = Path(options.path).expanduser()
        size = size_in_bytes("storage: size", options.size, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user.
        raise HiSparseError(
            f"storage: path: got {quoted(options.path)}: {one_line(error)}; expected a folder that "
            "can be made"
        ) from None
    return {
        "backend_name": "hisparse-file",
        "module_path": "hisparse.sglang.features.storage.file_storage",
        "class_name": "FileStorage",
        "path": str(path),
        "size_bytes": size,
        "policy": options.policy,
        "ttl_s": options.ttl_s,
    }
