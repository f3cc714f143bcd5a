"""Calls of algorithms and extensions: an error names the part, the layer, and what was expected."""

from collections.abc import Callable
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hisparse.algorithms import BaseSparseAlgorithm, DecodeStep, PrefillStep
from hisparse.cache import check_selection
from hisparse.errors import AlgorithmError, ConfigError, HiSparseError, explain
from hisparse.types import Selection

P = ParamSpec("P")
R = TypeVar("R")


def named(part: object, method: str, layer_id: int | None = None) -> str:
    """The method, for a message: ``"KNorm (hisparse_knorm), layer 3, retrieve_topk"``."""
    cls = type(part)
    where = "" if layer_id is None else f", layer {layer_id}"
    return f"{cls.__name__} ({cls.__module__}){where}, {method}"


def call(method: Callable[P, R], layer_id: int | None, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a method of an algorithm or an extension.

    Args:
        method: bound to the algorithm or extension.
        layer_id: layer number; None: the call is not one of a layer.
        args, kwargs: the method's arguments.

    Raises:
        AlgorithmError: the method raised an exception, which is the cause of the error.
        ConfigError: the method refused a setting.
    """
    try:
        return method(*args, **kwargs)
    except (AlgorithmError, ConfigError, torch.AcceleratorError):
        # A fault of the device need not come from this method.
        raise
    except Exception as error:
        owner: object = getattr(method, "__self__", None)
        name = named(owner, getattr(method, "__name__", "call"), layer_id)
        raise AlgorithmError(
            f"{name}: got {explain(error, type(owner))}, expected no exception"
        ) from error


def retrieve(
    algorithm: BaseSparseAlgorithm,
    layer_id: int,
    queries: Tensor,
    step: DecodeStep,
    invalid: Tensor | None,
) -> Selection:
    """The algorithm's selection for the queries of a step.

    Args:
        algorithm: selects.
        queries: ``[B, Hq, D]``, model's dtype, before the softmax scale.
        invalid: ``[1] int64``, counter of selections with a score that is NaN or +inf. It is read,
            which waits for the device; None: it is not.

    Raises:
        AlgorithmError: ``retrieve_topk`` raised an exception, the selection has another type, shape
            or dtype, or a score is NaN or +inf.
    """
    before = 0 if invalid is None else int(invalid)
    returned = call(algorithm.retrieve_topk, layer_id, queries, layer_id, step)
    selection = require_selection(returned, algorithm, "retrieve_topk", layer_id, step)
    count = 0 if invalid is None else int(invalid) - before
    if count:
        raise AlgorithmError(
            f"{named(algorithm, 'retrieve_topk', layer_id)}: got NaN or +inf among the scores of "
            f"{count} of {selection.lengths.numel()} selections, expected numbers or -inf"
        )
    return selection


def require_selection(
    selection: object, part: object, method: str, layer_id: int, step: DecodeStep
) -> Selection:
    """A selection of the right type, shapes and dtypes; nothing is read from the device.

    Args:
        selection: what ``method`` of ``part``, an algorithm or an extension, returned.
        part, method, layer_id: for the message.

    Raises:
        AlgorithmError: the selection has another type, shape or dtype.
    """
    batch, policy = step.slots.shape[0], step.policy
    if type(selection) is Selection:
        pages, lengths = map(_int32_shape, selection)
        rows = (batch, policy.heads)
        if pages and pages[:-1] == lengths == rows and pages[-1] <= policy.max_pages:
            return selection
    shape_text = f"[{batch}, {policy.heads}"
    raise AlgorithmError(
        f"{named(part, method, layer_id)}: got {_described(selection)}, expected Selection(pages "
        f"{shape_text}, K] int32 with K at most {policy.max_pages}, lengths {shape_text}] int32)"
    )


def check_positions(
    positions: object, algorithm: BaseSparseAlgorithm, layer_id: int, step: PrefillStep
) -> None:
    """Raise AlgorithmError unless ``select_prefill`` returned None or what its docstring says.

    A query's positions are at most the ``prefill_choices`` that the memory was sized for.
    """
    if positions is None:
        return
    most = call(algorithm.prefill_choices, layer_id, step.policy)
    shape = _int32_shape(positions) or ()
    rows = [(step.length,), (step.length, step.policy.kv.num_kv_heads)]
    if shape[:-1] in rows and prod(shape[1:]) <= most:
        return
    raise AlgorithmError(
        f"{named(algorithm, 'select_prefill', layer_id)}: got {_described(positions)}, expected "
        f"positions [{step.length}, K] int32 with K at most {most} (prefill_choices), the same for "
        "each KV head, or None"
    )


def blame(
    error: Exception,
    layer_id: int,
    selection: Selection | None,
    step: DecodeStep,
    algorithm: object,
) -> None:
    """Raise the error of a selection that could not be attended, if the selection is wrong.

    A CUDA graph that is being captured does not allow to read the selection.

    Args:
        selection: the selection; None: every page was attended.
        step: the requests that attend.
        algorithm: selected the pages.

    Raises:
        AlgorithmError: the selection is wrong.
    """
    if selection is None:
        return
    if selection.pages.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    try:
        check_selection(layer_id, selection, step)
    except HiSparseError as wrong:
        cls = type(algorithm)
        raise AlgorithmError(f"{cls.__name__} ({cls.__module__}), {wrong}") from error


def _int32_shape(value: object) -> tuple[int, ...] | None:
    """The shape of an int32 tensor that a method returned; None: it returned something else."""
    return value.shape if isinstance(value, Tensor) and value.dtype == torch.int32 else None


def _described(value: Any) -> str:
    """Type, or shape and dtype, of what a method returned."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        name = "" if type(value) is tuple else type(value).__name__
        return f"{name}({', '.join(map(_described, value))})"
    return "None" if value is None else type(value).__name__
