"""Choose the questions of hisparse/eval/texts/questions.json from candidates with a dense model.

    python scripts/curate_questions.py CANDIDATES.json [--model qwen2.5-coder-0.5b] > KEPT.json

Both files map names of texts to lists of questions ``{evidence, prompt, answer}``. In the
candidates, evidence is any part of the text that occurs once; it is widened to whole sentences. A
question is kept if the model predicts every token of its answer after a stretch of the text with
the evidence, and does not after the prompt alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hisparse.eval.models import resolve
from hisparse.eval.texts import read_text

STRETCH = 4096
#: Adjacent stretches overlap by a tenth: evidence there belongs to the second one, if there is one.
STRIDE = STRETCH - STRETCH // 10
BREAK = re.compile(r"(?<=[.!?;]) (?=\S)|\n\n")


def widen(text: str, part: str) -> tuple[int, int]:
    """Start and end of the sentences that contain ``part``."""
    if text.count(part) != 1:
        raise SystemExit(f"{part!r} occurs {text.count(part)} times in the text, expected once")
    first = text.index(part)
    breaks = [(0, 0), *(m.span() for m in BREAK.finditer(text)), (len(text.rstrip()), len(text))]
    begin = max(end for _, end in breaks if end <= first)
    return begin, min(start for start, _ in breaks if start >= first + len(part))


@torch.no_grad()
def is_correct(model: Any, tokenizer: Any, cache: DynamicCache, question: dict[str, str]) -> bool:
    """Whether every token of the answer is the most likely one; leaves the cache unchanged."""
    prompt = question["prompt"]
    ids = tokenizer(prompt + question["answer"], add_special_tokens=False).input_ids
    given = tokenizer(prompt, add_special_tokens=False).input_ids
    if ids[: len(given)] != given:
        raise SystemExit(f"{prompt!r}: the answer changes the prompt's tokens")
    length = cache.get_seq_length()
    logits = model(torch.tensor([ids]), past_key_values=cache).logits[0]
    cache.crop(length - cache.get_seq_length())
    return logits[len(given) - 1 : -1].argmax(-1).tolist() == ids[len(given) :]


@torch.no_grad()
def score_questions(model: Any, tokenizer: Any, text: str, questions: list[dict[str, Any]]) -> None:
    """Add to each question whether its answer is correct ``with`` and ``without`` the text."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded.input_ids, encoded.offset_mapping
    for question in questions:
        question["place"] = widen(text, question["evidence"])
        question["evidence"] = text[slice(*question["place"])]
        question["without"] = is_correct(model, tokenizer, DynamicCache(), question)
    waiting = list(questions)
    for first in range(0, len(ids), STRIDE):
        last = first + STRETCH >= len(ids)
        first = max(0, len(ids) - STRETCH) if last else first
        begin, end = offsets[first][0], offsets[-1 if last else first + STRIDE - 1][1]
        asked = [q for q in waiting if begin <= q["place"][0] and q["place"][1] <= end]
        cache = DynamicCache()
        if asked:
            stretch = torch.tensor([ids[first : first + STRETCH]])
            model(stretch, past_key_values=cache, logits_to_keep=1)
        for question in asked:
            question["with"] = is_correct(model, tokenizer, cache, question)
        waiting = [q for q in waiting if "with" not in q]


def main() -> None:
    """Write the questions to keep to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("candidates", type=Path)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    arguments = parser.parse_args()
    folder = resolve(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kept = {}
    for name, questions in json.loads(arguments.candidates.read_text("utf-8")).items():
        score_questions(model, tokenizer, read_text(name), questions)
        questions.sort(key=lambda q: q["place"])
        good = [q for q in questions if q.get("with") and not q["without"]]
        kept[name] = [{k: q[k] for k in ("evidence", "prompt", "answer")} for q in good]
        print(f"{name}: {len(good)} of {len(questions)} kept", file=sys.stderr, flush=True)
    print(json.dumps(kept, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
