"""Checks in a process of its own that the plug-in's hooks fit the installed SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from hisparse.doctor.check import Check
from hisparse.doctor.software import sglang_pin
from hisparse.sglang import names

_TIMEOUT_S = 120


def hooks() -> list[Check]:
    """Load the plug-in as SGLang does, in a process of its own."""
    found_release = names.installed_release()
    if found_release is None or not names.is_supported(found_release):
        message = f"not checked: sglang {names.RELEASE} is not installed"
        return [Check(name="hooks", status="warning", message=message)]
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
        return [_broken(f"importing SGLang took more than {_TIMEOUT_S} s")]
    except (IndexError, ValueError):
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        message = f"SGLang cannot be imported: {last[:300]}"
        return [Check(name="hooks", status="error", message=message, remedy=_packages())]
    problems = found["problems"]
    if problems:
        return [_broken(problem) for problem in problems]
    message = f"all {found['hooks']} hooks fit, and the {found['used']} other names in use exist"
    return [Check(name="hooks", status="ok", message=message)]


def _packages() -> str:
    """Remedy: the versions of torch and transformers that the installed SGLang pins."""
    pins = ((name, sglang_pin(name)) for name in ("torch", "transformers"))
    wanted = " and ".join(f"{name} {pin}" for name, pin in pins if pin)
    asks = f"install what sglang {names.installed_release()} asks for"
    return f"{asks}: {wanted}" if wanted else asks


def _broken(message: str) -> Check:
    remedy = f"install sglang {names.RELEASE}, complete"
    return Check(name="hooks", status="error", message=message, remedy=remedy)
