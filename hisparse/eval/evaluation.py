"""Runs methods on documents, scores every token by teacher forcing, and writes records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.algorithms import build_algorithm, entry_bytes
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.build import choose_selection
from hisparse.engine.capabilities import choose_scope
from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse.eval.documents import (
    CONTINUE,
    LONG_TASKS,
    SINGLE_TASKS,
    Document,
    Item,
    make_document,
)
from hisparse.eval.method import DENSE, Method
from hisparse.eval.results import ItemLine, RecordKey, Records
from hisparse.eval.selection_stats import SelectionStats
from hisparse.eval.texts import TEXTS, read_text
from hisparse.memory.host import free_host_memory
from hisparse.model_config import read_model_shape

#: Fraction of free memory for the device pages of all rows.
_FREE_FRACTION = 0.25


def with_smallest_buffer(model: Any, config: HiSparseConfig) -> HiSparseConfig:
    """The configuration with the fewest device pages that give the same selections."""
    smallest = build_algorithm(config).attended_tokens(config.budget, config.min_row_tokens)
    spec, _ = read_model_shape(model, config.page_size)
    window = -(-spec.widest_window // spec.page_size) * spec.page_size
    tokens = max(smallest, window)
    return replace(config, device_buffer_size=tokens, max_row_capacity=tokens)


def bytes_per_token(model: Any, config: HiSparseConfig) -> float:
    """Device bytes of a token's part of its page's representations, in all layers."""
    spec, scale = read_model_shape(model, config.page_size)
    device = torch.device(getattr(model, "device", "cpu")).type
    _, policy, kinds = choose_selection(config, spec, scale, device)
    return entry_bytes(kinds, "page", kv=policy.kv) / config.page_size


def rows_that_fit(model: Any, config: HiSparseConfig) -> int:
    """How many rows' device pages fit into memory, at least 1."""
    spec, _ = read_model_shape(model, config.page_size)
    heads = spec.selection_heads(choose_scope(config, format_of(spec)))
    # With a selection per query head, each query head has its own copy of its KV head's pages.
    copies = max(1, heads // spec.num_kv_heads)
    row_bytes = config.min_row_tokens * format_of(spec).token_bytes * copies
    device = torch.device(getattr(model, "device", "cpu"))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    return max(1, int(_FREE_FRACTION * free) // row_bytes)


def check_context(model: Any, length: int) -> None:
    """Check that a model takes ``length`` tokens; raise ``ConfigError`` if it does not."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(f"context: got {length} tokens, expected at most the model's {longest}")


def make_folder(model: Any, folder: Path) -> Path:
    """Make the folder of a model's records: ``folder`` with dtype and a digest of the weights."""
    from hisparse.transformers.fingerprint import model_fingerprint

    dtype = str(model.dtype).removeprefix("torch.")
    made = folder.with_name(f"{folder.name}-{dtype}-{model_fingerprint(model)}")
    try:
        made.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: cannot make {str(made)!r}: {error.strerror}; expected a folder"
        ) from None
    return made


@torch.no_grad()
def prefill(
    model: Any, config: HiSparseConfig, folder: Path, prompts: Iterable[Tensor], **sizes: Any
) -> Iterator[tuple[Any, Tensor]]:
    """Read prompts. The store in ``folder`` provides the prefixes it has, and gets the others.

    Args:
        model: a transformers model with hisparse enabled.
        folder: of the store.
        prompts: ``[n] int64`` each; one is read when the caller asks for it.
        sizes: of :class:`~hisparse.transformers.HiSparseCache`.

    Yields:
        A cache of one row for each prompt, all in one host pool, and the logits ``[V]`` after it.
    """
    from hisparse.transformers import DB, HiSparseCache

    def read(cache: Any, ids: Tensor) -> tuple[Any, Tensor]:
        ids = ids[None].to(model.device)
        return cache, model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]

    try:
        db = DB(folder, model, config, **sizes)
    except ConfigError:
        # No store may have the pages of this model or algorithm. Wrong sizes fail again here.
        empty = HiSparseCache(model, config, **sizes)
        for ids in prompts:
            yield read(empty.fork(), ids)
        return
    with db:
        for ids in prompts:
            session, rest = db.create_session(ids)
            found = read(session.cache, rest)
            session.store(ids)
            yield found


