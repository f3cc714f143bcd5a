"""Checks of Python, torch, SGLang, the plug-in's entry point and optional packages."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from hisparse.doctor.check import Check
from hisparse.sglang import names

#: Packages, and what each is needed for.
_OPTIONAL = (
    ("transformers", "eval, plan, HiSparseCache"),
    ("apache-tvm-ffi", "compiled kernels"),
    ("triton", "Triton kernels"),
    ("faiss-cpu", "dipr's fine index"),
    ("flashinfer-python", "adapter flashinfer"),
    ("flash-attn", "adapter flash_attention without SGLang's own"),
    ("lm_eval", "tasks of lm-evaluation-harness"),
    ("matplotlib", "plots"),
    ("prometheus-client", "metrics"),
)


def python() -> list[Check]:
    """The interpreter."""
    found = f"{platform.python_version()}, {sys.executable}"
    return [Check(name="python", status="ok", message=found)]


def torch_version() -> list[Check]:
    """The installed torch, and the one that SGLang asks for."""
    import torch

    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    message = f"{torch.__version__} ({kind})"
    wanted = sglang_pin("torch")
    if wanted and wanted != torch.__version__.partition("+")[0]:
        message += f"; sglang {names.installed_release()} asks for torch {wanted}"
        if torch.version.cuda:
            remedy = f"its CUDA kernels are built for that torch: pip install torch=={wanted}"
            return [Check(name="torch", status="warning", message=message, remedy=remedy)]
    return [Check(name="torch", status="ok", message=message)]


def sglang_pin(package: str) -> str | None:
    """The version of ``package`` that the installed SGLang pins; None if it pins none."""
    try:
        lines = requires("sglang") or []
    except PackageNotFoundError:
        return None
    pin = re.compile(rf"{package}==([\d.]+)(?!.*extra)")
    return next((match[1] for line in lines if (match := pin.match(line))), None)


def sglang_version() -> list[Check]:
    """Whether the installed SGLang is the release that hisparse supports."""
    found = names.installed_release()
    if found is not None and names.is_supported(found):
        return [Check(name="sglang", status="ok", message=f"{found}, the supported release")]
    message = f"got {found or 'none'}, expected {names.RELEASE}"
    remedy = f"pip install sglang=={names.RELEASE}"
    return [Check(name="sglang", status="error", message=message, remedy=remedy)]


def plugin_visible() -> list[Check]:
    """Whether SGLang finds the entry point, and ``SGLANG_PLUGINS`` allows it."""
    found = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "hisparse"]
    if not found:
        message = "the entry point hisparse of the group sglang.srt.plugins is not installed"
        remedy = "install the package (pip install .) instead of putting it on PYTHONPATH"
        return [Check(name="plugin", status="error", message=message, remedy=remedy)]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "hisparse" not in [name.strip() for name in allowed.split(",")]:
        return [
            Check(
                name="plugin",
                status="error",
                message=f"SGLANG_PLUGINS is {allowed!r}, which excludes hisparse",
                remedy=f"export SGLANG_PLUGINS={allowed},hisparse, or unset it",
            )
        ]
    return [Check(name="plugin", status="ok", message=f"entry point {found[0].value}")]


def optional_packages() -> list[Check]:
    """Packages that only parts of hisparse need."""
    found, absent = [], []
    for name, use in _OPTIONAL:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            absent.append(f"{name} ({use})")
    message = "; ".join((", ".join(found) or "none", f"without {', '.join(absent) or 'none'}"))
    return [Check(name="optional packages", status="ok", message=message)]
