"""From a parquet file through the command line to lm-eval: tiny models of three families, trained
by HALoS, by NoLoCo, and by NoLoCo in two stages, simulated and live. Nothing here asks the hub.

Live, each family and each way of training is there once; ARCHIPEL_LONG=1 has all nine.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from test_causal_lm import FAMILIES, texts

import archipel as package
from archipel.errors import UserError

os.environ["HF_HUB_OFFLINE"] = "1"

WAYS: dict[str, dict[str, Any]] = {
    "halos": {"method": {"name": "halos", "inner_steps": 4, "accumulate": 2}},
    "noloco": {"method": {"name": "noloco", "inner_steps": 4}},
    "noloco-stages": {
        "method": {"name": "noloco", "inner_steps": 4},
        "pipeline": {"stages": 2, "micro_batches": 2},
    },
}
ALL = [(family, way) for family in FAMILIES for way in WAYS]
LIVE = ALL if os.environ.get("ARCHIPEL_LONG") == "1" else list(zip(FAMILIES, WAYS, strict=True))
ENDS = [" mat", " far", " dog", " home"]
"""Of which the tenth of a sentence's words is one in the documents, and none in what is wrong."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parquet file of documents, and a task of lm-eval: which of two endings is a word?"""
    path = tmp_path_factory.mktemp("data")
    pq.write_table(pa.table({"text": texts(100)}), path / "documents.parquet")
    rows = [
        {"start": "the cat sat on the", "ends": [end, " zxq"][:: 1 - 2 * (i % 2)], "right": i % 2}
        for i, end in enumerate(ENDS * 5)
    ]
    (path / "ends.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "ends",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path / "ends.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{start}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    (path / "ends.yaml").write_text(yaml.safe_dump(task))
    return path


def recipe(folder: Path, family: str, way: str) -> Path:
    fields = {
        **WAYS[way],
        "topology": {
            "regions": {"a": [1.0, 1.0], "b": [1.0, 1.0]},
            "default": {"bandwidth_gbit_s": 1.0},
        },
        "profile": {"model_bytes": 10**6, "step_time_s": 0.1},
        "task": {
            "name": "causal_lm",
            "model": family,
            "config": {**FAMILIES[family], "tie_word_embeddings": False},
            "data": str(folder / "documents.parquet"),
            "tokenizer": "bytes",
            "cache": str(folder / "cache"),
            "sequence": 16,
            "batch_size": 4,
            "valid_sequences": 16,
            "lr": 0.01,
        },
        "run": {"steps": 240, "evaluations": 1},
    }
    path = folder / f"{family}-{way}.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def check(archipel: Any, out: Path, folder: Path) -> None:
    """What a run has left can be loaded and scored, and has learnt something."""
    [run] = out.glob("*-seed0")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] or one["replica_loss"] for one in metrics if one["kind"] == "eval"]
    assert losses[-1] < losses[0] - 1
    model = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
        run / "model"
    )
    assert model.num_parameters() > 10_000
    answer = archipel("evaluate", out, "--tasks", folder / "ends.yaml", "--json")
    assert answer.code == 0, answer.err
    [score] = json.loads(answer.out.splitlines()[-1])
    assert (score["run"], score["task"], score["documents"]) == (run.name, "ends", 20)
    assert score["metric"] == "acc"
    assert score["value"] > 0.9  # by chance half
    p = score["value"]
    assert score["stderr"] == pytest.approx((p * (1 - p) / 19) ** 0.5)


@pytest.mark.parametrize(("family", "way"), ALL)
def test_a_simulated_run_leaves_a_model_that_lm_eval_scores(
    archipel: Any, family: str, way: str, folder: Path, tmp_path: Path
) -> None:
    answer = archipel("run", recipe(folder, family, way), "--processes", 1, "--out", tmp_path)
    assert answer.code == 0, answer.err
    check(archipel, tmp_path, folder)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), LIVE)
