"""The contract of a feature of the server: what it declares, and when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from hisparse.config import HiSparseConfig
from hisparse.engine.build import EngineSetup
from hisparse.sglang.model_shape import ModelShape
from hisparse.sglang.session import ServerSession
from hisparse.sglang.start import ModelKind, Option, Start


@dataclass(frozen=True)
class Flag:
    """A flag of SGLang of which hisparse supports some values; unset is always supported.

    Attributes:
        field: of SGLang's ``ServerArgs``.
        values: the supported ones.
        flag: as the command line has it.
    """

    field: str
    values: tuple[object, ...]
    flag: str


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a feature needs on top of what requests need.

    Attributes:
        request_slots: request slots beyond those of running requests.
        context_tokens: tokens of a request beyond the end of a context.
        device_token_bytes: device memory of a token in a pool of SGLang's own.
        sglang_token_bytes: what SGLang adds to its own bytes of a token, from which it sizes pools.
    """

    request_slots: int = 0
    context_tokens: int = 0
    device_token_bytes: int = 0
    sglang_token_bytes: int = 0


class Feature:
    """Base class; a feature is one instance, ``FEATURE`` of a module or package in this folder.

    A server has the features that are on: their hooks are installed, and they are called in the
    order below. What a feature keeps of a server is an object of its own in the session.
    """

    #: Of the module.
    name: ClassVar[str]
    #: The options that it serves: it is on if one of them is given.
    serves: ClassVar[Sequence[Option]] = ()
    #: The kinds of models that it serves.
    kinds: ClassVar[Sequence[ModelKind]] = ()
    #: What it is not served with, by its option. A pair of features stands at one of the two.
    excludes: ClassVar[Mapping[Option, Sequence[Option]]] = {}
    #: Flags that it reads, and those that would change what it reads.
    flags: ClassVar[Sequence[Flag]] = ()
    #: Wrappers of SGLang's functions by dotted name. They take the function, then its arguments.
    hooks: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    #: Its counters: name to description, for the metrics.
    counters: ClassVar[Mapping[str, str]] = {}
    #: Whether it captures decode steps in CUDA graphs.
    captures_steps: ClassVar[bool] = False

    # In the process of the command line, before a model loads.

    def is_on(self, start: Start) -> bool:
        """Whether a server has the feature."""
        return any(option.given(start) for option in self.serves)

    def is_for(self, model_config: Any) -> bool:
        """Whether a model needs the feature; ``model_config`` is SGLang's ``ModelConfig``."""
        return any(kind.found(model_config) for kind in self.kinds)

    def prepare(self, start: Start) -> HiSparseConfig:
        """Set flags of ``start.args``; returns the settings of all processes of the server.

        Raises:
            ConfigError: flags contradict each other.
        """
        return start.config

    @contextmanager
    def adjusting(self, server_args: Any) -> Iterator[None]:
        """Surrounds SGLang's adjustments of its arguments to a model that needs the feature."""
        yield

    def check(self, server_args: Any, config: HiSparseConfig) -> None:
        """Check SGLang's resolved arguments, and the model.

        Raises:
            ConfigError: hisparse does not serve them together.
        """

    # In a process with a part of the model.

    def register(self) -> None:
        """Register attention backends; runs in each process in which hooks are installed."""

    def process_config(self, config: HiSparseConfig, server_args: Any) -> HiSparseConfig:
        """The settings of this process."""
        return config

    def own_layers(
        self, config: HiSparseConfig, shape: ModelShape, configurator: Any
    ) -> Sequence[int] | None:
        """The model's numbers of the layers that attend in this process; None: all layers do.

        Args:
            config: the settings, with the model's numbers of layers.
            shape: of the layers of this process.
            configurator: SGLang's ``KVCacheConfigurator``.
        """
        return None

    def demand(self, configurator: Any, shape: ModelShape) -> Demand:
        """What the feature needs in this process; the arguments are those of ``own_layers``."""
        return Demand()

    def sized(self, setup: EngineSetup, server_args: Any) -> None:
        """Lower the sizes of this process, or refuse them."""

    def begin(self, session: ServerSession, configurator: Any) -> None:
        """Add the feature's object to a session, before SGLang makes its pools."""

    def pool_class(self, kind: str, *, is_draft: bool) -> type | None:
        """The class of SGLang's kind of KV pool ("mha", "mla", "dsa"); None: the feature has none.

        Args:
            kind: SGLang's name.
            is_draft: whether the pool is that of a draft model, beside the target's.
        """
        return None

    def pool_mixin(self, kind: str) -> type | None:
        """What the feature adds to the methods of the target's pool."""
        return None

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Called when the engine and the attention backend are built."""

    def prepare_draft(self, model: Any) -> None:
        """Change SGLang's draft model before it runs."""

    def store_connected(self, session: ServerSession, linker: Any, options: Any) -> None:
        """Called when the store below host memory is there; ``linker`` reads and writes it."""

    def batch(self, session: ServerSession, forward_batch: Any) -> Any:
        """The engine's batch of a forward in a mode of the feature's; None: another mode."""
        return None

    def totals(self, session: ServerSession) -> Mapping[str, int]:
        """The counters since the start."""
        return {}
