"""Resolves a command line as the server does, in this process, or gives the line of its refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

from hisparse.sglang.features import IN_USE


def server_args(*flags: str, model: Path | None = None, config: object = None) -> Any:
    """SGLang's ``ServerArgs`` before they are resolved.

    Args:
        flags: of SGLang.
        model: its folder; None: a Llama.
        config: value of ``--hisparse-config``, an object or a text; None: it is not given.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    line = ["--model-path", str(model or tiny_model("llama")), "--dtype", "float32"]
    line += ["--attention-backend", "hisparse", "--device", "cpu"]
    if config is not None:
        line += ["--hisparse-config", config if isinstance(config, str) else json.dumps(config)]
    return prepare_server_args([*line, *flags])


def resolve(*flags: str, model: Path | None = None, config: object = None) -> Any:
    """SGLang's ``ServerArgs`` of a server on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        # A start writes it.
        patch.setenv(IN_USE, "")
        args = server_args(*flags, model=model, config=config)
        args.resolve_once()
    return args


def refusal(*flags: str, model: Path | None = None, config: object = None) -> str:
    """The one line that the start ends with."""
    with pytest.raises(SystemExit) as end:
        resolve(*flags, model=model, config=config)
    message = str(end.value.code)
    assert message.startswith("hisparse: error: ")
    assert "\n" not in message
    return message