def test_so_does_a_live_run(
    archipel: Any, family: str, way: str, folder: Path, tmp_path: Path
) -> None:
    answer = archipel("launch", recipe(folder, family, way), "--out", tmp_path)
    assert answer.code == 0, answer.err
    check(archipel, tmp_path, folder)


# Writing


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    path = recipe(folder, "pythia-14m", "halos")
    return package.simulate(path, processes=1, out=folder / "runs").directory


def test_the_likeliest_text_is_that_of_transformers(trained: Path) -> None:
    """Token by token, by the logits."""
    transformers = importlib.import_module("transformers")
    torch = importlib.import_module("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "model").eval()
    numbers = tokenizer("the cat").input_ids
    for _ in range(12):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([numbers])).logits
        numbers.append(int(logits[0, -1].argmax()))
    expected = tokenizer.decode(numbers[len(tokenizer("the cat").input_ids) :])
    assert package.generate(trained, "the cat", tokens=12) == expected


def test_what_is_drawn_follows_the_seed(trained: Path) -> None:
    texts = [
        package.generate(trained, "", tokens=30, temperature=1.0, seed=seed) for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_command_line_writes_on(archipel: Any, trained: Path) -> None:
    answer = archipel("generate", trained, "--prompt", "the", "--tokens", 8)
    assert answer.code == 0
    assert answer.out == "the" + package.generate(trained, "the", tokens=8) + "\n"


# Mistakes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tokens", 0), "--tokens 0: must be at least 1"),
        (("--tokens", 4000), "--tokens 4000: the model takes 2048 tokens at most"),
        (("--temperature", -1), "--temperature -1.0: must be 0 or more"),
    ],
)
def test_a_mistake_of_generate_is_one_line(
    archipel: Any, trained: Path, options: tuple[object, ...], said: str
) -> None:
    answer = archipel("generate", trained, "--prompt", "the", *options)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tasks", "helaswag"), "no task of that name (did you mean 'hellaswag'?)"),
        (("--tasks", "nowhere.yaml"), "there is no file 'nowhere.yaml'"),
        (("--tasks", ","), "name at least one task of lm-eval"),
        (("--tasks", "ends.yaml", "--limit", 0), "--limit 0: must be at least 1"),
    ],
)
def test_a_mistake_of_evaluate_is_one_line(
    archipel: Any, trained: Path, options: tuple[object, ...], said: str
) -> None:
    answer = archipel("evaluate", trained, *options)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_json_has_null_where_a_score_is_no_number(
    archipel: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = package.Score("run", "task", "perplexity", float("inf"), None, 1, 0, False)
    monkeypatch.setattr("archipel.finished.evaluate", lambda *_, **__: [score])
    answer = archipel("evaluate", trained, "--tasks", "any", "--json")
    assert answer.code == 0
    assert json.loads(answer.out)[0]["value"] is None


def test_where_there_is_no_model_it_is_told(folder: Path, tmp_path: Path, trained: Path) -> None:
    with pytest.raises(UserError, match="no run has ended there"):
        package.generate(tmp_path, "the")
    with pytest.raises(UserError, match="there is no folder 'nowhere'"):
        package.generate("nowhere", "the")
    recipe = {"method": "diloco", "task": "none", "topology": "one-node", "run": {"steps": 200}}
    package.simulate(recipe, out=tmp_path / "none")
    with pytest.raises(UserError, match="no folder 'model' in diloco-seed0; task causal_lm leaves"):
        package.generate(tmp_path / "none", "the")


def test_a_folder_that_cannot_be_used_is_one_line(trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained / "model" / "config.json", tmp_path)
    with pytest.raises(UserError, match="no language model with a tokenizer: "):
        package.generate(tmp_path, "the")


def test_of_several_runs_one_is_to_be_named(trained: Path, tmp_path: Path) -> None:
    for name in ("one-seed0", "two-seed0"):
        (tmp_path / name).symlink_to(trained)
    with pytest.raises(UserError, match="holds several runs; name one of one-seed0, two-seed0"):
        package.generate(tmp_path, "the")
