"""The origin of a measurement: date, machine, versions and commit."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("hisparse", "sglang", "torch", "transformers", "numpy", "apache-tvm-ffi", "triton"),
    *("flashinfer-python", "flash-attn", "prometheus-client"),
)


def origin() -> dict[str, Any]:
    """Date, machine, versions and commit, for a result."""
    return {"date": now(), "machine": machine(), "versions": versions(), "commit": commit()}


def now() -> str:
    """Date and time, UTC, as in ISO 8601."""
    return datetime.now(UTC).isoformat("T", "seconds")


def machine() -> str:
    """The processor and its cores."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {os.cpu_count()} cores"


def instruction_sets() -> dict[str, str]:
    """What the CPU code runs with: "kernels", ours ("none": PyTorch does the work), and "torch"."""
    import torch

    from hisparse.kernels.build.cpu import cpu_instruction_set

    # As our kernels name them.
    aten = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX-512")
    return {"kernels": cpu_instruction_set() or "none", "torch": aten}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect a measurement."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout that hisparse runs from; "unknown" outside a checkout."""
    where = Path(__file__).parent
    git = ["git", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
