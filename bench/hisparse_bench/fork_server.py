"""A process that imports SGLang once and forks a server for each request, on a CPU.

Each server is this process, forked, which runs ``sglang.launch_server`` with the given command
line; the scheduler and the detokenizer that SGLang starts are forks too. A start takes 3 s of
processor time in place of 25. A fork does not show that each process of a server loads the plugin
by its entry point: the tests that start a server with ``forked=False`` do.

Rule: nothing here computes with PyTorch before a fork. OpenMP starts its threads with the first
computation, and they would not survive a fork.

The process reads requests from standard input, one JSON object a line.
``{"line": [...], "env": {...}, "path": [...], "out": "...", "err": "..."}`` starts a server and
answers its process id; ``{"poll": pid}`` answers its exit code, or null while it runs. At the end
of standard input, servers that run are killed.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hisparse.errors import HiSparseError, quoted

#: Imported before the first fork. SGLang imports every model when it looks for the first one.
PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.deepseek_v2",
    "sglang.srt.layers.attention.torch_native_backend",
    "transformers.models.auto.configuration_auto",
)


def _preload() -> None:
    """Import what every server imports, without loading plugins."""
    for name in PRELOADED:
        importlib.import_module(name)
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.get_supported_archs()


def _main() -> None:
    """Serve requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _preload()
    started: set[int] = set()
    ended: dict[int, int] = {}
    answers.write('"ready"\n')
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = _poll(request["poll"], ended)
        else:
            answer = os.fork()
            if answer == 0:
                _serve(request)
            started.add(answer)
            while os.getsid(answer) != answer:
                time.sleep(0.001)
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()
    # Whoever asked is gone, perhaps before it heard of the last server.
    for pid in started - ended.keys():
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _poll(pid: int, ended: dict[int, int]) -> int | None:
    """Exit code as ``subprocess`` has it, None of a server that runs."""
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == 0:
            return None
        ended[pid] = os.waitstatus_to_exitcode(status)
    return ended[pid]


def _serve(request: dict[str, Any]) -> None:
    """Become the server; never returns."""
    code = 1
    try:
        os.setsid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["out"], flags), 1)
        os.dup2(os.open(request["err"], flags), 2)
        os.closerange(3, 64)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:0] = request["path"]
        sys.argv = request["line"]
        _launch(request["line"][1:])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _launch(arguments: list[str]) -> None:
    """What ``python -m sglang.launch_server`` does, but for new interpreters."""
    # Plugins replace names of this module: they are looked up when they are called.
    from sglang import launch_server

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    launch_server.load_plugins()
    try:
        launch_server.run_server(launch_server.prepare_server_args(arguments))
    finally:
        launch_server.kill_process_tree(os.getpid(), include_parent=False)


class ForkedProcess:
    """A server of the fork server, with the part of ``subprocess.Popen`` that tests use.

    Attributes:
        pid: process id; the process leads its own group.
        returncode: exit code, None while it runs.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, when it has ended; ``subprocess.TimeoutExpired`` if it takes longer."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"forked server {self.pid}", timeout or 0)
            time.sleep(0.05)
        return code


class ForkServer:
    """The running process, as tests and benchmarks talk to it.

    It has a session of its own, so that Ctrl-C does not reach it, and ends when standard input
    does: with the process that started it.

    Args:
        env: environment of the process; each server gets its own, but what is read while modules
            are imported is read from this one.
        log: file that gets what it prints; None: standard error.

    Raises:
        HiSparseError: SGLang cannot be imported.
    """

    def __init__(self, env: Mapping[str, str], log: Path | None = None) -> None:
        self._log = log
        with ExitStack() as files:
            errors = None if log is None else files.enter_context(log.open("wb"))
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._asking = threading.Lock()
        self._read()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request; threads may ask at the same time."""
        with self._asking:
            self._requests.write(f"{json.dumps(request)}\n")
            self._requests.flush()
            return self._read()

    def start(
        self,
        line: Sequence[str],
        env: Mapping[str, str],
        path: Sequence[Path],
        out: Path,
        err: Path,
    ) -> ForkedProcess:
        """Start a server.

        Args:
            line: command line, from "sglang.launch_server" on.
            env: its whole environment.
            path: folders in front of its module path.
            out, err: files that get what it prints.
        """
        files = {"out": str(out), "err": str(err), "path": [str(p) for p in path]}
        return ForkedProcess(self, self.ask({"line": list(line), "env": dict(env)} | files))

    def stop(self) -> None:
        """End the process, and servers that are left."""
        self._requests.close()
        self._answers.close()
        self._process.wait()

    def _read(self) -> Any:
        if line := self._answers.readline():
            return json.loads(line)
        end = ""
        if self._log is not None:
            end = "; its log ends: " + quoted(self._log.read_text(errors="replace")[-300:])
        raise HiSparseError(
            f"the process that forks servers: got exit status {self._process.wait()}, expected an "
            f"answer{end}"
        )


if __name__ == "__main__":
    _main()
