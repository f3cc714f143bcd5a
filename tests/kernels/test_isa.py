"""The instruction set of the CPU kernels: which one is built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hisparse.errors import ConfigError
from hisparse.kernels.build import compiler, cpu, isa
from hisparse.kernels.build.isa import ISAS, VARIABLE, chosen_isa


@pytest.fixture
def with_avx2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This processor seems to have AVX2 and no AVX-512."""
    monkeypatch.setattr(isa, "_processor_flags", lambda: ISAS["avx2"].flags | {"sse2"})


def test_native_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_isa() == "native"
    monkeypatch.setenv(VARIABLE, "")
    assert chosen_isa() == "native"


def test_a_processor_of_another_kind_has_native_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "_processor_flags", frozenset)
    monkeypatch.setenv(VARIABLE, "avx2")
    with pytest.raises(ConfigError, match=r"got 'avx2'.*\(choices: native\)"):
        chosen_isa()


@pytest.mark.usefixtures("with_avx2_alone")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("avx512", f"{VARIABLE}: got 'avx512', expected one that this processor has"),
        ("sse9", f"{VARIABLE}: got 'sse9', expected an instruction set"),
    ],
)
def test_what_the_processor_lacks_is_refused(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ConfigError) as error:
        cpu.build_cpu()
    assert str(error.value) == f"{message} (choices: native, avx2)"


@pytest.mark.usefixtures("with_avx2_alone")
def test_kernels_are_built_for_it_under_a_name_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: dict[str, tuple[list[list[str]], Path]] = {}
    for name in ("native", "avx2"):
        monkeypatch.setenv(VARIABLE, name)

        def produce(
            what: str,
            compilations: dict[Path, list[str]],
            link: list[str],
            target: Path,
            name: str = name,
        ) -> None:
            built[name] = [*compilations.values(), link], target

        monkeypatch.setattr(compiler, "produce_from_objects", produce)
        cpu.build_cpu()
    assert all("-march=native" in command for command in built["native"][0])
    assert all("-march=x86-64-v3" in command for command in built["avx2"][0])
    assert built["native"][1] != built["avx2"][1]


def test_the_library_says_what_it_was_compiled_for() -> None:
    if cpu.cpu_library() is None:
        pytest.skip("no C++ compiler")
    known = {"AVX-512", "AVX2", "AVX", "SSE2", "SVE", "NEON", "no vectors"}
    assert cpu.cpu_instruction_set() in known
    if os.environ.get(VARIABLE) == "avx2":
        assert cpu.cpu_instruction_set() == "AVX2"
