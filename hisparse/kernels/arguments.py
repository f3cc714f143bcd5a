"""What an operation declares of its tensors: dtypes, shapes with names for sizes, devices."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from hisparse.errors import KernelError

#: What keys, values and queries may be.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

#: Sizes by name, a tuple for a starred name; and the other values that an operation's check gets.
Sizes = dict[str, object]

_TERM = re.compile(r"(?:(\d+)\*)?(\w+)(?:\+(\d+))?(!?)")


class Size(NamedTuple):
    """``factor * name + more``; without a name, ``more``; ``some``: not 0."""

    name: str
    factor: int
    more: int
    some: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _TERM.fullmatch(text)
        assert match is not None, text
        factor, name, more, some = match.groups()
        if name.isdigit():
            return cls("", 0, int(name))
        return cls(name, int(factor or 1), int(more or 0), bool(some))

    def value(self, sizes: Mapping[str, Any]) -> int | None:
        """The size, or None if it is not known."""
        known: int | None = sizes.get(self.name) if self.name else 0
        return None if known is None else self.factor * known + self.more


class Shape:
    """Sizes of a tensor.

    Args:
        text: sizes separated by spaces, such as "B Hkv 2*D": a number, a name, or a name times or
            plus a number. "_" is any size, and "!" after a size means that it is not 0: a kernel
            divides by it, or has to find a page. The first may be a starred name, which stands for
            any number of sizes, or "?name" for one size or none. A name stands for the same size
            wherever it occurs in an operation.
    """

    def __init__(self, text: str) -> None:
        terms = text.split()
        self._star = terms.pop(0)[1:] if text.startswith(("*", "?")) else ""
        self._one_more = text.startswith("?")
        self.sizes = [Size.parse(term) for term in terms]

    def fits(self, shape: tuple[int, ...], sizes: Sizes) -> bool:
        """Whether a tensor's shape is this one; if so, the names that are new are added."""
        lead = len(shape) - len(self.sizes)
        if lead < 0 or (lead and not self._star) or (lead > 1 and self._one_more):
            return False
        named = self._star not in ("", "_")
        found: Sizes = {self._star: tuple(shape[:lead])} if named else {}
        for want, size in zip(self.sizes, shape[lead:], strict=True):
            expected = want.value(sizes)
            if want.some and not size:
                return False
            if expected is None:
                if want.name != "_" and want.factor == 1:
                    found[want.name] = size - want.more
            elif size != expected:
                return False
        if named and sizes.get(self._star, shape[:lead]) != tuple(shape[:lead]):
            return False
        sizes.update(found)
        return True

    def text(self, sizes: Mapping[str, Any]) -> str:
        """The sizes for a message: those that are known, "any" or "1 or more" for the others."""
        known = [str(size) for size in sizes[self._star]] if self._star in sizes else []
        for size in self.sizes:
            value = size.value(sizes)
            unknown = "1 or more" if size.some else "any"
            known.append(str(value) if value or (value == 0 and not size.some) else unknown)
        return ", ".join(["...", *known] if self._star and self._star not in sizes else known)


