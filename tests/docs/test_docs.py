"""README and docs agree with the code: names, defaults, commands, links and examples."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from hisparse.algorithms import ALGORITHMS
from hisparse.cli import algorithms, bench, build, check, doctor, kvcm, plan, storage, trace
from hisparse.cli import eval as eval_command
from hisparse.config import EXTENSIONS, KV_FORMATS, HiSparseConfig
from hisparse.registry import Registry
from hisparse.testing import Simulator
from scripts.gpu_check import PARTS as GPU_PARTS
from scripts.make_reference import make_reference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
#: Pages about what is there; CHANGELOG.md names the past.
PAGES = sorted(
    {
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / f"{x}.md" for x in ("README", "CONTRIBUTING", "SECURITY")),
    }
)


def _section(title: str) -> str:
    """The reference below a heading, up to the next heading of any level."""
    return re.split(r"\n#", REFERENCE.partition(f"# {title}\n")[2])[0]


def _rows(title: str) -> dict[str, list[str]]:
    """The cells of a section's table, by the name in the first one."""
    lines = [line for line in _section(title).splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line.strip("| ").split(" | ") for line in lines}


def test_the_reference_is_what_the_classes_say() -> None:
    assert make_reference() == REFERENCE, "make docs"


def test_every_key_has_a_row_with_its_meaning() -> None:
    rows = _rows("Keys")
    assert list(rows) == [f.name for f in fields(HiSparseConfig) if f.name != "extensions"]
    assert all(len(cells) == 4 and cells[3] for cells in rows.values())
    assert rows["budget"][1:3] == ["integer", "`2048`"]
    assert rows["cuda_graph"][1:3] == ['`"auto"`, `true`, `false`', '`"auto"`']


@pytest.mark.parametrize("registry", [EXTENSIONS, ALGORITHMS], ids=lambda registry: registry.kind)
def test_every_option_has_a_row(registry: Registry[Any]) -> None:
    built_in = [name for name in registry if registry.get(name).__module__.startswith("hisparse.")]
    assert built_in
    for name in built_in:
        cls = registry.get(name)
        options = [f.name for f in fields(getattr(cls, "options_type", cls))]
        assert list(_rows(f"`{name}`")) == options


def test_metrics_of_the_server_and_of_extensions_are_listed() -> None:
    rows = _rows("Metrics")
    assert rows["hisparse:hit_pages_total"][1] == ""
    assert rows["hisparse:trace_steps_total"][1] == "`trace`"
    assert rows["hisparse:hit_ratio"][1] == ""


def _found(pattern: str) -> list[tuple[str, str]]:
    """Page and text of each match, in an order that all workers of pytest share."""
    return sorted(
        {(page.name, text) for page in PAGES for text in re.findall(pattern, page.read_text())}
    )


@pytest.mark.parametrize(("page", "text"), _found(r"(?s)--(?:hisparse-)?config '({[^.].*?})'"))
def test_configurations_in_the_text_can_be_read(page: str, text: str) -> None:
    if "NAME" in text or "..." in text:
        text = "{}"  # a pattern to fill in
    assert HiSparseConfig.parse(text).budget


@pytest.mark.parametrize(("page", "names"), _found(r"\bhisparse bench ([\w|\\-]+)"))
def test_benches_in_the_text_exist(page: str, names: str) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    bench.add_parser(commands)
    benches = commands.choices["bench"]._subparsers._group_actions[0].choices
    assert set(names.replace("\\", "").split("|")) <= set(benches)


