"""Makes what several workers of a test run share, so that they do not make it at the same time:
compiled kernels and models, all of them kept in ``~/.cache/hisparse``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hisparse.eval.models import fetch
from hisparse.kernels.build.cpu import build_cpu
from tests.kernels.fibers.build import fiber_library
from tests.server.tiny_models import KINDS, tiny_model


def main() -> None:
    """Make it."""
    # Compilers run side by side.
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(build_cpu), threads.submit(fiber_library)]
        fetch("smollm2-135m", progress=print)
        for kind in KINDS:
            tiny_model(kind)
        for built in waiting:
            built.result()


if __name__ == "__main__":
    main()
