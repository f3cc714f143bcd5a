"""Records the tensor operations of a call, and refuses those that wait for the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hisparse.errors import AlgorithmError


class Violation(AlgorithmError):
    """An algorithm broke its contract.

    Args:
        findings: one line each: what was got, what was expected.
    """

    def __init__(self, *findings: str) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


#: Methods of a tensor that return its values to Python and so wait for the device.
_READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "__bool__": "a branch on a tensor's value",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__index__": "a tensor as a Python index",
    "__array__": "numpy.asarray(tensor)",
    "__contains__": "`in` on a tensor",
}

_REMEDY = "expected none: it waits for the device and cannot be captured in a CUDA graph"


@contextmanager
def no_sync(where: object) -> Iterator[None]:
    """Refuse operations that read a tensor's values or make the host wait for the device.

    Args:
        where: name of the call, for the message.

    Raises:
        Violation: the message names the operation.
    """
    with _NoReads(where), _NoWaits(where):
        yield


class _NoReads(TorchFunctionMode):
    """Refuses methods of tensors that read values."""

    def __init__(self, where: object) -> None:
        TorchFunctionMode.__init__(self)
        self._where = where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        read = _READS.get(name)
        if name == "to" and "cpu" in (*args[1:], *(kwargs or {}).values()):
            read = '.to("cpu")'
        if read is not None:
            raise Violation(f"{self._where}: got {read}, {_REMEDY}")
        return func(*args, **(kwargs or {}))


class _NoWaits(TorchDispatchMode):
    """Refuses operations that wait, also within other operations."""

    def __init__(self, where: object) -> None:
        TorchDispatchMode.__init__(self)
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reason = _why_it_waits(func, args)
        if reason is not None:
            raise Violation(f"{self._where}: got {func} ({reason}), {_REMEDY}")
        return func(*args, **(kwargs or {}))


def _why_it_waits(func: Any, args: Sequence[Any]) -> str | None:
    if func.namespace != "aten":
        return None
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        # PyTorch runs an assignment of one number to x[mask] as a masked_fill.
        fills = name != "index" and len(args[1]) == len(masks) == 1 and args[2].numel() == 1
        if masks and not fills:
            return "indexing by a mask: use torch.where or masked_fill"
        return None
    if name == "lift_fresh":
        return "a tensor made from Python values" if args[0].numel() > 1 else None
    if torch.Tag.data_dependent_output in func.tags:
        return "it reads a tensor's value"
    if torch.Tag.dynamic_output_shape in func.tags:
        return "the shape of its result depends on values"
    return None


class Operations(TorchDispatchMode):
    """Counts operations and the tensors that they allocate.

    Attributes:
        names: names of the operations, in order.
        num_bytes: bytes of the tensors that were allocated.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.names: list[str] = []
        self.num_bytes = 0
        self._made: list[ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.num_bytes += storage.nbytes()
                self._made.append(ref(tensor))
        return out

    @property
    def num_alive(self) -> int:
        """Number of allocated tensors that are not freed yet."""
        return sum(made() is not None for made in self._made)


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among nested arguments or results of an operation."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