def test_every_command_has_a_row() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    for module in (
        algorithms, bench, build, check, doctor, eval_command, kvcm, plan, storage, trace,
    ):  # fmt: skip
        module.add_parser(commands)
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `hisparse (\w+)", index, re.MULTILINE))
    assert listed == set(commands.choices)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    """To files, and headings in them; from docs/ only to docs/, which is what the site has."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text())
    assert not [file for file, _ in links if not (page.parent / file).exists()]
    targets = [((page.parent / file if file else page), anchor) for file, anchor in links if anchor]
    assert not [anchor for target, anchor in targets if anchor not in _anchors(target)]
    if page.parent.name == "docs":
        assert not [file for file, _ in links if ".." in file]


def _nav(entries: list[Any]) -> list[str]:
    """The files of mkdocs.yml's menu, in its order."""
    files = []
    for entry in entries:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        files += _nav(inner) if isinstance(inner, list) else [inner]
    return files


def test_every_page_is_in_the_menu_and_in_the_index() -> None:
    pages = sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(_nav(settings["nav"])) == pages, "mkdocs.yml"
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {"README.md", *re.findall(r"\]\(([\w-]+\.md)\)", index)}
    assert sorted(listed) == pages, "docs/README.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_files_in_the_text_exist(page: Path) -> None:
    """Named from the root or, in the middle of a text about the package, from ``hisparse/``."""
    named = re.findall(r"`([\w/.-]+/[\w.-]+\.(?:py|cpp|cu|cuh|sh|md))`", page.read_text())
    folders = (ROOT, ROOT / "hisparse", ROOT / "hisparse" / "kernels")
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]


def test_make_commands_have_a_recipe() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(page.read_text() for page in PAGES)
    targets = {f"test-{part}" for part in re.findall(r"(?<!gpu-check )\bPART=(\w+)", text)}
    targets |= set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE))
    for target in targets:
        assert re.search(rf"^{target}:.*\n\t", makefile, re.MULTILINE), target
    assert set(re.findall(r"gpu-check PART=([\w-]+)", text)) <= set(GPU_PARTS)
    named = re.findall(r"\b(?:tests|scripts)/[\w/.-]+", makefile)
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_the_algorithm_in_the_readme_is_the_example() -> None:
    example = (ROOT / "examples" / "hisparse-knorm" / "hisparse_knorm.py").read_text()
    (block,) = re.findall(r"```python\n(@register_algorithm.*?)```", README, re.DOTALL)
    assert block in example


def _contributing(heading: str) -> str:
    """The file that a section of CONTRIBUTING shows."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    (block,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    return str(block)


def test_the_extension_in_contributing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXTENSIONS, "_entries", dict(EXTENSIONS._entries))
    exec(_contributing("## Add an extension"), ModuleType("continued").__dict__)
    sim = Simulator(extensions={"continued": True})
    request = sim.request(1, 120, seed=1)
    sim.prefill((request, 100))
    for _ in range(3):
        sim.decode(request)
    first = sim.coordinator.stats().extensions["continued_selections"]
    assert first == 2 * sim.spec.num_layers
    sim.prefill((request, 5))
    sim.decode(request)
    assert sim.coordinator.stats().extensions["continued_selections"] == first


def test_the_kv_dtype_in_contributing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KV_FORMATS, "_entries", dict(KV_FORMATS._entries))
    exec(_contributing("## Add a KV dtype"), ModuleType("bfloat16").__dict__)
    sim = Simulator(kv_cache_dtype="bfloat16", budget=96, device_buffer=96, max_row=96)
    form = sim.manager.host.format
    assert 2 * form.token_bytes == form.plain.token_bytes
    request = sim.request(1, 90, seed=1)
    read = replace(request, **form.as_read(request.k, request.v)._asdict())
    sim.prefill((request, 30))
    sim.prefill((request, 40))
    for _ in range(20):
        out = sim.decode(request)
        want = sim.dense(read, request.done - 1, request.done).float()
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def _measured_steps() -> dict[str, Any]:
    """What an H200 measured, by the name of the step."""
    result = json.loads((ROOT / "bench/results/2026-11-26-gpu-h200-2b8255a.json").read_text())
    return {x["step"]: x.get("output") for x in result["steps"]}


def test_the_times_of_kernels_are_the_bounds_and_what_was_measured() -> None:
    bounds = json.loads((ROOT / "tests/kernels/timing/bounds.json").read_text())
    steps, lines = _measured_steps(), []
    (latents,) = (steps[step]["triton"] for step in steps if "of 2,048 latents" in step)
    kernels = {
        "sketch_score": "::sketch_score_",
        "select": "::select_",
        "paged_attention": "_attend",
    }
    for requests in ("1", "8", "32"):
        (case,) = steps[f"bench decode 128k x {requests}"]["cases"]
        pairs = [
            (bounds["128"][requests][name], us)
            for name, part in kernels.items()
            for kernel, us in case["params"]["kernels_us"].items()
            if part in kernel
        ]
        pairs.append((bounds["576"][requests]["paged_attention"], latents[requests]))
        cells = [f"{computed:.0f}, {measured:.0f}" for computed, measured in pairs]
        lines.append(f"| {requests} | {' | '.join(cells)} |")
    assert "\n".join(lines) in (ROOT / "docs/kernels.md").read_text(), lines


def test_what_a_row_has_already_is_what_the_traces_say() -> None:
    """In docs/trace.md, and in docs/misses.md why no pages are guessed ahead."""
    table, pages = [], (ROOT / "docs/trace.md").read_text()
    again, fewer, most = [], [], 0.0
    for name in ("16k-94da736", "32k-88c349a"):
        file = ROOT / f"bench/results/2026-11-23-trace-qwen-{name}.json"
        trace = json.loads(file.read_text())["traces"][0]
        assert trace["buffers"][:3] == [2048, 4096, 8192]
        overlap, lru = trace["adjacent_overlap"], trace["policies"]["lru"]
        cells = [f"{100 * share:.1f}%" for share in (overlap, *lru["hit_ratio"][:3])]
        table.append(f"| {' | '.join(cells)} |")
        again.append(f"{100 * overlap:.0f}")
        most = max(most, abs(overlap - lru["hit_ratio"][0]))
        _, near, far = lru["bytes_per_step"][:3]
        fewer.append(f"{100 * (1 - far / near):.0f}")
    assert all(f", budget 2,048 {line}" in pages for line in table), table
    assert most < 0.005
    text = " ".join((ROOT / "docs/misses.md").read_text().split())
    for words in (
        f"selects {again[0]} and {again[1]}% of its pages again",
        f"{fewer[0]} and {fewer[1]}% fewer bytes",
    ):
        assert words in text, words


def test_the_figures_of_diprs_indexes_are_the_results() -> None:
    folder, lines, steps = ROOT / "bench/results", [], dict[str, list[str]]()
    (indexes,) = folder.glob("*-range-indexes-*.json")
    for name, row in json.loads(indexes.read_text())["indexes"].items():
        cells = f"{row['build_s of 8 heads']:.3f} | {row['query_us of a head']:.0f}"
        recall = f"{row['recall']['mean']:.3f} | {row['recall']['least']:.3f}"
        lines.append(f"| {name} | {cells} | {recall} |")
    for kind in ("avx512", "avx2"):
        (file,) = folder.glob(f"*-range-step-*-{kind}-*.json")
        for row in json.loads(file.read_text())["steps"]:
            flat, sketch = row["step_ms"]["flat"], row["step_ms"]["sketch"]
            cell = f"{flat:.2f}, {sketch:.2f}: {flat / sketch:.2f}"
            steps.setdefault(row["dtype"], []).append(cell)
    lines += [f"| {dtype} | {' | '.join(cells)} |" for dtype, cells in steps.items()]
    page = (folder / "README.md").read_text()
    assert all(f"\n{line}\n" in page for line in lines), lines


def test_where_the_cpu_would_be_faster_follows_from_the_loads() -> None:
    """Bytes of a layer over what the loads take beyond a call of 20 us; in docs/misses.md."""
    steps, lines = _measured_steps(), []
    for requests in (1, 8, 32):
        params = steps[f"bench decode 128k x {requests}"]["cases"][0]["params"]
        (loads,) = (us for name, us in params["kernels_us"].items() if "GatherPages" in name)
        pages = params["budget"] // params["page_size"] - 1
        num_bytes = requests * pages * params["miss_ratio"] * params["kv_heads"] * 16 * 2 * 256
        cells = [f"{requests}", f"{loads:.0f} us"]
        for us in (loads, num_bytes / 25e3):
            cells.append(f"{num_bytes / 1e3 / (us - 20):.0f}" if us > 20 else "never")
        lines.append(f"| {' | '.join(cells)} |")
    assert "\n".join(lines) in (ROOT / "docs/misses.md").read_text()


def test_the_methods_of_the_manager_are_on_the_page_of_its_interface() -> None:
    page = (ROOT / "docs/kvcm-reference.md").read_text()
    proto = (ROOT / "hisparse/kvcm/kvcm.proto").read_text()
    for service, body in re.findall(r"^service (\w+) \{(.*?)^\}", proto, re.M | re.S):
        (listed,) = re.findall(rf"^\| {service} \| (.*) \|$", page, re.M)
        methods = [name[0].lower() + name[1:] for name in re.findall(r"rpc (\w+)", body)]
        assert re.findall(r"`(\w+)`", listed) == methods
