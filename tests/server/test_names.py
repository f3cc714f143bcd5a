"""Every SGLang name that the plugin touches exists, and a hook that is not in place is named."""

from __future__ import annotations

import pkgutil
from importlib.metadata import version

import pytest
from refusing import refusal

from hisparse.errors import PluginError
from hisparse.sglang import check_hooks, features, hooks, install, plugin

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")


#: Hooks of all features, and those of each server.
HOOKS = {**plugin.ARGUMENT_HOOKS, **hooks.HOOKS}
for feature in features.all_features():
    HOOKS |= feature.hooks


@pytest.fixture(scope="module", autouse=True)
def plugins_loaded() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    install.install(HOOKS)


@pytest.mark.parametrize("name", [*HOOKS, *check_hooks.used_names()])
def test_sglang_has(name: str) -> None:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"sglang {version('sglang')} has no {name}, which hisparse uses: {error}")


def test_every_hook_is_in_place() -> None:
    install.verify(HOOKS)


@pytest.mark.parametrize("target", HOOKS)
def test_a_hook_that_did_not_take_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if SGLang had left the original in place."""
    monkeypatch.setitem(install._originals, target, install._resolve(target))
    with pytest.raises(PluginError) as error:
        install.verify(HOOKS)
    assert target in str(error.value)
    assert f"sglang {version('sglang')}" in str(error.value)


def test_a_hook_whose_target_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    monkeypatch.delattr(ReqToTokenPool, "free_rows")
    with pytest.raises(PluginError, match=r"got no [\w.]+\.ReqToTokenPool\.free_rows, expected it"):
        install.verify(HOOKS)


def test_a_hook_that_did_not_take_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from sglang.srt.server_args import prepare_server_args
    from tiny_models import tiny_model

    target = "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls"
    monkeypatch.setitem(install._originals, target, install._resolve(target))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv(features.IN_USE, "")
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


def test_two_features_hook_no_function_twice() -> None:
    listed = [*plugin.ARGUMENT_HOOKS, *hooks.HOOKS]
    listed += [name for feature in features.all_features() for name in feature.hooks]
    assert len(set(listed)) == len(listed)
