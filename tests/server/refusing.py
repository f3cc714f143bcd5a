"""Resolves a command line as the server does, in this process, or gives the line of its refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import tiny_model

from hisparse.sglang.features import IN_USE

__all__ = ["refusal", "resolve"]


def resolve(*flags: str, model: Path | None = None, config: object = None) -> object:
    """SGLang's ``ServerArgs`` of a server on a CPU.

    Args:
        flags: of SGLang.
        model: its folder; None: a Llama.
        config: value of ``--hisparse-config``, an object or a text; None: it is not given.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    line = ["--model-path", str(model or tiny_model("llama")), "--device", "cpu"]
    line += ["--dtype", "float32", "--attention-backend", "hisparse"]
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        line += ["--hisparse-config", text]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        # A start writes it.
        patch.setenv(IN_USE, "")
        args = prepare_server_args([*line, *flags])
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
