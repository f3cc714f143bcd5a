"""A prefill server and a decode server with Mooncake's TCP transport between them, on loopback."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mooncake_master
from harness import Answer, Server
from plugins import make_plugin
from tiny_models import tiny_model

from hisparse_bench.server import free_port

_rooms = itertools.count(1)

#: Loads the libraries by their paths: a forked server cannot change where the linker looks.
_LIBRARIES = """
    import ctypes, os
    from pathlib import Path

    def load():
        folders = os.environ["MOONCAKE_LIBRARIES"].split(":")
        left = [path for folder in folders for path in Path(folder).glob("*.so.?")]
        left += [path for folder in folders for path in Path(folder).glob("*.so.???")]
        while left:
            waiting = [path for path in left if not loads(path)]
            if len(waiting) == len(left):
                raise OSError(f"cannot load {waiting}")
            left = waiting

    def loads(path):
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            return False
        return True
"""


@dataclass
class Pair:
    """Two running servers.

    Attributes:
        prefill, decode: the servers.
        port: of the prefill server's registry of its addresses.
        answers_of_prefill: what the prefill server answers, which is of no use.
    """

    prefill: Server
    decode: Server
    port: int
    answers_of_prefill: list[Future[Answer]] = field(default_factory=list)

    def generate(self, prompt: Sequence[int], max_new_tokens: int = 32, **body: Any) -> Answer:
        """As a router does it: the same request to both servers; the decode server answers."""
        with ThreadPoolExecutor(1) as thread:
            room = self.room()
            sent = thread.submit(self.prefill.generate, prompt, max_new_tokens, **room, **body)
            self.answers_of_prefill.append(sent)
            return self.decode.generate(prompt, max_new_tokens, **room, **body)

    def samples(self, prompt: Sequence[int], max_new_tokens: int, count: int) -> list[Answer]:
        """Several greedy continuations of one prompt; a router sends each as its own request."""
        return self.generate_many([prompt] * count, max_new_tokens)

    @contextmanager
    def stream(
        self, prompt: Sequence[int], max_new_tokens: int, **body: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Events of a streamed answer; leaving the block early aborts the request on both."""
        body = {"rid": f"stream-{next(_rooms)}"} | body | self.room()
        with ThreadPoolExecutor(1) as thread:
            sent = thread.submit(self.prefill.generate, prompt, max_new_tokens, **body)
            self.answers_of_prefill.append(sent)
            try:
                with self.decode.stream(prompt, max_new_tokens, **body) as events:
                    yield events
            finally:
                # An abort may come before the request.
                while not sent.done():
                    self.prefill._post("/abort_request", {"rid": body["rid"]})
                    time.sleep(0.1)

    def abort_after(self, prompt: Sequence[int], num_tokens: int, max_new_tokens: int) -> list[int]:
        """Start a request and abort it by its id once it has so many tokens; what it got."""
        rid, ids = f"abort-{next(_rooms)}", list[int]()
        with self.stream(prompt, max_new_tokens, rid=rid) as events:
            for event in events:
                if len(ids) < num_tokens <= len(event["output_ids"]):
                    self.decode._post("/abort_request", {"rid": rid})
                ids = event["output_ids"]
        return ids

    def room(self) -> dict[str, Any]:
        """What tells two requests that they are one."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": next(_rooms),
        }

    def generate_many(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **body: Any
    ) -> list[Answer]:
        """Requests at the same time."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            asked = [threads.submit(self.generate, p, max_new_tokens, **body) for p in prompts]
            return [reply.result() for reply in asked]

    def flush_cache(self) -> None:
        """Empty both radix caches."""
        for server in (self.prefill, self.decode):
            server.flush_cache()


def flags_of(mode: str, port: int) -> list[str]:
    """SGLang's flags of a server: ``mode`` is "prefill" or "decode"."""
    flags = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake_tcp"]
    return [*flags, "--disaggregation-bootstrap-port", str(port)]


def _options(libraries: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Options of :class:`Server` that Mooncake needs."""
    own = {"MOONCAKE_LIBRARIES": mooncake_master.LIBRARY_PATH}
    # SGLang's own backend needs it on a CPU, see docs/disaggregation.md.
    own |= {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}
    return {"python_path": [mooncake_master.TOOLS, libraries], "env": own | dict(env)}


@contextmanager
def running(
    folder: Path,
    name: str,
    kind: str,
    *flags: str,
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any],
    decode_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """Start both servers at the same time, and end them at the end of the block.

    Args:
        folder: for logs.
        name: of the logs.
        kind: of the tiny model.
        flags: of both servers.
        prefill, decode: options of the servers beside Mooncake's.
        prefill_flags, decode_flags: of one server.
        env: more environment variables of both.
    """
    port = free_port()
    plugin = folder / f"{name}-libraries"
    make_plugin(plugin, "mooncake_libraries:load", _LIBRARIES)
    shared = _options(plugin, env or {})
    own = {"prefill": (prefill, prefill_flags), "decode": (decode, decode_flags)}
    servers = [
        Server(
            tiny_model(kind),
            folder / f"{name}-{mode}.log",
            *flags_of(mode, port),
            *flags,
            *more,
            **options,
            **shared,
        )
        for mode, (options, more) in own.items()
    ]
    with ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        for start in [threads.submit(stack.enter_context, server) for server in servers]:
            start.result()
        yield Pair(*servers, port)
