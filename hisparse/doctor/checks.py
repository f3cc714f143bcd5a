"""What ``hisparse doctor`` checks: software, hooks, the machine and kernels."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Literal

from hisparse.cache.allocate import memlock_limit, zeros
from hisparse.cache.numa import free_bytes
from hisparse.config import HiSparseConfig
from hisparse.errors import CapacityError, one_line
from hisparse.memory.host import free_host_memory
from hisparse.sglang import install
from hisparse.units import format_bytes, resolve_memory

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check.

    Attributes:
        name: what was checked.
        status: "error" if hisparse cannot serve, "warning" if a part of it does not work.
        message: what was found, one line.
        remedy: what to do, one line; "" if there is nothing to do.
    """

    name: str
    status: Status
    message: str
    remedy: str = ""


def _ok(name: str, message: str) -> list[Finding]:
    return [Finding(name=name, status="ok", message=message)]


def _warning(name: str, message: str, remedy: str = "") -> list[Finding]:
    return [Finding(name=name, status="warning", message=message, remedy=remedy)]


def _error(name: str, message: str, remedy: str = "") -> list[Finding]:
    return [Finding(name=name, status="error", message=message, remedy=remedy)]


#: Packages, and what each is needed for.
_OPTIONAL = (
    ("transformers", "eval, plan, HiSparseCache"),
    ("apache-tvm-ffi", "compiled kernels"),
    ("triton", "Triton kernels"),
    ("flashinfer-python", "adapter flashinfer"),
    ("flash-attn", "adapter flash_attention without SGLang's own"),
    ("lm_eval", "tasks of lm-evaluation-harness"),
    ("matplotlib", "plots"),
    ("prometheus-client", "metrics"),
)


def python() -> list[Finding]:
    """The interpreter."""
    return _ok("python", f"{platform.python_version()}, {sys.executable}")


def torch_version() -> list[Finding]:
    """The installed torch, and the one that SGLang asks for."""
    import torch

    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    message = f"{torch.__version__} ({kind})"
    wanted = sglang_pin("torch")
    if wanted and wanted != torch.__version__.partition("+")[0]:
        message += f"; sglang {install.installed_release()} asks for torch {wanted}"
        if torch.version.cuda:
            remedy = f"its CUDA kernels are built for that torch: pip install torch=={wanted}"
            return _warning("torch", message, remedy)
    return _ok("torch", message)


def sglang_pin(package: str) -> str | None:
    """The version of ``package`` that the installed SGLang pins; None if it pins none."""
    try:
        lines = requires("sglang") or []
    except PackageNotFoundError:
        return None
    pin = re.compile(rf"{package}==([\d.]+)(?!.*extra)")
    return next((match[1] for line in lines if (match := pin.match(line))), None)


def sglang_version() -> list[Finding]:
    """Whether the installed SGLang is the release that hisparse supports."""
    found = install.installed_release()
    if found is not None and install.is_supported(found):
        return _ok("sglang", f"{found}, the supported release")
    message = f"got {found or 'none'}, expected {install.RELEASE}"
    return _error("sglang", message, f"pip install sglang=={install.RELEASE}")


def plugin_visible() -> list[Finding]:
    """Whether SGLang finds the entry point, and ``SGLANG_PLUGINS`` allows it."""
    found = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "hisparse"]
    if not found:
        message = "the entry point hisparse of the group sglang.srt.plugins is not installed"
        remedy = "install the package (pip install .) instead of putting it on PYTHONPATH"
        return _error("plugin", message, remedy)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "hisparse" not in [name.strip() for name in allowed.split(",")]:
        message = f"SGLANG_PLUGINS is {allowed!r}, which excludes hisparse"
        return _error("plugin", message, f"export SGLANG_PLUGINS={allowed},hisparse, or unset it")
    return _ok("plugin", f"entry point {found[0].value}")


def optional_packages() -> list[Finding]:
    """Packages that only parts of hisparse need."""
    found, absent = [], []
    for name, use in _OPTIONAL:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(f"{name} ({use})")
    message = "; ".join((", ".join(found) or "none", f"without {', '.join(absent) or 'none'}"))
    return _ok("optional packages", message)


