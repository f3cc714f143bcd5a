"""Building CUDA kernels: nvcc is found or its absence is said; sources compile without spills."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hisparse.errors import KernelError
from hisparse.kernels import operation
from hisparse.kernels.build import compiler as _compile
from hisparse.kernels.build import cuda as _build_cuda
from hisparse.kernels.build.ahead import build_all
from hisparse.kernels.build.cache import put
from hisparse.kernels.operation import OPERATIONS, Place, why_no_triton
from scripts.compile_cuda import FLAGS, parse
from tests.sizes import SWEEPS

ROOT = Path(__file__).parents[2]
NUM_KERNELS = 55


@pytest.fixture
def no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without nvcc, and with an empty cache, whose path is returned."""
    monkeypatch.setattr(_build_cuda, "find_nvcc", lambda: None)
    monkeypatch.setattr(_build_cuda, "CACHE", tmp_path)
    return tmp_path


def test_nvcc_is_looked_for_in_cuda_home_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert _build_cuda.find_nvcc() == str(nvcc)


def test_without_nvcc_a_library_of_these_sources_will_do(no_nvcc: Path) -> None:
    with pytest.raises(_compile.CannotBuildError, match="no nvcc found"):
        _build_cuda.build_cuda("sm_90")
    name = f"cuda-sm_90-{_compile.digest_of(_build_cuda.cuda_sources()[1])}-0123456789abcdef.so"
    (no_nvcc / name.replace(".so", ".partial.so")).write_bytes(b"")
    (no_nvcc / name).write_bytes(b"damaged")
    with pytest.raises(_compile.CannotBuildError, match="no nvcc found"):
        _build_cuda.build_cuda("sm_90")
    (no_nvcc / "built").write_bytes(b"")
    put(no_nvcc / "built", no_nvcc / name)
    assert _build_cuda.build_cuda("sm_90") == no_nvcc / name
    with pytest.raises(_compile.CannotBuildError, match="no nvcc found"):
        _build_cuda.build_cuda("sm_80")
    no_nvcc.chmod(0o770)
    with pytest.raises(PermissionError, match="can be written to by others"):
        _build_cuda.build_cuda("sm_90")


def test_building_ahead_says_what_cannot_be_built(no_nvcc: Path) -> None:
    built = build_all(["sm_90"])
    assert built["cpu"].path is not None and not built["cpu"].why_not
    assert built["cuda sm_90"].path is None
    assert "no nvcc found" in built["cuda sm_90"].why_not


def test_tensors_of_cuda_go_to_the_reference_without_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, score = OPERATIONS["gather_pages"], OPERATIONS["page_score"]
    both = Place("cpu, cuda:0", "cuda")
    monkeypatch.setattr(_build_cuda, "cuda_library", lambda: None)
    # Other tests of this process may run on fibers, where Triton does not.
    monkeypatch.setattr(operation, "why_no_triton", lambda: None)
    assert pages.implementation("auto", both) is pages.function("reference")
    with pytest.raises(KernelError, match="implementation 'cuda': the library cannot be built"):
        pages.implementation("cuda", both)
    monkeypatch.setattr(_build_cuda, "cuda_library", object)
    assert pages.implementation("auto", both) is pages.function("cuda")
    assert score.implementation("auto", both).__module__ == "hisparse.kernels.summary.triton"
    with pytest.raises(KernelError, match="implementation 'cuda': tensors are on cpu"):
        pages.implementation("cuda", Place("cpu", "cpu"))
    with pytest.raises(KernelError, match="implementation 'triton': gather_pages has none"):
        pages.implementation("triton", both)


def test_the_gpu_has_all_operations_but_those_on_host_memory() -> None:
    # PyTorch's operators dequantize on GPUs.
    without = {"key_score", "dequantize"}
    compiled = {
        name for name, each in OPERATIONS.items() if each.lookup("cuda") or each.lookup("triton")
    }
    assert compiled == set(OPERATIONS) - without


def test_without_triton_the_reference_does_its_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(operation, "why_no_triton", why_no_triton)
    why_no_triton.cache_clear()
    for name in ("page_summary", "page_score"):
        each = OPERATIONS[name]
        assert each.function("cuda") is each.function("reference")
    assert len(caplog.records) == 1
    assert "Triton kernels are off" in caplog.text
    why_no_triton.cache_clear()


