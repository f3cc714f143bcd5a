"""Resolves starts with copies of the package that lack features, in a process each.

Takes JSON on the command line: a list of ``[folder of the package, lines]``, each line arguments of
a server. Prints JSON for each folder: names of the features and, for each line, the hooks that are
installed or the line that refuses the start. Before them it prints the hooks that a start without
hisparse has, and the modules that it loads for them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from sglang.srt.server_args import prepare_server_args


def resolve(line: Sequence[str]) -> list[str] | str:
    from hisparse.sglang import install, plugin

    try:
        prepare_server_args(line).resolve_once()
    except SystemExit as end:
        return str(end.code)
    hooks = plugin.hooks_in_use()
    install.verify(hooks)
    return sorted(hooks)


def load_only() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = set(sys.modules)
    load_plugins()
    loaded = sorted(set(sys.modules) - before)
    print(json.dumps([sorted(HookRegistry._hooks), loaded]), flush=True)


def run(folder: str, lines: Sequence[Sequence[str]]) -> None:
    sys.path.insert(0, folder)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import hisparse
    from hisparse.sglang import features

    assert hisparse.__file__.startswith(folder), hisparse.__file__
    names = [feature.name for feature in features.all_features()]
    print(json.dumps([names, [resolve(line) for line in lines]]), flush=True)


def main() -> None:
    work = json.loads(sys.argv[1])
    # What the children would import, each again.
    stock = [word for word in work[0][1][0] if word not in ("--attention-backend", "hisparse")]
    prepare_server_args([*stock, "--attention-backend", "torch_native"]).resolve_once()
    assert not [name for name in sys.modules if name.startswith("hisparse")]
    in_child("load_plugins", load_only)
    for folder, lines in work:
        in_child(f"without {folder}", lambda folder=folder, lines=lines: run(folder, lines))


def in_child(what: str, do: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{what}: status {status}"


if __name__ == "__main__":
    main()
