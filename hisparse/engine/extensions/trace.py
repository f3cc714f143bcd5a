"""Trace: record which pages each decode step attends.

The file has the final selection of each layer that selects, for requests beyond the budget: layer,
head, request, sequence length and pages. `hisparse trace` shows and replays it (docs/trace.md).
Steps are written by a thread of their own. If it falls behind, steps are dropped and counted.
"""

import logging
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from hisparse import __version__
from hisparse.algorithms import DecodeStep, Representation, SelectionPolicy
from hisparse.engine.extensions.base import Components, Extension, register_extension
from hisparse.errors import ConfigError
from hisparse.kernels import upload
from hisparse.trace.file import RecordedStep, TraceHeader, TraceWriter
from hisparse.types import Selection
from hisparse.units import MemorySize, parse_memory, resolve_memory

logger = logging.getLogger("hisparse")

_PAGES: Final = "trace.pages"


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Options of the extension.

    Attributes:
        path: the file. If it exists, a number is added to the name, so that other ranks and earlier
            runs keep theirs. In JSON, ``"trace": "FILE"`` is short for this option.
        max_bytes: size at which recording stops. A fraction is of the free space.
        note: text that is kept in the file, such as the name of the model.
    """

    path: str = "hisparse.trace"
    max_bytes: MemorySize = "1GiB"
    note: str = ""

    #: The option that a text sets.
    text_option: ClassVar[str] = "path"

    def __post_init__(self) -> None:
        if not self.path or "\0" in self.path:
            raise ValueError(f"path: got {self.path!r}, expected the name of a file")
        parse_memory("max_bytes", self.max_bytes)


@register_extension("trace")
class Trace(Extension):
    """Copies the selections of a step, and hands them to the writer when it has ended.

    The copies are in a tensor of the engine: a captured step reuses its own, and layers may share
    the memory of their selections.

    Attributes:
        path: the file.
    """

    options_type: ClassVar[type[Any]] = TraceOptions
    needs_all_layers: ClassVar[bool] = True
    counters: ClassVar[Mapping[str, str]] = {
        "trace_steps": "Decode steps that were handed to the writer of the trace",
        "trace_dropped_steps": "Decode steps that the trace lacks: its writer was behind, the "
        "file has reached max_bytes, or the disk failed",
    }

    def __init__(self, options: TraceOptions, context: Components) -> None:
        super().__init__(options, context)
        policy, modes = context.policy, context.modes
        layers = [x for x in range(policy.kv.num_layers) if modes.selects(x)]
        path = Path(options.path).expanduser()
        header = TraceHeader(
            note=options.note,
            algorithm=context.config.algorithm,
            scope=policy.scope,
            page_size=policy.kv.page_size,
            page_bytes=context.manager.device.page_bytes,
            heads=policy.heads,
            max_pages=policy.max_pages,
            layers=tuple(layers),
            attended_by=tuple(map(modes.attended_by, layers)),
            settings=context.config.effective(),
            version=__version__,
            started=datetime.now(UTC).isoformat("T", "seconds"),
        )
        self._writer = TraceWriter(path, header, _max_bytes(options.max_bytes, path))
        # Also runs when the process ends.
        self._close = weakref.finalize(self, self._writer.close)
        self.path = self._writer.path
        self._state = context.state[_PAGES]
        self._by_layer = {layer: self._state[layer] for layer in layers}
        self._layers = None
        # Layers with a window have no entries.
        stored = policy.kv.full_layers
        if len(layers) < len(stored):
            places = [stored.index(layer) for layer in layers]
            self._layers = torch.tensor(places, device=self._state.device)
        # Longer requests do not fit the budget.
        self._most_tokens = (policy.budget_pages + 1) * policy.kv.page_size
        #: Slots and lengths of the requests of a step that are recorded.
        self._step: tuple[np.ndarray, np.ndarray] | None = None
        self._counted_dropped = 0
        logger.info("hisparse: trace of selections: %s", self.path)

    @classmethod
    def state(cls, options: TraceOptions, policy: SelectionPolicy) -> dict[str, Representation]:
        """The pages that each request selected in its last step, padded with -1."""
        shape = (policy.heads, policy.max_pages)
        return {_PAGES: Representation(shape, torch.int32, per="request", saved=False)}

    def before_step(self, slots: np.ndarray, seq_lens: np.ndarray, sparse: np.ndarray) -> None:
        """Remember the requests beyond the budget, ``[B]`` each; others attend all pages."""
        chosen = sparse & (seq_lens > self._most_tokens)
        self._step = slots[chosen], seq_lens[chosen]

    def after_selection(self, layer_id: int, selection: Selection, step: DecodeStep) -> None:
        """Copy the selection."""
        pages = selection.pages
        state, slots, width = self._by_layer[layer_id], step.slots, pages.shape[-1]
        state[..., :width].index_copy_(0, slots, pages)
        if width < state.shape[-1]:
            state[..., width:].index_fill_(0, slots, -1)

    def after_step(self, *, complete: bool) -> None:
        """Hand the step to the writer."""
        step, self._step = self._step, None
        if step is None or not complete or not len(step[0]):
            return
        slots, seq_lens = step
        pages, ready = self._state.index_select(1, upload(slots, self._state.device)), None
        if self._layers is not None:
            pages = pages.index_select(0, self._layers)
        if pages.is_cuda:
            # PyTorch reuses page-locked blocks; this has not run on a GPU yet.
            on_host = torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
            pages = on_host.copy_(pages, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        counters = self.context.manager.counters
        recorded = RecordedStep(slots, seq_lens, pages, ready)
        counters.add("trace_steps", int(self._writer.put(recorded)))
        dropped = self._writer.dropped_steps
        counters.add("trace_dropped_steps", dropped - self._counted_dropped)
        self._counted_dropped = dropped

    def flush(self) -> None:
        """Write the steps that were handed over, and wait for that."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is left, and the end of the file. No step may be running."""
        self.after_step(complete=True)
        self._close()


def _max_bytes(size: MemorySize, path: Path) -> int:
    if not isinstance(size, float):
        return int(parse_memory("trace.max_bytes", size))
    try:
        free = shutil.disk_usage(path.absolute().parent).free
    except OSError as error:
        raise ConfigError(
            f"trace.path: got {str(path)!r}: {error.strerror}; expected a file in a folder that "
            "exists"
        ) from None
    return resolve_memory(size, free, "trace.max_bytes")