_TIMEOUT_S = 120


def hooks() -> list[Finding]:
    """Load the plug-in as SGLang does, in a process of its own."""
    found_release = install.installed_release()
    if found_release is None or not install.is_supported(found_release):
        return _warning("hooks", f"not checked: sglang {install.RELEASE} is not installed")
    import torch

    environment = os.environ | {"SGLANG_PLUGINS": "hisparse", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    line = [sys.executable, "-m", "hisparse.sglang.check_hooks"]
    try:
        done = subprocess.run(
            line, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return _broken([f"importing SGLang took more than {_TIMEOUT_S} s"])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return _error("hooks", f"SGLang cannot be imported: {last[:300]}", _packages())
    if found["problems"]:
        return _broken(found["problems"])
    message = f"all {found['hooks']} hooks fit, and the {found['used']} other names in use exist"
    return _ok("hooks", message)


def _packages() -> str:
    """Remedy: the versions of torch and transformers that the installed SGLang pins."""
    pins = ((name, sglang_pin(name)) for name in ("torch", "transformers"))
    wanted = " and ".join(f"{name} {pin}" for name, pin in pins if pin)
    asks = f"install what sglang {install.installed_release()} asks for"
    return f"{asks}: {wanted}" if wanted else asks


def _broken(problems: Sequence[str]) -> list[Finding]:
    remedy = f"install sglang {install.RELEASE}, complete"
    return [finding for problem in problems for finding in _error("hooks", problem, remedy)]


#: With less free memory, a server can hardly hold its own processes.
_LITTLE_BYTES = 4 * 2**30

_NODES = Path("/sys/devices/system/node")


def device() -> list[Finding]:
    """The GPUs that PyTorch finds."""
    import torch

    if not torch.cuda.is_available():
        message = "PyTorch finds no CUDA GPU, so SGLang serves on the CPU, which is for tests only"
        remedy = "on a machine with a GPU: check nvidia-smi, and that torch is a CUDA build"
        return _warning("device", message, remedy)
    checks = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = format_bytes(torch.cuda.mem_get_info(index)[0])
        message = f"{about.name}, sm_{about.major}{about.minor}, {free} free of "
        message += format_bytes(about.total_memory)
        checks += _ok(f"device {index}", message)
    return checks


def pinned_memory() -> list[Finding]:
    """Whether host memory can be pinned for a GPU."""
    import torch

    message = f"ulimit -l is {memlock_limit()}"
    if not torch.cuda.is_available():
        return _ok("pinned memory", f"{message}; without a GPU nothing is pinned")
    try:
        zeros([2**26], torch.uint8, torch.device("cpu"), pin=True)
    except CapacityError as error:
        remedy = "ulimit -l unlimited; in a container --ulimit memlock=-1"
        return _error("pinned memory", f"{message}; 64 MiB could not be pinned: {error}", remedy)
    return _ok("pinned memory", f"{message}; 64 MiB could be pinned")


def host_memory() -> list[Finding]:
    """Free host memory, and how much of it a server takes by default."""
    free, default = free_host_memory(), HiSparseConfig().host_memory
    pool = format_bytes(resolve_memory(default, free, "host_memory"))
    message = f"{format_bytes(free)} free; host_memory {default} would take {pool} for the KV cache"
    if free < _LITTLE_BYTES:
        remedy = "free some memory, or set host_memory and --max-total-tokens"
        return _warning("host memory", message, remedy)
    return _ok("host memory", message)


def numa(nodes: Path = _NODES) -> list[Finding]:
    """NUMA nodes and their free memory."""
    sizes = {}
    for meminfo in nodes.glob("node[0-9]*/meminfo"):
        sizes[int(meminfo.parent.name.removeprefix("node"))] = free_bytes(meminfo.parent)
    if len(sizes) < 2:
        return _ok("numa", "one node")
    message = ", ".join(f"node {node}: {format_bytes(sizes[node])} free" for node in sorted(sizes))
    remedy = (
        "on a CPU start the server with numactl --interleave=all; the pool of a GPU is put on its "
        "node if it fits there"
    )
    return _warning("numa", message, remedy)


def cpu_kernels() -> list[Finding]:
    """Find or build the C++ kernels."""
    from hisparse.kernels.build.cpu import build_cpu, cpu_instruction_set
    from hisparse.kernels.build.isa import VARIABLE, chosen_isa

    def build() -> str:
        path, isa = build_cpu(), chosen_isa()
        asked = "" if isa == "native" else f", as {VARIABLE}={isa} asks"
        return f"C++ for {cpu_instruction_set()}{asked}: {path}"

    remedy = "install g++ and apache-tvm-ffi (CXX names another compiler)"
    return _built("CPU kernels", build, remedy)


def cuda_kernels() -> list[Finding]:
    """Find or build the CUDA kernels for the GPU of this machine."""
    import torch

    from hisparse.kernels.build.cuda import build_cuda, find_nvcc

    if not torch.cuda.is_available():
        message = f"not used: there is no GPU to build for; nvcc: {find_nvcc() or 'not found'}"
        return _ok("CUDA kernels", message)
    remedy = "install nvcc (CUDA_HOME names its toolkit) and apache-tvm-ffi"
    return _built("CUDA kernels", lambda: f"CUDA C++: {build_cuda()}", remedy)


def triton_kernels() -> list[Finding]:
    """Whether the Triton kernels run, which score, select and attend on a GPU."""
    import torch

    if not torch.cuda.is_available():
        return _ok("Triton kernels", "not used: there is no GPU")
    try:
        import triton
    except ImportError as error:
        message = f"slower PyTorch code is used instead: {error}"
        return _warning("Triton kernels", message, "pip install triton")
    return _ok("Triton kernels", f"Triton {triton.__version__}")


def _built(name: str, build: Callable[[], str], remedy: str) -> list[Finding]:
    from hisparse.kernels.build.compiler import CannotBuildError

    try:
        return _ok(name, build())
    except (ImportError, OSError, CannotBuildError) as error:
        return _warning(name, f"slower PyTorch code is used instead: {error}", remedy)


def adapters() -> list[Finding]:
    """The attention libraries that work on this machine."""
    import torch

    from hisparse.adapters import ADAPTERS

    here = "cuda" if torch.cuda.is_available() else "cpu"
    works, not_here = [], []
    for name in ADAPTERS:
        adapter = ADAPTERS.get(name)
        why = _missing(adapter)
        if why is None and adapter.device_types and here not in adapter.device_types:
            why = f"for {' and '.join(adapter.device_types)}"
        if why is None:
            works.append(name)
        else:
            not_here.append(f"{name} ({why})")
    message = f"usable: {', '.join(works) or 'none'}; not usable: {', '.join(not_here) or 'none'}"
    return [Finding(name="adapters", status="ok" if works else "error", message=message)]


def _missing(adapter: type) -> str | None:
    try:
        why: str | None = adapter.missing()  # type: ignore[attr-defined]
    except Exception as error:
        return one_line(error)
    return why


_CheckFunction = Callable[[], list[Finding]]

_CHECKS: tuple[_CheckFunction, ...] = (
    python,
    torch_version,
    sglang_version,
    plugin_visible,
    hooks,
    device,
    pinned_memory,
    host_memory,
    numa,
    cpu_kernels,
    cuda_kernels,
    triton_kernels,
    adapters,
    optional_packages,
)


def run_checks(checks: Sequence[_CheckFunction] = _CHECKS) -> list[Finding]:
    """All results, in a fixed order; an exception in a check becomes an error."""
    with ThreadPoolExecutor(len(checks)) as pool:
        return [result for results in pool.map(_guarded, checks) for result in results]


def _guarded(check: _CheckFunction) -> list[Finding]:
    try:
        return check()
    except Exception as error:
        name = check.__name__.replace("_", " ")
        remedy = "a broken package, or a bug of hisparse: please report it"
        return _error(name, one_line(error), remedy)
