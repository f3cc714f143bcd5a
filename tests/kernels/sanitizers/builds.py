"""The CPU kernels built with GCC's sanitizers."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.isa.builds import Build

__all__ = ["ADDRESS", "APART", "BUILDS", "POOL"]

_DEBUG = ("-O1", "-g", "-fno-omit-frame-pointer")
_ADDRESS = (*_DEBUG, "-fsanitize=address,undefined,float-cast-overflow")
# Threads share the smallest calls too. GCC warns of fences, which only the binding's headers have.
_THREAD = (*_DEBUG, "-fsanitize=thread", "-Wno-tsan", "-DHISPARSE_WORTH_A_THREAD_NS=1")
_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:print_summary=1",
    # Nothing here handles signals.
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0",
    "OMP_NUM_THREADS": "4",
}

#: Access out of bounds, leaks and undefined behaviour, in the code for each width of registers.
ADDRESS = tuple(
    Build(f"address-{name}", march, flags=_ADDRESS, environment=_ENVIRONMENT)
    for name, march in (("native", "native"), ("avx2", "x86-64-v3"))
)
#: Races between the items of a kernel.
APART = Build(
    "thread-items",
    "native",
    flags=_THREAD,
    parallel=Path(__file__).with_name("parallel_apart.cpp"),
    environment=_ENVIRONMENT,
)
#: Races in ``parallel.cpp``, and between callers on two threads. They share all calls: no wait is a
#: stall, whatever else the machine runs.
POOL = Build(
    "thread-pool",
    "native",
    flags=(*_THREAD, "-DHISPARSE_STALL_MS=100000"),
    environment=_ENVIRONMENT,
    callers=2,
)
BUILDS = (*ADDRESS, APART, POOL)