def test_the_compiler_s_report_is_read() -> None:
    log = """ptxas info    : Compiling entry function '_Z1kv' for 'sm_90'
ptxas info    : Function properties for _Z1kv
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 32 bytes smem"""
    assert parse("a.cu", log) == [("a.cu", "sm_90", "_Z1kv", 255, 12, 16, 32)]


def kernels_that_run_ahead(ptx: str) -> list[str]:
    """Kernels that jump, end or access memory before ``griddepcontrol.wait``.

    Parameters do not count. A launch may begin before the ones in front of it have ended, and
    without the instruction it would read what they have not written yet.
    """
    early = r"\b(?:ld(?!\.param)|st|atom|red|cp|prefetch|bra|ret|call)\b|@|\$L"
    found = []
    for entry in ptx.split(".entry ")[1:]:
        before, wait, _ = entry.partition("griddepcontrol.wait;")
        if not wait or re.search(early, before):
            found.append(entry.split("(")[0])
    return found


def test_kernels_that_run_ahead_are_found() -> None:
    code = ".entry {}(.param .b8 a_param_0[8]) {{ ld.param.u64 %r1, [a_param_0]; {} ret; }}\n"
    wait, load = "griddepcontrol.wait;", "ld.global.u32 %r2, [%r1];"
    bodies = {"good": wait + load, "late": load + wait, "never": load, "some": f"@%p1 {wait}"}
    ptx = "".join(code.format(name, body) for name, body in bodies.items())
    assert kernels_that_run_ahead(ptx) == ["late", "never", "some"]


def test_every_kernel_waits_for_earlier_launches_first() -> None:
    sources = [path.read_text() for path in _build_cuda.cuda_sources()[1]]
    kernels = [text for source in sources for text in source.split("__global__")[1:]]
    first = [re.search(r"\{\s*(.*)", text)[1] for text in kernels]
    assert set(first) == {"wait_for_earlier_launches();"}


@pytest.mark.sweeps
@pytest.mark.skipif(not SWEEPS, reason="takes half a minute: make test-all PART=sweeps")
@pytest.mark.skipif(_build_cuda.find_nvcc() is None, reason="no nvcc")
def test_no_compiled_kernel_runs_ahead(tmp_path: Path) -> None:
    files = _build_cuda.cuda_sources()[0]
    includes = [f"-I{_compile.SOURCES}", f"-I{_compile.SOURCES / 'include'}"]
    includes += _compile.binding_flags()[0]

    def compiled(path: Path) -> str:
        target = tmp_path / f"{path.stem}.ptx"
        command = [_build_cuda.find_nvcc(), *FLAGS[:-1], "-arch=compute_90", "-ptx", str(path)]
        subprocess.run([*command, *includes, "-o", str(target)], capture_output=True, check=True)
        return target.read_text()

    with ThreadPoolExecutor(2) as pool:
        ptx = list(pool.map(compiled, files))
    assert sum(text.count(".entry ") for text in ptx) == NUM_KERNELS
    assert [name for text in ptx for name in kernels_that_run_ahead(text)] == []


@pytest.mark.skipif(_build_cuda.find_nvcc() is None, reason="no nvcc")
def test_a_library_is_linked_from_objects_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source is compiled again only if it changed; the library finds those that it needs."""
    files = [tmp_path / "one.cu", tmp_path / "two.cu"]
    for number, file in enumerate(files):
        file.write_text(f'extern "C" int f{number}() {{ return {number}; }}\n')
    monkeypatch.setattr(_build_cuda, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(_build_cuda, "cuda_sources", lambda: (files, files))
    first = _build_cuda.build_cuda("sm_90")
    files[1].write_text('extern "C" int f1() { return 7; }\n')
    second = _build_cuda.build_cuda("sm_90")
    assert ctypes.CDLL(str(first)).f1() == 1
    assert ctypes.CDLL(str(second)).f1() == 7
    assert len(list((tmp_path / "cache" / "objects").glob("*.o"))) == 3


@pytest.mark.sweeps
@pytest.mark.skipif(not SWEEPS, reason="takes a minute: make test-all PART=sweeps")
@pytest.mark.skipif(_build_cuda.find_nvcc() is None, reason="no nvcc")
def test_every_kernel_compiles_without_warnings_and_spills() -> None:
    """For one architecture; ``make test-all PART=compile`` has them all."""
    command = [sys.executable, "scripts/compile_cuda.py", "sm_90"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = result.stdout.splitlines()[1:]
    assert len(kernels) == NUM_KERNELS