class Arg:
    """A tensor that an operation takes.

    Args:
        name: for messages.
        shape: sizes, see :class:`Shape`.
        dtypes: those that are allowed; none: any.
        like: the name of a tensor before it that has the same dtype, if it is there.
        on: where it lies: names of tensors on the same device, or "cpu". Default: as the
            operation says; empty: anywhere.
        optional: whether it may be None.
        written: whether the operation writes to it.
        layout: what implementations need: dense "rows", "all" dense, or "any", if each follows the
            strides or checks them itself. Other tensors are copied for a native kernel, and refused
            if the operation writes to them.
    """

    def __init__(
        self,
        name: str,
        shape: str,
        *dtypes: torch.dtype,
        like: str = "",
        on: tuple[str, ...] | None = None,
        optional: bool = False,
        written: bool = False,
        layout: Literal["rows", "all", "any"] = "rows",
    ) -> None:
        self.name = name
        self.shape = Shape(shape)
        self.dtypes = dtypes
        self.like = like
        self.on = on
        self.optional = optional
        self.written = written
        self.layout = layout

    def check(
        self, tensor: Tensor, known: Mapping[str, Tensor | None], sizes: Sizes, place: str
    ) -> None:
        """Raise ``KernelError`` unless the tensor fits; adds the sizes that it names.

        Args:
            tensor: the tensor.
            known: the operation's tensors by name.
            sizes: of the tensors before it.
            place: the tensor on whose device it is unless its declaration says otherwise.
        """
        same = known.get(self.like)
        dtypes = self.dtypes if same is None else (same.dtype,)
        if dtypes and tensor.dtype not in dtypes:
            listed = ", ".join(map(str, dtypes))
            expected = listed if len(dtypes) == 1 else f"one of {listed}"
            raise KernelError(f"{self.name}: got dtype {tensor.dtype}, expected {expected}")
        if not self.shape.fits(tensor.shape, sizes):
            raise KernelError(
                f"{self.name}: got shape {list(tensor.shape)}, expected [{self.shape.text(sizes)}]"
            )
        names = (place,) if self.on is None else self.on
        tensors = [known[name] for name in names if name != "cpu"]
        allowed = [x.device for x in tensors if x is not None]
        if len(tensors) < len(names):
            allowed.append(torch.device("cpu"))
        if allowed and tensor.device not in allowed:
            expected = " or ".join(dict.fromkeys(map(str, allowed)))
            raise KernelError(f"{self.name}: got device {tensor.device}, expected {expected}")
        if not self.written or self.layout == "any" or tensor.is_contiguous():
            return
        if self.layout == "all" or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            dense = "a contiguous tensor" if self.layout == "all" else "1 in the last dimension"
            raise KernelError(f"{self.name}: got strides {list(tensor.stride())}, expected {dense}")


class Result(NamedTuple):
    """A tensor that a native kernel writes its result to; the caller allocates nothing."""

    dtype: torch.dtype
    shape: str  # sizes, see :class:`Shape`


def check_all(
    arguments: Sequence[Arg], tensors: Sequence[Tensor | None], sizes: Sizes, place: str
) -> dict[str, Tensor | None]:
    """Check tensors against their declarations, in order; adds the sizes that they name.

    Returns:
        the tensors by name.

    Raises:
        KernelError: a tensor that is not optional is None, or :meth:`Arg.check` refuses one.
    """
    known = {x.name: tensor for x, tensor in zip(arguments, tensors, strict=True)}
    for argument in arguments:
        tensor = known[argument.name]
        if tensor is not None:
            argument.check(tensor, known, sizes, place)
        elif not argument.optional:
            raise KernelError(f"{argument.name}: got None, expected a tensor")
    return known


def verify_indices(name: str, index: Tensor, low: int, size: int) -> None:
    """Raise ``KernelError`` unless ``low <= index < size``.

    On a GPU no kernel of this package follows an index or a length out of a tensor. Where it would
    write, it leaves such an entry, or a whole row, as it is; to score and to attend, it takes the
    nearest page or length. It reports nothing, because a report would wait for the device. The
    ``verify_`` functions wait. They run when the configuration says ``checked: true``.

    Args:
        name: of the tensor, for the message.
        index: any shape, any integer dtype.
        low: -1 where -1 stands for "none", else 0.
        size: of the dimension that ``index`` points into.
    """
    if index.numel() == 0:
        return
    smallest, largest = int(index.min()), int(index.max())
    if smallest < low or largest >= size:
        got = smallest if smallest < low else largest
        raise KernelError(f"{name}: got {got}, expected {low} to {size - 1}")


def check_divides(name: str, heads: int, query_heads: int) -> None:
    """Raise ``KernelError`` unless a tensor's KV heads divide the query heads."""
    if heads == 0 or query_heads % heads:
        raise KernelError(
            f"{name}: got {heads} heads, expected a divisor of the {query_heads} query heads"
        )
