"""What ``hisparse doctor`` checks: software, hooks, the machine and kernels."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, entry_points, requires
from pathlib import Path
from typing import Literal, NamedTuple

from hisparse.cache.allocate import memlock_limit, zeros
from hisparse.cache.numa import free_bytes
from hisparse.config import HiSparseConfig
from hisparse.doctor import provenance
from hisparse.errors import CapacityError, one_line
from hisparse.memory.host import free_host_memory
from hisparse.sglang import install
from hisparse.units import format_bytes, resolve_memory

Status = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        status: "error" if hisparse cannot serve, "warning" if a part of it does not work.
        message: what was found, one line.
        remedy: what to do, one line; "" if there is nothing to do.
    """

    status: Status
    message: str
    remedy: str = ""


def packages() -> Finding:
    """The interpreter, and the packages that are used where they are installed."""
    found = ", ".join(f"{name} {version}" for name, version in provenance.versions().items())
    return Finding("ok", f"{found}; {sys.executable}")


def torch_version() -> Finding:
    """The installed torch, and the one that SGLang asks for."""
    import torch

    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    message = f"{torch.__version__} ({kind})"
    wanted = sglang_pin("torch")
    if wanted and wanted != torch.__version__.partition("+")[0]:
        message += f"; sglang {install.installed_release()} asks for torch {wanted}"
        if torch.version.cuda:
            remedy = f"its CUDA kernels are built for that torch: pip install torch=={wanted}"
            return Finding("warning", message, remedy)
    return Finding("ok", message)


def sglang_pin(package: str) -> str | None:
    """The version of ``package`` that the installed SGLang pins; None if it pins none."""
    try:
        lines = requires("sglang") or []
    except PackageNotFoundError:
        return None
    pin = re.compile(rf"{package}==([\d.]+)(?!.*extra)")
    return next((match[1] for line in lines if (match := pin.match(line))), None)


def sglang_version() -> Finding:
    """Whether the installed SGLang is the release that hisparse supports."""
    found = install.installed_release()
    if found is not None and install.is_supported(found):
        return Finding("ok", f"{found}, the supported release")
    message = f"got {found or 'none'}, expected {install.RELEASE}"
    return Finding("error", message, f"pip install sglang=={install.RELEASE}")


def plugin_visible() -> Finding:
    """Whether SGLang finds the entry point, and ``SGLANG_PLUGINS`` allows it."""
    found = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "hisparse"]
    if not found:
        message = "the entry point hisparse of the group sglang.srt.plugins is not installed"
        remedy = "install the package (pip install .) instead of putting it on PYTHONPATH"
        return Finding("error", message, remedy)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "hisparse" not in [name.strip() for name in allowed.split(",")]:
        message = f"SGLANG_PLUGINS is {allowed!r}, which excludes hisparse"
        return Finding("error", message, f"export SGLANG_PLUGINS={allowed},hisparse, or unset it")
    return Finding("ok", f"entry point {found[0].value}")


_TIMEOUT_S = 120


def hooks() -> Finding:
    """Load the plug-in as SGLang does, in a separate process."""
    found_release = install.installed_release()
    if found_release is None or not install.is_supported(found_release):
        return Finding("warning", f"not checked: sglang {install.RELEASE} is not installed")
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
        found = {"problems": [f"importing SGLang took more than {_TIMEOUT_S} s"]}
    except (IndexError, ValueError):
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return Finding("error", f"SGLang cannot be imported: {last[:300]}", _packages())
    if found["problems"]:
        remedy = f"install sglang {install.RELEASE}, complete"
        return Finding("error", "; ".join(found["problems"]), remedy)
    message = f"all {found['hooks']} hooks fit, and the {found['used']} other names in use exist"
    return Finding("ok", message)


def _packages() -> str:
    """Remedy: the versions of torch and transformers that the installed SGLang pins."""
    pins = ((name, sglang_pin(name)) for name in ("torch", "transformers"))
    wanted = " and ".join(f"{name} {pin}" for name, pin in pins if pin)
    asks = f"install what sglang {install.installed_release()} asks for"
    return f"{asks}: {wanted}" if wanted else asks


#: With less free memory, the processes of a server hardly fit.
_LITTLE_BYTES = 4 * 2**30

_NODES = Path("/sys/devices/system/node")


def device() -> Finding:
    """The GPUs that PyTorch finds."""
    import torch

    if not torch.cuda.is_available():
        message = "PyTorch finds no CUDA GPU, so SGLang serves on the CPU, which is for tests only"
        remedy = "on a machine with a GPU: check nvidia-smi, and that torch is a CUDA build"
        return Finding("warning", message, remedy)
    messages = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = format_bytes(torch.cuda.mem_get_info(index)[0])
        total = format_bytes(about.total_memory)
        messages.append(f"{about.name}, sm_{about.major}{about.minor}, {free} free of {total}")
    return Finding("ok", "; ".join(messages))


