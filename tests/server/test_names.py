"""Every SGLang name that the plugin touches exists, and a hook that is not in place is named."""

from __future__ import annotations

import pkgutil
from importlib.metadata import version

import pytest
from refusing import refusal

from hisparse.errors import PluginError
from hisparse.sglang import names, plugin

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def plugins_loaded() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    plugin.install_hooks()


@pytest.mark.parametrize("name", [*names.HOOKS, *names.USED])
def test_sglang_has(name: str) -> None:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"sglang {version('sglang')} has no {name}, which hisparse uses: {error}")


def test_every_hook_is_in_place() -> None:
    plugin.verify_hooks()


@pytest.mark.parametrize("target", names.HOOKS)
def test_a_hook_that_did_not_take_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if SGLang had left the original in place."""
    monkeypatch.setitem(plugin._originals, target, plugin._resolve(target))
    with pytest.raises(PluginError) as error:
        plugin.verify_hooks()
    assert target in str(error.value)
    assert f"sglang {version('sglang')}" in str(error.value)


def test_a_hook_whose_target_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    monkeypatch.delattr(ReqToTokenPool, "free_rows")
    with pytest.raises(PluginError, match=r"ReqToTokenPool\.free_rows does not exist"):
        plugin.verify_hooks()


def test_a_hook_that_did_not_take_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from sglang.srt.server_args import prepare_server_args
    from tiny_models import tiny_model

    target = "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls"
    monkeypatch.setitem(plugin._originals, target, plugin._resolve(target))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    line = ["--model-path", str(tiny_model("llama")), "--device", "cpu", "--dtype", "float32"]
    args = prepare_server_args([*line, "--attention-backend", "hisparse"])
    with pytest.raises(SystemExit) as end:
        args.resolve_once()
    assert str(end.value.code).startswith("hisparse: error: hisparse does not fit sglang")
    assert target in str(end.value.code)


def test_another_release_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every hook would fit."""
    monkeypatch.setattr(plugin, "version", lambda package: "0.5.24")
    assert refusal() == (
        "hisparse: error: got sglang 0.5.24, expected 0.5.23, the release that hisparse supports: "
        "pip install sglang==0.5.23"
    )


def test_another_release_that_lacks_what_the_plugin_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.layers.attention import attention_registry

    monkeypatch.delattr(attention_registry, "register_attention_backend")
    monkeypatch.setattr("sys.argv", ["launch_server", "--attention-backend", "hisparse"])
    with pytest.raises(SystemExit, match=r"hisparse: error: hisparse does not fit sglang 0\.5\.23"):
        plugin.register()
    monkeypatch.setattr(plugin, "version", lambda package: "0.5.17")
    with pytest.raises(SystemExit, match=r"error: got sglang 0\.5\.17, expected 0\.5\.23, "):
        plugin.register()


def test_names_are_sorted_into_hooks_and_uses_without_doubles() -> None:
    listed = [*names.HOOKS, *names.USED]
    assert len(set(listed)) == len(listed)


def _imports_of_sglang() -> set[str]:
    """Dotted names that the plugin's source imports from SGLang."""
    import ast
    from pathlib import Path

    found = set()
    for path in Path(plugin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_import_from_sglang_is_listed() -> None:
    listed = (*names.HOOKS, *names.USED)
    missing = [
        name
        for name in sorted(_imports_of_sglang())
        if not any(entry == name or entry.startswith(f"{name}.") for entry in listed)
    ]
    assert not missing, f"the plugin uses {missing}, which hisparse.sglang.names does not list"
