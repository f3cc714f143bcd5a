"""Registries of algorithms, adapters and extensions: what a plug-in can break, said in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hisparse import registry as registry_module
from hisparse.engine.extensions.base import Extension, register_extension
from hisparse.errors import ConfigError
from hisparse.registry import Registry


def test_a_plug_in_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise ImportError("no module named 'gone'")

    entry = SimpleNamespace(name="theirs", value="gone:Theirs", load=load)
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [entry])
    found: Registry[Any] = Registry("algorithm", entry_point_group="some.group")
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            found.get("anything")
        message = str(caught.value)
        assert "algorithm 'theirs': cannot import 'gone:Theirs'" in message
        assert "no module named 'gone'" in message
        assert "\n" not in message


def test_a_name_that_is_taken_names_both_classes() -> None:
    found: Registry[Any] = Registry("adapter")
    found.register("mine")(int)
    with pytest.raises(ConfigError, match=r"'mine' is registered twice: by builtins.int and by"):
        found.register("mine")(str)


def test_an_extension_may_not_take_a_key_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="extension 'budget': the name is a configuration key"):

        @register_extension("budget")
        class Budget(Extension):
            pass
