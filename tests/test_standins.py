"""The stand-ins of ``cpu_standins/``: names for text models, a clear error for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STANDINS = Path(__file__).parent.parent / "cpu_standins"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Run in an interpreter that sees the stand-ins and no installed package."""
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {"PYTHONPATH": str(STANDINS)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "code",
    [
        "from torchvision.transforms import InterpolationMode; InterpolationMode('bicubic')",
        "from torchvision.transforms.functional import pil_to_tensor",
        "from torchvision.transforms.v2 import functional; functional.InterpolationMode",
        "import torchvision.transforms.v2.functional as f; f.pil_to_tensor",
        "from torchvision.io import ImageReadMode, decode_image, decode_jpeg; ImageReadMode.RGB",
        "from sgl_kernel import anything_at_all",
        "import sgl_kernel, torchvision; assert not hasattr(torchvision, 'ops')",
        "import sgl_kernel; assert not hasattr(sgl_kernel, '__path_hooks__')",
    ],
)
def test_imports(code: str) -> None:
    done = _run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "import torchvision; torchvision.ops",
            "AttributeError: torchvision.ops: torchvision is a",
        ),
        (
            "from torchvision.io import decode_image; decode_image(b'')",
            "ImportError: torchvision is a",
        ),
        (
            "from torchvision.transforms.v2 import functional; functional.pil_to_tensor(1)",
            "ImportError: torchvision is a stand-in",
        ),
        ("import sgl_kernel; sgl_kernel.rmsnorm(1)", "ImportError: sgl_kernel.rmsnorm needs CUDA"),
        ("import torchvision.ops", "ModuleNotFoundError: No module named 'torchvision.ops'"),
    ],
)
def test_what_is_missing_says_so(code: str, error: str) -> None:
    done = _run(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(error)
