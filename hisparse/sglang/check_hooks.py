"""Checks that the plugin's hooks and names fit the installed SGLang.

``python -m hisparse.sglang.check_hooks`` loads the plugin as SGLang does and prints one JSON
object: ``hooks`` and ``used`` are counts, ``problems`` is a list of lines. ``hisparse doctor`` runs
the check in a separate process because the import of SGLang takes seconds and may fail.
"""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hisparse.errors import HiSparseError
from hisparse.sglang import features, install, plugin

#: Members of classes that the plug-in calls, overrides or reads. What it imports, its files say.
MEMBERS: Final = (
    "sglang.srt.configs.model_config.AttentionArch.MLA",
    "sglang.srt.disaggregation.base.conn.StateType.BLOCK_SCALE",
    "sglang.srt.environ.envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
    ".init_forward_metadata_out_graph",
    "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.PRE_REPLAY",
    "sglang.srt.layers.radix_attention.AttentionType.DECODER",
    "sglang.srt.mem_cache.allocation.get_last_loc_torch",
    "sglang.srt.mem_cache.allocation.get_last_loc_triton",
    "sglang.srt.mem_cache.hicache_storage.PoolName.KV",
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.register_on_alloc_rows",
    "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
    "sglang.srt.mem_cache.unified_cache.linker_factory.create_unified_cache_linker",
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker"
    ".record_offload_ready",
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods.AttnForwardMethod"
    ".MLA",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookType.AROUND",
    "sglang.srt.arg_groups.model_hook.resolved_view",
)


def signature_mismatch(wrapper: Callable[..., Any], original: Callable[..., Any]) -> str | None:
    """Compare the signature of a hook with the SGLang function that the hook wraps.

    Args:
        wrapper: the hook; takes the original function, then the original's arguments.
        original: SGLang's function.

    Returns:
        The mismatch in words, or None if the hook accepts every call of ``original``.
    """
    positional: list[object] = []
    named: dict[str, object] = {}
    for name, parameter in inspect.signature(original).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(name)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = name
    try:
        inspect.signature(wrapper).bind(original, *positional, **named)
    except TypeError as error:
        return f"its arguments are {inspect.signature(original)}: {error}"
    return None


def find_problems() -> list[str]:
    """One line for each hook or name that does not fit, of all features.

    The caller loads SGLang's plugins first.
    """
    features.enable(features.all_features())
    problems, hooks = [], plugin.hooks_in_use()
    try:
        install.install(hooks)
    except HiSparseError as error:
        problems.append(str(error))
    for target, wrapper in hooks.items():
        original = install.original_of(target)
        reason = original and signature_mismatch(wrapper, original)
        if reason:
            problems.append(f"the hook on {target} does not fit: {reason}")
    for name in used_names():
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            problems.append(f"{name}, which hisparse uses, does not exist: {error}")
    return problems


def used_names() -> list[str]:
    """Names of SGLang that the plug-in's files import, and members of classes that it uses."""
    found = {*MEMBERS}
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(found)


def _main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    problems = find_problems()
    found = {"hooks": len(plugin.hooks_in_use()), "used": len(used_names()), "problems": problems}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