def pinned_memory() -> Finding:
    """Whether host memory can be pinned for a GPU."""
    import torch

    message = f"ulimit -l is {memlock_limit()}"
    if not torch.cuda.is_available():
        return Finding("ok", f"{message}; without a GPU nothing is pinned")
    try:
        zeros([2**26], torch.uint8, torch.device("cpu"), pin=True)
    except CapacityError as error:
        remedy = "ulimit -l unlimited; in a container --ulimit memlock=-1"
        return Finding("error", f"{message}; 64 MiB could not be pinned: {error}", remedy)
    return Finding("ok", f"{message}; 64 MiB could be pinned")


def host_memory() -> Finding:
    """Free host memory, and how much of it a server takes by default."""
    free, default = free_host_memory(), HiSparseConfig().host_memory
    pool = format_bytes(resolve_memory(default, free, "host_memory"))
    message = f"{format_bytes(free)} free; host_memory {default} would take {pool} for the KV cache"
    if free < _LITTLE_BYTES:
        remedy = "free some memory, or set host_memory and --max-total-tokens"
        return Finding("warning", message, remedy)
    return Finding("ok", message)


def numa() -> Finding:
    """NUMA nodes and their free memory."""
    sizes = {}
    for meminfo in _NODES.glob("node[0-9]*/meminfo"):
        sizes[int(meminfo.parent.name.removeprefix("node"))] = free_bytes(meminfo.parent)
    if len(sizes) < 2:
        return Finding("ok", "one node")
    message = ", ".join(f"node {node}: {format_bytes(sizes[node])} free" for node in sorted(sizes))
    remedy = (
        "on a CPU start the server with numactl --interleave=all; the pool of a GPU is put on its "
        "node if it fits there"
    )
    return Finding("warning", message, remedy)


def cpu_kernels() -> Finding:
    """Find or build the C++ kernels."""
    from hisparse.kernels.build.cpu import build_cpu, cpu_instruction_set
    from hisparse.kernels.build.isa import VARIABLE, chosen_isa

    def build() -> str:
        path, isa = build_cpu(), chosen_isa()
        asked = "" if isa == "native" else f", as {VARIABLE}={isa} asks"
        return f"C++ for {cpu_instruction_set()}{asked}: {path}"

    remedy = "install g++ and apache-tvm-ffi (CXX names another compiler)"
    return _built(build, remedy)


def cuda_kernels() -> Finding:
    """Find or build the CUDA kernels for the GPU of this machine."""
    import torch

    from hisparse.kernels.build.cuda import build_cuda, find_nvcc

    if not torch.cuda.is_available():
        message = f"not used: there is no GPU to build for; nvcc: {find_nvcc() or 'not found'}"
        return Finding("ok", message)
    remedy = "install nvcc (CUDA_HOME names its toolkit) and apache-tvm-ffi"
    return _built(lambda: f"CUDA C++: {build_cuda()}", remedy)


def triton_kernels() -> Finding:
    """Whether the Triton kernels run, which score, select and attend on a GPU."""
    import torch

    if not torch.cuda.is_available():
        return Finding("ok", "not used: there is no GPU")
    try:
        import triton
    except ImportError as error:
        message = f"slower PyTorch code is used instead: {error}"
        return Finding("warning", message, "pip install triton")
    return Finding("ok", f"Triton {triton.__version__}")


def _built(build: Callable[[], str], remedy: str) -> Finding:
    from hisparse.kernels.build.compiler import CannotBuildError

    try:
        return Finding("ok", build())
    except (ImportError, OSError, CannotBuildError) as error:
        return Finding("warning", f"slower PyTorch code is used instead: {error}", remedy)


def adapters() -> Finding:
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
    return Finding("ok" if works else "error", message)


def _missing(adapter: type) -> str | None:
    try:
        why: str | None = adapter.missing()  # type: ignore[attr-defined]
    except Exception as error:
        return one_line(error)
    return why


_CHECKS: dict[str, Callable[[], Finding]] = {
    "packages": packages,
    "torch": torch_version,
    "sglang": sglang_version,
    "plugin": plugin_visible,
    "hooks": hooks,
    "device": device,
    "pinned memory": pinned_memory,
    "host memory": host_memory,
    "numa": numa,
    "CPU kernels": cpu_kernels,
    "CUDA kernels": cuda_kernels,
    "Triton kernels": triton_kernels,
    "adapters": adapters,
}


def run_checks() -> dict[str, Finding]:
    """All results by the name of the check; an exception in a check becomes an error."""
    with ThreadPoolExecutor(len(_CHECKS)) as pool:
        return dict(zip(_CHECKS, pool.map(_guarded, _CHECKS.values()), strict=True))


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        remedy = "a broken package, or a bug of hisparse: please report it"
        return Finding("error", one_line(error), remedy)
