"""Kernel calls of a decode layer on a CPU, recorded once and made again in steps of such shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from hisparse.kernels.build.cpu import CallRecorder
from hisparse.kernels.operation import ResultMemory

#: As requests come and go, steps change between few shapes. Each keeps the results of one layer.
_MAX_SHAPES = 4


class _Calls(NamedTuple):
    run: Callable[..., bool]
    #: What Python needs of their results, which they write again.
    kept: Tensor | None


class RecordedCalls:
    """What layers of steps compute, each as one native call.

    It can be that if kernels alone compute: as in a CUDA graph, what tensors hold decides nothing
    in Python.

    Args:
        lasting: what calls may read and write beside their inputs and results.
    """

    def __init__(self, lasting: Iterable[Tensor]) -> None:
        self._lasting = {x.untyped_storage().data_ptr() for x in lasting}
        #: By shapes, the last used ones last.
        self._by_shapes: dict[Hashable, tuple[ResultMemory, dict[Hashable, _Calls]]] = {}
        self._scratch, self._calls = ResultMemory(keeps=True), dict[Hashable, _Calls]()

    def begin_step(self, shapes: Hashable) -> bool:
        """Whether a step of such shapes can use recordings.

        The first one of some shapes does not, since the next one may have others.
        """
        known = shapes in self._by_shapes
        kept = self._by_shapes.pop(shapes, None) or (ResultMemory(keeps=True), {})
        self._scratch, self._calls = kept
        self._by_shapes[shapes] = kept
        if len(self._by_shapes) > _MAX_SHAPES:
            del self._by_shapes[next(iter(self._by_shapes))]
        return known

    def again(self, key: Hashable, inputs: Sequence[Tensor]) -> _Calls | None:
        """Make the calls that ``key`` names; None, and none is made, if they do not fit ``inputs``.

        Raises:
            KernelError: a kernel refuses a tensor.
        """
        calls = self._calls.get(key)
        return calls if calls is not None and calls.run(*inputs) else None

    def record(
        self, key: Hashable, inputs: Sequence[Tensor], compute: Callable[[], Tensor | None]
    ) -> bool:
        """Compute, and record the calls; False: to make them again would not compute the same.

        Args:
            key: names the calls.
            inputs: the tensors whose place changes from step to step.
            compute: makes the calls, and returns what :class:`_Calls` keeps.
        """
        recorder = CallRecorder(inputs, self._lasting, self._scratch.storages)
        with self._scratch, recorder:
            kept = compute()
        if recorder.joined is None:
            return False
        self._calls[key] = _Calls(recorder.joined, kept)
        return True
