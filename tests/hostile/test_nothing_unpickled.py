"""No file can run code: tensors are read as safetensors, everything else as text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
#: Modules that build objects from bytes, and the functions that do so in others.
_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
_CALLS = {
    "torch.load", "np.load", "numpy.load", "torch.jit.load", "torch.package.PackageImporter",
    "yaml.load", "yaml.unsafe_load", "pd.read_pickle", "eval", "exec",
}  # fmt: skip


def code_from_files(source: str) -> list[str]:
    """What a module imports or calls that can turn bytes into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in _MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


@pytest.mark.parametrize("folder", ["hisparse", "bench", "scripts", "examples"])
def test_nothing_is_unpickled(folder: str) -> None:
    files = sorted((_ROOT / folder).rglob("*.py"))
    assert files
    assert not {
        str(file): found for file in files if (found := code_from_files(file.read_text("utf-8")))
    }


def test_what_would_be_found() -> None:
    source = "import pickle\nfrom dill import loads\ntorch.load(x)\nnp.load(x, allow_pickle=True)\n"
    assert len(code_from_files(source)) == 5
