"""Do ``hisparse bench decode``'s steps in turns, for ``scripts/decode_cost.py``.

It imports hisparse from ``PYTHONPATH``. Each line of standard input is a number of steps; the
answer is a line with the seconds of each and a checksum of their outputs.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from hisparse_bench.decode import DecodeBench
from hisparse_bench.options import Options

__all__ = ["main"]


def main(most_steps: int, sizes: dict[str, int]) -> None:
    """Serve turns until standard input ends.

    Args:
        most_steps: steps of all turns together.
        sizes: fields of :class:`DecodeBench`.
    """
    torch.set_num_threads(1)
    options = Options(device=torch.device("cpu"), num_steps=most_steps)
    work, gate = DecodeBench(**sizes).prepared(options, most_steps)
    print(gate, flush=True)
    step = 0
    for line in sys.stdin:
        seconds, total = [], 0.0
        for _ in range(int(line)):
            work.prepare(step)
            start = time.perf_counter()
            out = work.decode(step)
            seconds.append(time.perf_counter() - start)
            total += out.double().sum().item()
            step += 1
        print(json.dumps({"seconds": seconds, "checksum": total}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