def decode(model: Any, rows: Any, tokens: Sequence[int]) -> Tensor:
    """Feed a token to each row of a ``HiSparseCache``; the logits ``[B, V]`` of the next ones."""
    ids = torch.tensor(tokens, device=model.device)[:, None]
    positions = torch.tensor(rows.row_lengths, device=model.device)[:, None]
    logits: Tensor = model(ids, position_ids=positions, past_key_values=rows).logits
    return logits[:, -1]


#: Called with a description, the steps done, and the number of steps.
Progress = Callable[[str, int, int], None]


@dataclass(kw_only=True)
class Evaluation:
    """An evaluation; documents and methods with a record in ``folder`` are not run again.

    Attributes:
        model: a transformers model, hisparse not enabled yet.
        tokenizer: the model's tokenizer.
        methods: methods to compare, without dense attention, which always runs.
        contexts: context lengths, tokens.
        seeds: documents for each text and length.
        folder: path prefix of the folder with records and stored contexts; dtype and a digest of
            the weights are appended.
        texts: name to text.
        tasks: a choice of ``documents.TASKS``.
        progress: called before each document and method.
    """

    model: Any
    tokenizer: Any
    methods: Sequence[Method]
    contexts: Sequence[int]
    seeds: int
    folder: Path
    texts: dict[str, str] = field(default_factory=lambda: {n: read_text(n) for n in TEXTS})
    tasks: Sequence[str] = SINGLE_TASKS
    progress: Progress = lambda _description, _done, _total: None

    def run(self) -> list[dict[str, Any]]:
        """Run what has no record yet; return the records of all documents and methods."""
        from hisparse.transformers import disable, enable

        self._folder = make_folder(self.model, self.folder)
        records = Records(self._folder)
        found = records.read()
        wanted = [Method.dense(), *self.methods]
        documents = list(self._documents())
        pairs = [(document, method) for document in documents for method in wanted]
        keys = [RecordKey.of(document.name, method) for document, method in pairs]
        enable(self.model, Method.dense().config, max_length=1024)
        try:
            for done, (key, (document, method)) in enumerate(zip(keys, pairs, strict=True)):
                self.progress(f"{document.name}: {method.name}", done, len(pairs))
                if key not in found:
                    found[key] = key._asdict() | self._record(document, method)
                    records.append(found[key])
        finally:
            disable(self.model)
        self.progress("done", len(pairs), len(pairs))
        return [found[key] for key in keys]

    def _documents(self) -> Iterator[Document]:
        for length in self.contexts:
            check_context(self.model, length)
            for seed in range(self.seeds):
                for name, text in self.texts.items():
                    yield make_document(self.tokenizer, text, name, length, seed, self.tasks)

    def _record(self, document: Document, method: Method) -> dict[str, Any]:
        stats = SelectionStats()
        scores = self._score(document, method, stats)
        continued = torch.stack([x for s in scores for x in s.distributions])
        dense = self._dense(document, method, continued)
        return {
            "context": document.context,
            "algorithm": method.config.algorithm,
            "bytes_per_token": bytes_per_token(self.model, method.config),
            "kl": (dense.exp() * (dense - continued)).sum(-1).tolist(),
            "items": [line for s in scores for line in s.lines()],
            **stats.summary(),
        }

    def _dense(self, document: Document, method: Method, continued: Tensor) -> Tensor:
        """The dense model's distributions ``[T, V]``, from or into their file.

        Args:
            method: the method that runs; dense attention runs first and writes the file.
            continued: the method's own distributions ``[T, V]``.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file

        path = self._folder / f"{document.name}.dense.safetensors"
        try:
            if method.name == DENSE:
                save_file({"log_probs": continued.cpu().contiguous()}, path)
            dense = load_file(path).get("log_probs", torch.empty(0))
        except (OSError, SafetensorError) as error:
            raise HiSparseError(
                f"{str(path)!r}: {one_line(error)}; expected log_probs: if the disk is not full, "
                "delete the folder"
            ) from None
        if dense.shape != continued.shape:
            raise HiSparseError(
                f"{str(path)!r}: got log_probs {list(dense.shape)}, expected "
                f"{list(continued.shape)}; delete the folder"
            )
        return dense.to(continued.device)

    def _score(self, document: Document, method: Method, stats: SelectionStats) -> list[ItemScores]:
        """Scores of all items, and device bytes per token for representations."""
        config = with_smallest_buffer(self.model, method.config)
        rows = min(rows_that_fit(self.model, config), len(document.items))
        # Sorted by start, as score_items requires, then by length, to fill the batches.
        items = sorted(document.items, key=lambda item: (item.start, -len(item.ids)))
        scores: list[ItemScores] = []
        with self._context(document, config, rows) as cache:
            cache.coordinator.observe(stats)
            for start in range(0, len(items), rows):
                stats.start_batch()
                group = items[start : start + rows]
                scores += score_items(self.model, cache, document.ids, group)
        return scores

    def _context(self, document: Document, config: HiSparseConfig, rows: int) -> Any:
        """A cache with the document up to the first item."""
        length = len(document.ids)
        longest = max(len(item.ids) for item in document.items)
        ids = torch.tensor(document.ids[: min(item.start for item in document.items)])
        ((cache, _),) = prefill(
            self.model,
            config,
            self._folder / "contexts",
            [ids],
            max_batch_size=rows + 1,
            max_length=length + longest,
            max_tokens=length + (rows + 1) * (longest + 2 * config.page_size),
        )
        return cache


@dataclass(frozen=True, kw_only=True)
class ItemScores:
    """The model's predictions of the scored tokens of one item, an entry for each.

    Attributes:
        item: the item.
        correct: whether the token is the most likely one.
        log_probs: log-probability of the token.
        distributions: log-probabilities ``[V] float32`` over the vocabulary; empty unless the task
            is ``CONTINUE``.
    """

    item: Item
    correct: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    def lines(self) -> list[ItemLine]:
        """A line of a record for each answer of the item."""
        ends = [at for at, (a, b) in enumerate(pairwise(self.item.scored), 1) if b > a + 1]
        ends = [0, *(ends if self.item.task in LONG_TASKS else []), len(self.correct)]
        return [
            {
                "task": self.item.task,
                "right": all(self.correct[begin:end]),
                "log_probs": self.log_probs[begin:end],
            }
            for begin, end in pairwise(ends)
        ]


@torch.no_grad()
def score_items(
    model: Any, cache: Any, document: Sequence[int], items: Sequence[Item]
) -> list[ItemScores]:
    """Feed all items token by token, side by side, each after the document up to its start.

    Every token of an item is given, whatever the model predicts (teacher forcing).

    Args:
        model: a transformers model with hisparse enabled.
        cache: ``HiSparseCache`` with one row that holds the document up to the first start or less,
            and with free space for the items. On return it holds the document up to the last start.
        document: token ids of the document.
        items: sorted by start, ascending.

    Returns:
        One entry per item, in the same order.
    """
    rows = _fork_rows(model, cache, document, items)
    found = [ItemScores(item=item) for item in items]
    active = found
    try:
        for step in range(max(len(item.ids) for item in items) - 1):
            # The last token of an item is predicted and never fed; a finished row leaves the batch.
            left = [row for row, x in enumerate(active) if step < len(x.item.ids) - 1]
            if len(left) < len(active):
                rows.batch_select_indices(torch.tensor(left))
                active = [active[row] for row in left]
            scored = [row for row, x in enumerate(active) if step + 1 in x.item.scored]
            with _logits_of(model, scored):
                logits = decode(model, rows, [x.item.ids[step] for x in active])
            for row, log_probs in zip(scored, logits.float().log_softmax(-1), strict=True):
                scores = active[row]
                value = log_probs[scores.item.ids[step + 1]]
                scores.correct.append(bool(value >= log_probs.max()))
                scores.log_probs.append(float(value))
                if scores.item.task == CONTINUE:
                    scores.distributions.append(log_probs)
    finally:
        rows.reset()
    return found


@contextmanager
def _logits_of(model: Any, rows: list[int]) -> Iterator[None]:
    """Compute the logits of these rows only: in a small model they are a quarter of the work."""

    def choose(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][rows],)

    hook = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def _fork_rows(model: Any, cache: Any, document: Sequence[int], items: Sequence[Item]) -> Any:
    """A cache with one row per item, each holding the document up to the item's start."""
    forks = []
    for start, group in groupby(items, key=lambda item: item.start):
        missing = document[cache.get_seq_length() : start]
        if missing:
            ids = torch.tensor([missing], device=model.device)
            model(ids, past_key_values=cache, logits_to_keep=1)
        forks.append(cache.fork(sum(1 for _ in group)))
    return type(cache).join(forks)
