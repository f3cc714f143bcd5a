"""Records decode steps and replays them, as a CUDA graph does, in a simulator."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse.engine.batches import StaticBatch
from hisparse.kernels.build import cpu as _build
from hisparse.testing.operations import Violation, no_sync, tensors_in
from hisparse.testing.simulator import Request, Simulator, simulated_inputs

_Operation = Callable[[], None]


class Recording:
    """The recorded operations, in order.

    Attributes:
        names: names of the operations that a replay runs.
        num_bytes: bytes of the tensors that the operations allocated; a graph keeps this memory.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_bytes = 0
        self._operations: list[_Operation] = []
        self._held: list[Any] = []

    def replay(self) -> None:
        """Run the operations on what their inputs hold now; results overwrite the old ones."""
        for operation in self._operations:
            operation()

    def add(self, name: str, operation: _Operation) -> None:
        """Append an operation."""
        self.names.append(name)
        self._operations.append(operation)

    def hold(self, made: Any) -> None:
        """Keep a reference to tensors, so that nothing else is allocated in their memory."""
        self._held.append(made)


@contextmanager
def record(where: object) -> Iterator[Recording]:
    """Run the body of the ``with`` statement and record its operations.

    Args:
        where: name of the recorded step, for messages.

    Raises:
        Violation: an operation reads a value on the host, has a result whose shape depends on
            values, or uses a tensor that was made from host values; the message names it.
    """
    recording = Recording()
    mode = _Mode(where, recording)
    library = _Kernels(_build.cpu_library(), mode)
    with patch.object(_build, "cpu_library", lambda: library), no_sync(where), mode:
        yield recording


class _Mode(TorchDispatchMode):
    def __init__(self, where: object, recording: Recording) -> None:
        TorchDispatchMode.__init__(self)
        self._where = where
        self._recording = recording
        self._known = {_address(tensor) for tensor in _living_tensors()}

    def require_known(self, name: str, values: Any) -> None:
        """Refuse tensors that neither existed before nor were made by a recorded operation."""
        if any(_address(tensor) not in self._known for tensor in tensors_in(values)):
            raise Violation(
                f"{self._where}: got {name} on a tensor that was made from host values during "
                "the step, expected none: a CUDA graph replays the values that it has captured"
            )

    def add(self, name: str, operation: _Operation) -> None:
        """Record a call that is not an operation of PyTorch."""
        self._recording.add(name, operation)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        given = tensors_in((args, options))
        if func.overloadpacket.__name__ == "lift_fresh" and given[0].dim() == 0:
            # A Python number, as in `x[0] = 1`; on a GPU it is an argument of the fill kernel.
            self._known.add(_address(given[0]))
        self.require_known(str(func), given)
        out = func(*args, **options)
        self._recording.hold((args, options, out))
        inputs = {_address(tensor) for tensor in given}
        made = [tensor for tensor in tensors_in(out) if _address(tensor) not in inputs]
        self._known.update(map(_address, made))
        self._recording.num_bytes += sum(x.untyped_storage().nbytes() for x in made)
        if func.overloadpacket.__name__ in _UNINITIALISED:
            self.add(f"{func} (poisoned)", lambda: _poison(made))
        elif made or func._schema.is_mutable:  # All others are views.
            self.add(str(func), _again(func, args, options, made, inputs))
        return out


_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def _again(
    func: Any, args: Sequence[Any], options: Mapping[str, Any], made: list[Tensor], inputs: set[int]
) -> _Operation:
    def run() -> None:
        fresh = [x for x in tensors_in(func(*args, **options)) if _address(x) not in inputs]
        for kept, new in zip(made, fresh, strict=True):
            kept.copy_(new)

    return run


def _poison(made: list[Tensor]) -> None:
    for tensor in made:
        if tensor.dtype.is_floating_point:
            tensor.fill_(torch.nan)
        else:
            tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


class _Kernels:
    """The library of compiled kernels; every call is recorded."""

    def __init__(self, library: Any, mode: _Mode) -> None:
        self._library = library
        self._mode = mode

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(self._library, name)

        def call(*arguments: object) -> None:
            self._mode.require_known(name, arguments)
            kernel(*arguments)
            self._mode.add(name, lambda: kernel(*arguments))

        return call


def _living_tensors() -> Iterator[Tensor]:
    """All tensors that the garbage collector tracks, without those put away by ``gc.freeze``."""
    kinds = {Tensor, *_subclasses(Tensor)}
    # Fake tensors of torch.compile have no memory.
    kinds.difference_update([FakeTensor, *_subclasses(FakeTensor)])
    return (found for found in gc.get_objects() if type(found) in kinds)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for own in kind.__subclasses__():
        yield own
        yield from _subclasses(own)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class ReplayingSimulator(Simulator):
    """Records one step of padding at its start and replays it for later steps.

    A step that cannot be replayed runs eagerly.

    Attributes:
        batch_size: rows of the recorded step; rows without a request are padding.
        num_pages: pages of the longest context.
        recording: the recorded step.
        static: the input tensors of the recorded step.
        num_replayed: steps that were replayed so far.
    """

    batch_size = 4
    num_pages = 192

    def __post_init__(self) -> None:
        self.checked = False
        super().__post_init__()
        self.num_replayed = 0
        self.static = StaticBatch(
            self.batch_size, self.num_pages, self.page_size, torch.device("cpu")
        )
        example = self.request(1, 1, seed=0)
        self.end(example)
        self.streams = [
            torch.randn(x.shape[0], self.batch_size, *x.shape[2:]) for x in example.streams
        ]
        self.streams[2] = self.manager.host.format.values_of(*self.streams[1:3])
        self.capture()

    def decode(self, *requests: Request) -> Tensor:
        """Decode one token of each request; returns the outputs ``[L, B, Hq, D]``."""
        batch = self.next_tokens(*requests)
        if not batch.begin_replay(self.coordinator):
            self.coordinator.forward_begin(batch)
            return self._forward([(r, r.done - 1, r.done) for r in requests])
        self.static.load(batch)
        for static, streams in zip(
            self.streams, zip(*(r.streams for r in requests), strict=True), strict=True
        ):
            # Padding rows may hold any values.
            static.fill_(torch.nan)
            for row, (request, stream) in enumerate(zip(requests, streams, strict=True)):
                static[:, row] = stream[:, request.done - 1]
        self.recording.replay()
        self.num_replayed += 1
        return self.out[:, : len(requests)].clone()

    def capture(self) -> None:
        """Run a step of padding twice and record the second run, for all later replays."""
        self.coordinator.prepare_capture()
        self.static.load(None)
        self.run()
        with record("a decode step") as self.recording:
            self.out = self.run()

    def run(self) -> Tensor:
        """Run a step with the static tensors; returns the outputs ``[L, B, Hq, D]``."""
        self.coordinator.forward_begin(self.static.first(self.batch_size))
        outs = []
        for layer in range(self.layers):
            q, k, v, *indexer = (x[layer] for x in self.streams)
            outs.append(self.coordinator.attention(layer, q, k, v, simulated_inputs(*indexer)))
        self.coordinator.forward_end()
        return torch.stack(outs)
