"""Tasks of lm-eval through hisparse: right is what a tiny model by itself says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hisparse.errors import ConfigError
from hisparse.eval.method import Method, parse_methods
from hisparse.eval.texts import read_text
from hisparse.transformers import disable, enable
from tests.command import Command
from tests.server.tiny_models import tiny_model
from tests.transformers.hf_models import GREEDY, byte_tokenizer, model

# What `make lm-eval` installed, apart: each import of transformers would read parts of it.
sys.path.append(str(Path(sys.prefix) / "lm-eval"))
pytest.importorskip("lm_eval", reason="not installed: make lm-eval, which make test does")

from lm_eval.models.huggingface import HFLM

from hisparse.eval.lm_eval_run import HiSparseLM, load_tasks, run_tasks

NEW, DOCUMENTS = 12, 6
TASK = f"""
task: needles
dataset_path: json
dataset_kwargs: {{data_files: {{test: FOLDER/needles.json}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: {NEW}, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def net() -> Any:
    return model("llama")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, net: Any, tokenizer: Any) -> Path:
    """Documents of 600 tokens, each with what the model by itself says next as its answer."""
    folder = tmp_path_factory.mktemp("tasks")
    text = read_text("moby_dick").encode("ascii", "ignore").decode()
    rows = []
    for number in range(DOCUMENTS):
        stretch = text[2000 * number :][:540]
        asked = f"{stretch[:200]} The code is {number}7. {stretch[200:]} The code is"
        ids = torch.tensor([tokenizer(asked).input_ids])
        said = net.generate(ids, max_new_tokens=NEW, **GREEDY)[0, ids.shape[1] :]
        rows.append({"text": asked, "answer": tokenizer.decode(said, skip_special_tokens=True)})
    (folder / "needles.json").write_text(json.dumps(rows))
    file = folder / "needles.yaml"
    file.write_text(TASK.replace("FOLDER", str(folder)))
    return file


@pytest.fixture(scope="module", autouse=True)
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Documents are not stored in the home of who runs the tests."""
    import datasets
    import lm_eval.evaluator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("stored"))
        # It asks pip and the system for versions, some seconds each time.
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        yield


def load(file: Path) -> list[Any]:
    return load_tasks([str(file)], tokenizer="", contexts=[1024])


def test_dense_says_what_the_model_says_by_itself(net: Any, tokenizer: Any, task: Path) -> None:
    needles = load(task)[0]
    needles.build_all_requests(rank=0, world_size=1)
    assert len(needles.instances) == DOCUMENTS
    alone = HFLM(pretrained=net, tokenizer=tokenizer, batch_size=1)
    expected = alone.generate_until(needles.instances, disable_tqdm=True)
    enable(net, Method.dense().config, max_length=1024)
    try:
        dense = HiSparseLM(net, tokenizer, Method.dense())
        assert dense.generate_until(needles.instances, disable_tqdm=True) == expected
        assert dense.selections == 0
        streaming = HiSparseLM(net, tokenizer, parse_methods(["streaming"], [96], [])[0])
        said = streaming.generate_until(needles.instances, disable_tqdm=True)
        assert said != expected
        steps = DOCUMENTS * (NEW - 1)
        layers, heads = net.config.num_hidden_layers, net.config.num_key_value_heads
        assert streaming.selections in (steps * layers, steps * layers * heads)
    finally:
        disable(net)


def test_each_method_has_its_scores(net: Any, tokenizer: Any, task: Path) -> None:
    before = net.config._attn_implementation
    methods = parse_methods(
        ["streaming", "quest"], [96], ['{"algorithm": "oracle", "budget": 896}']
    )
    lines = run_tasks(net, tokenizer, methods, load(task))
    assert net.config._attn_implementation == before
    assert [(line["method"], line["budget"]) for line in lines[1:]] == [
        ("streaming", 96),
        ("quest", 96),
        ("oracle", 896),
    ]
    dense, streaming, quest, whole = lines
    assert (dense["algorithm"], dense["budget"]) == ("dense", None)
    assert dense["score"] == whole["score"] == 1
    assert whole["selections"] == dense["selections"] == 0, "contexts within the budget"
    assert streaming["score"] < 1
    assert min(streaming["selections"], quest["selections"]) > 0
    for line in lines:
        assert (line["task"], line["metric"], line["n"]) == ("needles", "exact_match", DOCUMENTS)
    limited = run_tasks(net, tokenizer, [], load(task), limit=2)
    assert [line["n"] for line in limited] == [2]


def broken(task: Path, old: str, new: str) -> Path:
    file = task.with_name("broken.yaml")
    file.write_text(task.read_text().replace(old, new))
    return file


def test_what_only_reads_a_prompt_is_refused(task: Path) -> None:
    file = broken(task, "generate_until", "loglikelihood")
    with pytest.raises(ConfigError, match="'needles' is scored by loglikelihood.*generate_until"):
        load(file)


def test_documents_out_of_reach_and_tasks_that_are_none(task: Path) -> None:
    with pytest.raises(ConfigError, match="documents of .* out of reach: Unable to find"):
        load(broken(task, "needles.json", "none.json"))
    with pytest.raises(ConfigError, match=r"unknown task 'x\.yaml'; expected names.*YAML"):
        load(Path("x.yaml"))


def test_the_command_prints_the_scores(
    tmp_path: Path, net: Any, tokenizer: Any, task: Path, command: Command
) -> None:
    net.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    line = ["eval", "--model", str(tmp_path), "--algorithm", "streaming", "--budget", "96"]
    result = command.json(*line, "--tasks", str(task), "--limit", "2")
    assert [x["method"] for x in result["tasks"]] == ["dense", "streaming"]
    assert result["tasks"][0]["score"] == 1
    assert {x["n"] for x in result["tasks"]} == {2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "none.yaml"], "unknown task 'none.yaml'"),
        (["--tasks", "x", "--limit", "0"], "--limit: got '0', expected a number of at least 1"),
        (["--limit", "3"], "--limit: got 3 with built-in tasks"),
        (["--tasks", "copy", "--limit", "3"], "--limit: got 3 with built-in tasks"),
        (["--tasks", "copy,ruler"], "--tasks: got copy, ruler, expected some of needle, multikey,"),
    ],
)
def test_a_command_that_cannot_be(options: list[str], message: str, command: Command) -> None:
    assert message in command.refused("eval", "--model", str(tiny_model("llama")), *options)


def test_without_lm_eval_the_command_says_what_to_install() -> None:
    # As where it is not installed: None stands for a package that cannot be found.
    code = "import sys; sys.modules['lm_eval'] = None; import hisparse.cli as c; sys.exit(c.main())"
    line = [sys.executable, "-c", code, "eval", "--tasks", "ruler"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected some of needle, multikey, variable, qa, copy, turns," in done.stderr
    assert "pip install 'hisparse[lm-eval]'" in done.stderr
    assert done.stderr.count("\n") == 1
