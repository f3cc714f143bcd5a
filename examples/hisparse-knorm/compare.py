"""How far algorithms are from dense attention: python compare.py MODEL ALGORITHM..."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hisparse.demo.document import text
from hisparse.models import resolve
from hisparse.transformers import HiSparseCache, disable, enable

PROMPT, STEPS, BUDGET = 1200, 48, 128

folder = resolve(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder).eval()
ids = AutoTokenizer.from_pretrained(folder)(text(), return_tensors="pt").input_ids


@torch.no_grad()
def log_probs(cache: HiSparseCache | None = None) -> torch.Tensor:
    """``[STEPS, vocabulary]``: the prompt in one forward, then the text's own next tokens."""
    cache = model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1).past_key_values
    steps = range(PROMPT, PROMPT + STEPS)
    logits = [model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1] for i in steps]
    return torch.stack(logits).log_softmax(-1)


dense = log_probs()
print(f"{STEPS} tokens after {PROMPT}, budget {BUDGET}: divergence from dense, nats per token")
for name in sys.argv[2:]:
    found = log_probs(enable(model, algorithm=name, budget=BUDGET, max_length=PROMPT + STEPS))
    disable(model)
    print(f"{name:10} {(dense.exp() * (dense - found)).sum(-1).mean():.3f}")
