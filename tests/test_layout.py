"""Which layer of the package may import which, no circles, and a public surface as it says."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hisparse
import hisparse_bench

ROOT = Path(__file__).parent.parent

#: From top to bottom: a module imports from its own layer or from those below.
LAYERS = (
    ("hisparse.__main__",),
    ("hisparse.cli",),
    ("hisparse.demo",),
    ("hisparse_bench",),
    ("hisparse.eval",),
    ("hisparse.plan",),
    ("hisparse.doctor",),
    ("hisparse.kvcm.optimizer",),
    ("hisparse.testing",),
    ("hisparse.sglang", "hisparse.transformers"),
    ("hisparse.engine",),
    ("hisparse.memory",),
    ("hisparse.storage", "hisparse.trace"),
    ("hisparse.cache",),
    ("hisparse.adapters",),
    ("hisparse.algorithms",),
    ("hisparse.kernels",),
    ("hisparse.kvcm",),
    ("hisparse",),
)
#: Modules beside the layers.
LOOSE = {
    "__init__", "__main__", "config", "errors", "model_config", "options", "private_files",
    "registry", "types", "units",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Dotted name to file, of every module."""
    found = {}
    for package, folder in (("hisparse", ROOT), ("hisparse_bench", ROOT / "bench")):
        for file in sorted((folder / package).rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


SOURCES = {name: file.read_text() for name, file in MODULES.items()}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def imports_of(name: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere: in functions and for types too."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # "from package import x": x may be a module of the package.
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [x if x in MODULES else node.module for x in targets]
        else:
            continue
        yield from (x for x in targets if x in MODULES and x != name)


def rank_of(name: str) -> int:
    for rank, layers in enumerate(LAYERS):
        if any(name == layer or name.startswith(f"{layer}.") for layer in layers):
            return rank
    raise AssertionError(f"{name} is in no layer of tests/test_layout.py")


def test_imports_point_down() -> None:
    upward = [
        f"{name} imports {target}"
        for name in MODULES
        for target in sorted(set(imports_of(name)))
        if rank_of(target) < rank_of(name)
    ]
    assert not upward


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {name: set(imports_of(name)) for name in MODULES}
    for name, targets in graph.items():
        # A package's own modules run after its __init__ began: that is no circle.
        graph[name] = {x for x in targets if not name.startswith(f"{x}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_only_the_front_ends_import_their_frameworks() -> None:
    """Whoever measures or shows something may load a model; the engine may not."""
    allowed = {
        "sglang": ("hisparse.sglang", "hisparse.doctor", "hisparse_bench"),
        "transformers": (
            "hisparse.transformers", "hisparse.model_config", "hisparse.eval", "hisparse.demo",
            "hisparse.cli", "hisparse_bench",
        ),
    }  # fmt: skip
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                top = [node.module.partition(".")[0]]
            elif isinstance(node, ast.Import):
                top = [alias.name.partition(".")[0] for alias in node.names]
            else:
                continue
            for library in set(top) & set(allowed):
                assert name.startswith(allowed[library]), f"{name} imports {library}"


def test_the_cache_manager_stands_apart() -> None:
    """Engines speak to it over the network: only its commands and the store's client import it."""
    using = {
        name
        for name in MODULES
        if not name.startswith("hisparse.kvcm")
        for target in imports_of(name)
        if target.startswith("hisparse.kvcm")
    }
    assert using <= {"hisparse.cli.kvcm", "hisparse.cli.kvcm_replay", "hisparse.storage.managed"}


def test_functions_and_files_are_short() -> None:
    """A function has at most 60 lines with its docstring and decorators, a file 400."""
    sizes = {name: len(source.splitlines()) for name, source in SOURCES.items()}
    long = [f"{name}: {lines} lines" for name, lines in sizes.items() if lines > 400]
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min(x.lineno for x in (node, *node.decorator_list))
                if (lines := (node.end_lineno or first) - first + 1) > 60:
                    long.append(f"{name}:{first} {node.name}: {lines} lines")
    assert not long


def test_test_files_have_names_of_their_own() -> None:
    """Pytest collects no two of one name, as their folders are no packages."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_few_modules_stand_loose() -> None:
    assert {file.stem for file in (ROOT / "hisparse").glob("*.py")} == LOOSE


@pytest.mark.parametrize(
    "package",
    ["hisparse", "hisparse.algorithms", "hisparse.adapters", "hisparse.cache",
     "hisparse.cache.formats", "hisparse.engine.extensions", "hisparse.eval", "hisparse.kernels",
     "hisparse.storage", "hisparse.testing", "hisparse.trace", "hisparse.transformers"],
)  # fmt: skip
def test_what_a_package_offers_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == sorted(
        module.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n)
    )
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing


def test_the_kernels_offer_what_their_families_do() -> None:
    kernels = importlib.import_module("hisparse.kernels")
    families = [name for name in MODULES if re.fullmatch(r"hisparse\.kernels\.\w+\.op", name)]
    offered = [(name, x) for name in families for x in importlib.import_module(name).__all__]
    assert len({x for _, x in offered}) == len(offered) > 30
    assert {x for _, x in offered} <= set(kernels.__all__)
    for name, x in offered:
        assert getattr(kernels, x) is getattr(importlib.import_module(name), x)


def test_a_plug_in_needs_one_import() -> None:
    names = {"KVSpec", "PageScoreAlgorithm", "register_algorithm"}
    assert names <= set(importlib.import_module("hisparse.algorithms").__all__)


_STEP = """
import sys
from hisparse.config import EXTENSIONS, HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.testing import Simulator

gone, left = sys.argv[1], list(EXTENSIONS)
assert gone not in left, left
try:
    HiSparseConfig.from_dict({gone: True})
except ConfigError as error:
    assert f"unknown config key {gone!r}" in str(error), error
else:
    raise SystemExit("the key of a deleted extension was accepted")
sim = Simulator(extensions={name: True for name in left}, page_size=8)
request = sim.request(1, 120, seed=1)
sim.prefill((request, 90))
for _ in range(10):
    sim.decode(request)
print(sim.coordinator.stats().hit_pages)
"""


def extensions() -> list[str]:
    folder = Path(hisparse.__file__).parent / "engine" / "extensions"
    return [m.name for m in pkgutil.iter_modules([str(folder)]) if m.name != "base"]


@pytest.mark.parametrize("name", extensions())
def test_an_extension_can_be_deleted(name: str, tmp_path: Path) -> None:
    """Its file is all there is of it: no other file names it."""
    for package in (hisparse, hisparse_bench):
        source = Path(package.__file__).parent
        shutil.copytree(
            source, tmp_path / source.name, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip
    link = tmp_path / "hisparse" / "_csrc"
    if link.is_symlink():
        link.unlink()
        link.symlink_to(ROOT / "csrc")
    (tmp_path / "hisparse" / "engine" / "extensions" / f"{name}.py").unlink()
    done = subprocess.run(
        [sys.executable, "-c", _STEP, name],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(Path.home()),
             "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_extensions_are_named_in_no_other_file_of_the_core() -> None:
    """But where old keys are answered. What is measured may name them: bench, evaluation."""
    core = [f"hisparse.{x}" for x in ("engine", "memory", "cache", "sglang", "testing")]
    for name in extensions():
        named = {
            module
            for module, tree in TREES.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value == name
        }
        elsewhere = {x for x in named if x.startswith((*core, "hisparse.transformers"))}
        assert elsewhere <= {f"hisparse.engine.extensions.{name}"}
