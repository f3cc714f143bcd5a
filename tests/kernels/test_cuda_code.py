"""What nvcc makes of the CUDA kernels: loads in flight, copies to shared memory, no stale reads."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hisparse.kernels.build import cuda as _build_cuda
from hisparse.kernels.build.compiler import SOURCES, binding_flags
from tests.kernels.triton_compile import disassembled
from tests.sizes import SWEEPS

pytestmark = [
    pytest.mark.sweeps,
    pytest.mark.skipif(not SWEEPS, reason="takes a minute: make test-all PART=sweeps"),
    pytest.mark.skipif(_build_cuda.find_nvcc() is None, reason="no nvcc"),
]

#: Gives the file that nvcc makes of a source, of a kind such as "ptx".
Compile = Callable[[str, str], bytes]


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder = tmp_path_factory.mktemp(request.param)
    includes = [f"-I{SOURCES}", f"-I{SOURCES / 'include'}", *binding_flags()[0]]

    def compile_one(source: str, kind: str) -> bytes:
        target = folder / f"{Path(source).stem}.{kind}"
        command = [str(_build_cuda.find_nvcc()), "-std=c++17", "-O3", f"-arch={request.param}"]
        command += [*includes, f"-{kind}", str(SOURCES / source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()

    return compile_one


def functions(code: str, begin: str) -> dict[str, str]:
    """Code by the name of the kernel, which ``begin`` finds at its first line."""
    parts = re.split(begin, code)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def kernels(ptx: bytes) -> dict[str, str]:
    """PTX by kernel."""
    return functions(ptx.decode(), r"\.entry (\w+)")


@pytest.mark.parametrize("source", sorted(path.name for path in SOURCES.glob("*.cu")))
def test_nothing_is_read_past_the_stores_of_a_step(compiled: Compile, source: str) -> None:
    """``ld.global.nc`` is for what no thread writes while the kernel runs."""
    found = kernels(compiled(source, "ptx"))
    assert found or source in ("copy_engine.cu", "host_call.cu")
    assert not [name for name, code in found.items() if "ld.global.nc" in code]
    for name, code in found.items():
        if "sketch_score_kernel" in name:
            assert "cp.async.cg.shared.global" in code, name
            assert "cp.async.wait_group" in code, name


def test_a_transfer_has_all_loads_in_flight_before_it_stores(compiled: Compile) -> None:
    code = disassembled(compiled("transfer.cu", "cubin"))
    found = functions(code, r"\.text\.(\w*transfer_kernel\w+):")
    assert found
    for name, text in found.items():
        # __ldcs marks the loads of what is moved: evict first.
        moves = re.findall(r"\b(LDG\.E\.EF|STG?\.E)\b", text)
        assert moves == ["LDG.E.EF"] * 4 + ["ST.E"] * 4, f"{name}: {moves}"
