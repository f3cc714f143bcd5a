"""Times of the instructions of a decode layer's kernels on an H100, from ``kernel_costs.json``.

They are computed, not measured: ``tests/kernels/timing`` runs the compiled machine code of a few
blocks and adds up its latencies and the cycles of its units. ``python -m tests.kernels.timing``
writes the file.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Operations whose work grows with the context.
OF_CONTEXT = frozenset(["sketch_score", "page_score", "select"])
#: Tokens of a page for which times were computed, and a width whose sketches have no known layout.
_PAGE_SIZE, _ANY_LAYOUT = 16, 80


def instructions_us(
    name: str, width: int, pages: float, batch: int, page_size: int = _PAGE_SIZE
) -> float:
    """The time of an operation's instructions, without its memory traffic, with default options.

    It is a straight line between the shapes for which it was computed, and of the nearest width.
    A layout of sketches without a time takes that of the kernel for any layout, by the numbers of a
    page.

    Args:
        name: of the operation.
        width: D, of a key.
        pages: of each request; those that are attended, for ``paged_attention``.
        batch: requests.
        page_size: tokens of a page.
    """
    costs = _read()
    widths = costs["us"][name]
    if name == "sketch_score" and (str(width) not in widths or page_size != _PAGE_SIZE):
        numbers = width * page_size / (_ANY_LAYOUT * _PAGE_SIZE)
        return numbers * instructions_us(name, _ANY_LAYOUT, pages, batch)
    nearest = min(map(int, widths), key=lambda each: abs(each - width))
    short, long, many = widths[str(nearest)]
    (fewer, more), (_, most) = costs["pages"], costs["batches"]
    grown, share = 1.0, 1.0
    if name in OF_CONTEXT:
        grown, share = max(0.0, (pages - fewer) / (more - fewer)), pages / more
    elif name == "paged_attention":
        share = pages * page_size / (costs["attended"] * _PAGE_SIZE)
    us: float = short + (long - short) * grown + (many - long) * share * (batch - 1) / (most - 1)
    return us


def gather_us(missing: float, width: int, batch: int) -> float:
    """As :func:`instructions_us` for ``gather_pages``, of a share of the selected pages."""
    share: float = missing / _read()["misses"]
    return share * instructions_us("gather_pages", width, 0, batch)


@functools.cache
def _read() -> Mapping[str, Any]:
    """``us``: by operation and width, for one request with few ``pages``, one with more, and as
    many requests with more as ``batches`` says. ``attended``: pages that these attend;
    ``misses``: share of them that was loaded.
    """
    path = Path(__file__).with_name("kernel_costs.json")
    found: Mapping[str, Any] = json.loads(path.read_text())
    return found
