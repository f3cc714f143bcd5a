"""One layer of a decode step: append, score, select, diff_tables, gather, attend.

These are its six operations, in order. The algorithm scores and selects (``retrieve_topk``); its
kernel that scores may append too (``appends``). ``loader.swap_in`` finds the missing pages
(``diff_tables``) and loads them (``gather_pages``), or leaves them to the CPU to attend, and to
``loader.load_aside``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hisparse.adapters import Attended, merge_attended
from hisparse.algorithms import DecodeStep
from hisparse.algorithms.step import AttentionMode
from hisparse.engine.contract import blame, call, require_selection, retrieve
from hisparse.engine.extensions.base import Components, Extension, overriding
from hisparse.engine.host_attention import make_host_attention
from hisparse.engine.recorded import RecordedCalls
from hisparse.engine.representations import ignore
from hisparse.errors import KernelError
from hisparse.kernels import DiffTables, serial_operators
from hisparse.kernels.build.cpu import call_cpu, cpu_library
from hisparse.kernels.operation import ResultMemory, new_tensors
from hisparse.types import IndexerInputs, PagedKV, Selection

#: ``(layer_id, queries [B, Hq, D], step, selection)``, called after every selection.
SelectionObserver = Callable[[int, Tensor, DecodeStep, Selection], None]


class DecodeLayer:
    """Runs the layers of decode steps.

    Args:
        extensions: in the order of their hooks.

    Attributes:
        observer: called after every selection, or None.
        recordable: layers whose kernel calls are recorded, and then made again as one call.
    """

    def __init__(self, components: Components, extensions: Sequence[Extension]) -> None:
        self._policy = components.policy
        self._algorithm = components.algorithm
        self._manager = components.manager
        self._adapter = components.adapter
        attend_with = self._manager.device.format.attend_with
        self._attend_pages = attend_with(self._adapter, self._policy.max_pages)
        self._modes = components.modes
        self._gather_queries = components.gather_queries
        # A dense context that a captured step serves fits its row.
        self._dense_width = min(self._modes.dense_width, self._manager.device.max_row_pages)
        self._host = make_host_attention(components.config, self._manager, self._policy)
        self._before_layer = overriding("before_layer", extensions)
        self._refining = overriding("refine_selection", extensions)
        self._after_selection = overriding("after_selection", extensions)
        self._after_attention = overriding("after_attention", extensions)
        by_layer = components.representations.by_layer
        self._update = by_layer(self._algorithm.update_representations, ignore)
        # Queries of all ranks are more than those that the algorithm knows of.
        self._appends = self._gather_queries is None and self._algorithm.appends(self._policy)
        self._storing = by_layer(overriding("store_pages", extensions), (), selecting=False)
        self._update_indexer = by_layer(self._algorithm.update_indexer, None)
        self._serial = serial_operators(self._manager.device.device)
        self._results = ResultMemory()
        self.recordable = self._recordable_layers()
        copied = self._manager.host.format.copied_parts(self._manager.device.stored(0))
        #: Layers whose :meth:`_finish` is recorded too: PyTorch decodes none of their pages.
        self._finishable = {x for x in self.recordable if copied and not self._storing[x]}
        state = components.representations.tensors.values()
        lasting = (*self._manager.tensors, *state) if self.recordable else ()
        self._recorded = RecordedCalls(lasting)
        self.observer: SelectionObserver | None = None

    def _recordable_layers(self) -> set[int]:
        """The layers that :meth:`_run_recorded` tries: no hook sees what they compute."""
        manager, modes = self._manager, self._modes
        hooks = (self._before_layer, self._refining, self._after_selection, self._after_attention)
        native = manager.device.device.type == "cpu" and cpu_library() is not None
        seen = manager.checked or self._host or self._gather_queries or any(hooks)
        # PyTorch alone writes outputs of other dtypes.
        written = self._policy.kv.dtype in (torch.float32, torch.bfloat16)
        if seen or not (native and written and self._algorithm.recordable):
            return set()
        layers = range(self._policy.kv.num_layers)
        return {x for x in layers if modes.selects(x) and modes.attended_by(x) == 1}

    def run(
        self,
        step: DecodeStep,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``q [B, Hq, D]``, ``k, v [B, Hkv, D]``, model's dtype -> ``[B, Hq, Dv]``, dtype of q.

        ``sinks [Hq]``, any float dtype: see :meth:`SparseCoordinator.attention`.
        """
        update = self._update_indexer[layer_id]
        if indexer is not None and update is not None:
            step.use_indexer(call(update, layer_id, indexer, layer_id, step))
        memory, out = step.cache.once("results", self._results.begin_step), None
        if layer_id in self.recordable and self.observer is None and sinks is None:
            out = self._run_recorded(step, layer_id, q, k, v)
        recorded = out is not None and layer_id in self._finishable
        if out is None:
            with memory:
                out = self._append_and_attend(step, layer_id, q, k, v, sinks)
        last = step.last or step
        if last.filled is not None:
            finish = partial(self._finish, layer_id, last, *last.filled)
            with memory:
                if recorded:
                    key, rows = ("finish", layer_id), last.rows
                    inputs = *last.filled, rows.rows, rows.num_pages, rows.capacity
                    # Kernels could refuse a host page out of range alone, which nobody allocates.
                    again = self._recorded.again(key, inputs)
                    if again is None and not self._recorded.record(key, inputs, finish):
                        self._finishable.clear()
                elif step.captured and not self._algorithm.indexer:
                    # Beside the model's next kernels; an indexer's inputs would be freed too early.
                    self._manager.aside.start(finish)
                else:
                    finish()
        return out

    def _append_and_attend(
        self,
        step: DecodeStep,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        # A token attends on the device what the one before it loads.
        waits = self._host is None or not self._host.serves(step) or step.last is not None
        with self._serial:
            self._manager.loader.finish_loading(layer_id)
            if self._before_layer and "sparse" in step.by_mode:
                for extension in self._before_layer:
                    call(extension.before_layer, layer_id, layer_id, step.by_mode["sparse"])
            by_mode = self._modes.of_layer(layer_id, step)
            scored = by_mode.get("sparse") if self._modes.selects(layer_id) else None
            if self._appends and scored is not None and scored.index is None and step.last is None:
                scored.cache.new_tokens = PagedKV(k, v)  # For the algorithm's kernel.
            else:
                self._append(layer_id, step, k, v)
        if len(by_mode) == 1:
            ((mode, part),) = by_mode.items()
            return self._attend_in(mode, layer_id, part, q, sinks, waits)
        shape = (*q.shape[:-1], self._policy.kv.v_head_dim)
        (out,) = new_tensors("modes", [(shape, q.dtype)], q.device)
        for mode, part in by_mode.items():
            assert part.index is not None, "one of several modes"
            shape = (len(part.slots), *q.shape[1:])
            (own,) = new_tensors(f"queries {mode}", [(shape, q.dtype)], q.device)
            torch.index_select(q, 0, part.index, out=own)
            own = self._attend_in(mode, layer_id, part, own, sinks, waits)
            out.index_copy_(0, part.index, own)
        return out

    def _append(self, layer_id: int, step: DecodeStep, k: Tensor, v: Tensor) -> None:
        slots = step.tail_slots(layer_id)
        self._manager.kv_io.append(layer_id, slots, step.host_slots, k, v)

    def _run_recorded(
        self, step: DecodeStep, layer_id: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor | None:
        """:meth:`run` by the kernel calls of an earlier step, or record those of this one.

        So a layer is one native call. It can be if kernels alone compute: as in a CUDA graph, what
        tensors hold decides nothing in Python. None: the layer is not recorded.
        """
        tensors = step.cache.once("recorded", partial(self._begin_recorded, step))
        if tensors is None:
            return None
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # Else kernels need copies.
        shape = (*q.shape[:-1], self._policy.kv.v_head_dim)
        (out,) = self._results.take(("recorded", shape, q.dtype), lambda: [q.new_empty(shape)])
        inputs = (out, q, k, v, *tensors)
        part = step.by_mode["sparse"]
        try:
            calls = self._recorded.again(layer_id, inputs)
        except KernelError as error:
            # If it is the algorithm's, this raises it with its name and the layer's.
            blame(error, layer_id, self._retrieve(layer_id, q, part), part, self._algorithm)
            raise
        if calls is not None:
            self._count_capped(layer_id, part, calls.kept)
            return out

        def compute() -> Tensor | None:
            with self._serial:
                self._append(layer_id, step, k, v)
            (attended,) = self._attended("sparse", layer_id, part, q, True)
            call_cpu("write_output", attended.out.float().contiguous(), out)
            return self._lengths(part)

        if not self._recorded.record(layer_id, inputs, compute):
            self.recordable.clear()  # Layers are alike.
        self._count_capped(layer_id, part, self._lengths(part))
        return out

    def _begin_recorded(self, step: DecodeStep) -> tuple[Tensor, ...] | None:
        """What kernels read of a step whose layers are recorded; None: they are not."""
        part = step.by_mode.get("sparse")
        if part is None or len(step.by_mode) > 1 or step.last is not None:
            return None
        if part.captured or part.follows or part.dense is not None:
            return None
        if not self._recorded.begin_step((len(part.slots), part.max_pages)):
            return None
        own = (part.slots, part.tail_lens, part.host_slots, part.forced_pages)
        return step.slots_of_layers, *own, *part.rows[:7]

    def _attend_in(
        self,
        mode: AttentionMode,
        layer_id: int,
        step: DecodeStep,
        q: Tensor,
        sinks: Tensor | None,
        waits: bool,
    ) -> Tensor:
        """Attention of the requests in one mode: ``q [B, Hq, D]`` -> ``[B, Hq, Dv]``."""
        if mode == "streamed":
            attend = self._attend_streamed
            if self._host is not None and self._host.attends_contexts:
                attend = self._host.attend_contexts
            return attend(layer_id, q, step, sinks).to(q.dtype)
        heads = q.shape[0], self._policy.kv.num_q_heads
        parts = self._attended(mode, layer_id, step, q, waits)
        if mode == "sparse" and self._modes.selects(layer_id):
            self._count_capped(layer_id, step, self._lengths(step))
        by_head = (Attended(x.out.reshape(*heads, -1), x.lse.reshape(heads)) for x in parts)
        return merge_attended(*by_head, sinks=sinks, dtype=q.dtype).out

    def _attended(
        self, mode: AttentionMode, layer_id: int, step: DecodeStep, q: Tensor, waits: bool
    ) -> Sequence[Attended]:
        """Select, load, and attend ``q [B, Hq, D]``; one or two parts, a row a query group."""
        sparse = mode == "sparse"
        if sparse and self._modes.selects(layer_id):
            step.cache.selection = None  # Frees its memory for the next one.
            step.cache.selection = self._retrieve(layer_id, q, step)  # score, select
        selection = self.selection_of(mode, layer_id, step)
        queries = q.reshape(-1, self._policy.kv.num_q_heads // self._policy.heads, q.shape[-1])
        with self._serial:
            try:
                tables = self._manager.loader.swap_in(  # diff_tables, gather
                    layer_id,
                    step,
                    selection,
                    width=None if step.dense is None else self._dense_width,
                    tail_below=self._policy.tail_below if sparse else None,
                    waits=waits or not sparse,
                )
                parts = self._attend(layer_id, queries, tables)
            except Exception as error:
                blame(error, layer_id, selection, step, self._algorithm)
                raise
        if not (sparse and self._after_attention):
            return parts
        assert selection is not None, "the first layer of a group selects"
        attended = merge_attended(*parts)
        for extension in self._after_attention:
            attended = call(
                extension.after_attention,
                layer_id, layer_id, queries, selection, step, attended,
            )  # fmt: skip
        return [attended]

    def _attend(self, layer_id: int, queries: Tensor, tables: DiffTables) -> Sequence[Attended]:
        """Attend ``queries [R, Q, D]`` on the device; the CPU attends what is away, if any."""
        stored, rule = self._manager.device.stored(layer_id), self._policy.layer_rules[layer_id]
        away = None
        if self._host is not None and tables.away is not None:
            away = self._host.start(layer_id, queries, tables, rule)
            # After that on the side stream: the next step needs it, this one needs the attention.
            self._manager.loader.load_aside(layer_id, tables)
        attended = self._attend_pages(queries, stored, tables.attended, tables.seq_lens, rule)
        return [attended] if away is None else [attended, away.join()]

    def raise_host_error(self) -> None:
        """Raise what went wrong where the CPU attended pages in earlier steps, if anything did."""
        if self._host is not None:
            self._host.raise_error()

    def selection_of(
        self, mode: AttentionMode, layer_id: int, step: DecodeStep
    ) -> Selection | None:
        """The pages that the requests in one mode attend in a layer, or None for every page."""
        if mode == "window":
            window = self._policy.kv.window(layer_id)
            return step.cache.once(f"window {window}", lambda: step.window_pages(window))
        return step.cache.selection if mode == "sparse" else None

    def _retrieve(self, layer_id: int, q: Tensor, step: DecodeStep) -> Selection:
        """Let the algorithm score and select for ``q [B, Hq, D]``, and extensions refine that."""
        invalid = self._manager.counters.total("invalid_scores") if self._manager.checked else None
        queries = q if self._gather_queries is None else self._gather_queries(q)
        selection = retrieve(self._algorithm, layer_id, queries, step, invalid)
        self._manager.kv_io.append_new(layer_id, step)
        for extension in self._refining:
            refined = call(extension.refine_selection, layer_id, layer_id, q, selection, step)
            selection = require_selection(refined, extension, "refine_selection", layer_id, step)
        for extension in self._after_selection:
            call(extension.after_selection, layer_id, layer_id, selection, step)
        if self.observer is not None:
            self.observer(layer_id, q, step, selection)
        if step.dense is None or not (self._before_layer or self._after_attention):
            return selection
        # These hooks see what dense requests attend.
        return _all_where(step.dense, selection, step.every_page(self._dense_width))

    def _count_capped(self, layer_id: int, step: DecodeStep, lengths: Tensor | None) -> None:
        """Count selections of ``lengths`` that ``max_pages`` cut short."""
        if lengths is None:
            return

        def begin() -> tuple[Tensor, Tensor]:
            longer = step.num_pages[:, None] > self._policy.max_pages
            if step.dense is not None:
                longer &= ~step.dense[:, None]
            capped = longer.new_zeros(self._policy.kv.num_layers, *lengths.shape)
            self._manager.counters.count("capped_selections", capped)
            return longer, capped

        longer, capped = step.cache.once("capped", begin)
        torch.eq(lengths, self._policy.max_pages, out=capped[layer_id]).logical_and_(longer)

    def _lengths(self, step: DecodeStep) -> Tensor | None:
        """``[B, H] int32``, of the last selection; None if all are alike."""
        selection = step.cache.selection if self._policy.variable_lengths else None
        return selection and selection.lengths

    def _finish(self, layer_id: int, step: DecodeStep, filled: Tensor, host_pages: Tensor) -> None:
        """Move full tail pages into the LRU, and store their representations.

        Args:
            step: the last token of each request.
            filled, host_pages: see :attr:`DecodeStep.filled`.
        """
        storing, kv_io = self._storing[layer_id], self._manager.kv_io
        with self._serial:
            tails = kv_io.promote_tails(layer_id, step, filled, with_values=bool(storing))
            keys, values = tails[0].transpose(1, 2), tails[-1].transpose(1, 2)
            call(self._update[layer_id], layer_id, keys, layer_id, host_pages, step)
            for extension in storing:
                call(extension.store_pages, layer_id, layer_id, keys, values, host_pages)

    def _attend_streamed(
        self, layer_id: int, q: Tensor, step: DecodeStep, sinks: Tensor | None
    ) -> Tensor:
        """Attend ``q [B, Hq, D]`` over contexts that do not fit -> ``[B, Hq, Dv] float32``.

        Host pages stream through staging, and the tiles merge by log-sum-exp. Requests run one by
        one: the tiles, hence the order of summation, depend on one request.
        """
        kv, manager = self._policy.kv, self._manager
        out = q.new_empty(*q.shape[:-1], kv.v_head_dim, dtype=torch.float32)
        for request, length in enumerate(step.seq_lens_cpu.tolist()):
            attended: Attended | None = None
            one = slice(request, request + 1)
            for tile in manager.staging.tiles(step.host_page_table[request], length):
                pages, count = manager.staging.read(layer_id, tile), tile.host_pages.numel()
                table = torch.arange(count, dtype=torch.int32, device=q.device)[None]
                lens = torch.full_like(table[:, 0], tile.end - tile.first * kv.page_size)
                num_bytes = count * kv.page_size * manager.host.format.layer_token_bytes
                manager.counters.add("streamed_decode_bytes", num_bytes)
                new = self._adapter.attend(q[one], pages, table, lens, self._policy.attention_rule)
                attended = new if attended is None else merge_attended(attended, new)
            assert attended is not None, "a context has a token"
            out[one] = merge_attended(attended, sinks=sinks).out
        return out


def _all_where(dense: Tensor, selection: Selection, everything: Selection) -> Selection:
    """Replace ``selection`` by ``everything`` for the requests ``dense [B] bool``."""
    missing = everything.pages.shape[-1] - selection.pages.shape[-1]
    pages = torch.nn.functional.pad(selection.pages, (0, missing), value=-1)
    return Selection(
        torch.where(dense[:, None, None], everything.pages, pages),
        torch.where(dense[:, None], everything.lengths, selection.lengths),
    )
