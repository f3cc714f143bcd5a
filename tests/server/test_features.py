"""A feature is its file or folder: without it a server works, and refuses what it serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Server
from parts import more
from tiny_models import tiny_model
from workload import tokens

import hisparse
from hisparse.sglang import features
from scripts.model_families import FAMILIES

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = [feature.name for feature in features.all_features()]
#: What each feature serves, beside a plain start: flags and keys.
SERVED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cuda_graphs": ((), {"cuda_graph": True}),
    "disaggregation": (("--disaggregation-mode", "decode"), {}),
    "dsa": ((), {"algorithm": "dsa", "page_size": 1, "budget": 64}),
    "hybrids": (("--disable-radix-cache",), {}),
    "prompt_queries": ((), {"algorithm": "snapkv"}),
    "replicas": (("--dp-size", "2"), {}),
    "speculation": (("--speculative-algorithm", "NGRAM"), {}),
    "storage": ((), {"storage": {"path": "/somewhere"}}),
}
#: Features without which the same start is served, and lacks something.
OPTIONAL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "prometheus": (("--enable-metrics",), {}),
}


def package_without(folder: Path, *names: str) -> Path:
    """A folder with the package, in which some features are deleted."""
    source, copy = Path(hisparse.__file__).parent, folder / "hisparse"
    copy.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name not in ("sglang", "__pycache__"):
            (copy / entry.name).symlink_to(entry)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source / "sglang", copy / "sglang", ignore=ignored)
    for name in names:
        path = copy / "sglang" / "features" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink()
    return folder


def line(model: Path, flags: tuple[str, ...] = (), config: object = None) -> list[str]:
    given = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", *flags]
    given += ["--attention-backend", "hisparse"]
    return given + (["--hisparse-config", json.dumps(config)] if config else [])


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Names of features, and what became of starts, by the feature that is deleted; "": none.

    "no flag" has hooks and modules of a start without hisparse.
    """
    root = tmp_path_factory.mktemp("packages")
    llama = tiny_model("llama")
    hybrid = next(x for x in FAMILIES if x.name == "LFM2").write(root)
    work = []
    for name in ("", *NAMES):
        flags, config = (SERVED | OPTIONAL).get(name, ((), {}))
        model = hybrid if name == "hybrids" else llama
        package = package_without(root / (name or "whole"), *filter(None, [name]))
        work.append((str(package), [line(llama), line(model, flags, config)]))
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "HISPARSE_IN_USE": ""}
    environment |= {"PYTHONWARNINGS": "ignore"}
    script = Path(__file__).parent / "without_features.py"
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(work)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("[")]
    return dict(zip(("no flag", "", *NAMES), found, strict=True))


def test_without_a_flag_it_hooks_and_imports_no_more_than_needed(resolved: dict[str, Any]) -> None:
    """To see the arguments. Each process of each server of the machine pays for what this loads."""
    hooks, modules = resolved["no flag"]
    assert hooks == [
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "sglang.srt.server_args.prepare_server_args",
    ]
    ours = {name for name in modules if name.startswith("hisparse.")}
    assert "hisparse.sglang.plugin" in ours
    rooms = {name.split(".")[1] for name in ours}
    assert not rooms & {"adapters", "algorithms", "cache", "engine", "kernels", "memory"}
    # Those that need no plug-in either come with SGLang's registry of attention backends.
    others = {name.split(".")[0] for name in modules} - {"hisparse", "sglang"}
    assert not others & {"numpy", "torch", "psutil", "rich"}


def test_a_plain_server_has_few_hooks(resolved: dict[str, Any]) -> None:
    """Each is a function of SGLang that may change. On a GPU two more capture steps."""
    names, (plain, _) = resolved[""]
    assert names == NAMES
    assert len(plain) + len(features_by_name("cuda_graphs").hooks) <= 12


def features_by_name(name: str) -> Any:
    return next(feature for feature in features.all_features() if feature.name == name)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_feature_a_plain_server_starts(name: str, resolved: dict[str, Any]) -> None:
    left, (plain, _) = resolved[name]
    assert left == [other for other in NAMES if other != name]
    assert plain == resolved[""][1][0]


@pytest.mark.parametrize("name", SERVED)
def test_what_a_deleted_feature_serves_is_refused_in_one_line(
    name: str, resolved: dict[str, Any]
) -> None:
    refusal = resolved[name][1][1]
    assert refusal.startswith("hisparse: error: ") and "\n" not in refusal
    assert f" needs the feature {name!r} of hisparse.sglang, which is not installed; " in refusal


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_server_without_a_feature_that_only_adds_starts(
    name: str, resolved: dict[str, Any]
) -> None:
    hooks = set(resolved[name][1][1])
    assert not hooks & features_by_name(name).hooks.keys()
    assert hooks >= set(resolved[""][1][0])


@pytest.mark.parametrize("feature", features.all_features(), ids=NAMES)
def test_a_feature_has_the_name_of_its_module(feature: Any) -> None:
    assert type(feature).__module__ == f"hisparse.sglang.features.{feature.name}"


@more
def test_a_server_without_any_feature_gives_the_same_tokens(
    log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes, and steps that select, of several requests."""
    prompts = [tokens(n, seed=n) for n in (300, 40, 701, 300)]
    answers = []
    for name in ("all", "none"):
        options: dict[str, Any] = {"config": {"budget": 128}}
        if name == "none":
            package = package_without(tmp_path, *NAMES)
            options |= {"python_path": [package], "forked": False}
            monkeypatch.chdir(package)
        flags = ("--max-total-tokens", "4000", "--max-running-requests", "4")
        with Server(tiny_model("llama"), log_dir / f"{name}.log", *flags, **options) as server:
            answers.append([answer.ids for answer in server.generate_many(prompts, 40)])
            ours = [metric for metric in server.metrics() if metric.startswith("hisparse")]
            assert bool(ours) is (name == "all"), "the copy has no metrics"
    assert answers[0] == answers[1]
