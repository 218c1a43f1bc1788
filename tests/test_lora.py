"""LoRA in task causal_lm: adapters alone are trained and travel, held against `peft` itself."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from test_causal_lm import FAMILIES, SHARD, logits_of, problem, recipe_of, task_of, texts

import archipel as package
from archipel.errors import UserError
from archipel.train.footprint import look
from archipel.train.replica import layout_of
from archipel.train.task import CPU

os.environ["HF_HUB_OFFLINE"] = "1"

LORA = {"rank": 4, "alpha": 16.0}
TARGETS = {
    "pythia-14m": ["query_key_value"],
    "smollm2-135m": ["q_proj", "v_proj"],
    "qwen3-0.6b": ["q_proj", "v_proj"],
}
"""Those that `peft` has for these kinds of models."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, as a pretrained model's."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("base")
    config = transformers.AutoConfig.for_model(
        "gpt_neox", **FAMILIES["pythia-14m"], vocab_size=257, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    pq.write_table(pa.table({"text": texts(100)}), tmp_path / "documents.parquet")
    return {
        "name": "causal_lm",
        "model": "pythia-14m",
        "config": FAMILIES["pythia-14m"],
        "data": str(tmp_path / "documents.parquet"),
        "tokenizer": "bytes",
        "cache": str(tmp_path / "cache"),
        "sequence": 16,
        "batch_size": 4,
        "valid_sequences": 16,
        "lr": 0.01,
        "lora": LORA,
    }


def adapter_weights(model: Any, targets: list[str], rank: int) -> int:
    """rank · (inputs + outputs) of each layer of these names, in the bare model."""
    layers = [
        module for name, module in model.named_modules() if name.rpartition(".")[2] in targets
    ]
    return sum(rank * sum(layer.weight.shape) for layer in layers)


def split(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base's weights under their own names, and the adapters'."""
    base = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in weights.items()
        if "lora_" not in name
    }
    return base, {name: tensor for name, tensor in weights.items() if "lora_" in name}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_vector_has_the_adapters_weights_alone(name: str, fields: dict[str, Any]) -> None:
    fields = {**fields, "model": name, "config": FAMILIES[name]}
    task, bare = task_of(fields), task_of({**fields, "lora": None}).seeded_model(0)
    count = adapter_weights(bare, TARGETS[name], 4)
    layout = layout_of(task, task.seeded_model(0), CPU)
    assert layout.numel == layout.parameters == count
    whole = sum(parameter.numel() for parameter in bare.parameters())
    said = f"({whole:,} parameters, random weights; trained are {count:,}, adapters of rank 4) on "
    assert said in task.description


def test_a_fresh_model_is_its_base(fields: dict[str, Any]) -> None:
    """B is 0 at first, and the base's weights are drawn before the adapters'."""
    task, plain = task_of(fields), task_of({**fields, "lora": None})
    tokens = task.batches(SHARD, 0)
    bare = plain.seeded_model(3)
    assert torch.equal(logits_of(task.seeded_model(3), tokens), logits_of(bare, tokens))


def test_the_forward_pass_is_the_papers(fields: dict[str, Any]) -> None:
    """W x + (alpha / rank) B A x."""
    layer = task_of(fields).seeded_model(0).gpt_neox.layers[0].attention.query_key_value
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    torch.nn.init.normal_(b)
    x = torch.randn(3, 32)
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 16 / 4 * x @ a.T @ b.T)


@pytest.mark.parametrize("processes", [1, 2])
def test_adapters_are_trained_and_their_base_stays(
    processes: int, base: Path, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Both folders that a run leaves give the logits of what it has trained."""
    transformers, peft = map(importlib.import_module, ("transformers", "peft"))
    fields = {**fields, "model": str(base), "config": {}}
    result = package.simulate(recipe_of(fields), processes=processes, out=tmp_path / "out")
    assert result.summary["final_loss"] < result.evals[0]["loss"] - 0.2
    weights = load_file(result.directory / "weights.safetensors")
    frozen, _ = split(weights)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    assert before.keys() == frozen.keys()
    assert all(torch.equal(frozen[name], tensor) for name, tensor in before.items())

    task = task_of(fields)
    trained, tokens = task.model(), task.batches(SHARD, 0)
    trained.load_state_dict(weights)
    expected = logits_of(trained, tokens)
    assert (logits_of(plain, tokens) - expected).abs().max() > 0.1
    folder = result.directory / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of `transformers`, to `peft`
        adapted = peft.PeftModel.from_pretrained(plain, folder / "adapter")
    assert torch.equal(logits_of(adapted, tokens), expected)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == (str(base), 4)
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(merged).__name__ == "GPTNeoXForCausalLM"
    torch.testing.assert_close(logits_of(merged, tokens), expected)


def test_all_processes_have_the_same_random_base(fields: dict[str, Any], tmp_path: Path) -> None:
    """It is drawn from the seed, in each of them; adapters without it would be of no use."""
    left = []
    for processes in (1, 2):
        recipe = recipe_of(fields, run={"steps": 60, "seed": 5})
        result = package.simulate(recipe, processes=processes, out=tmp_path / str(processes))
        left.append(load_file(result.directory / "weights.safetensors"))
        assert not (result.directory / "model" / "adapter").exists()
    assert all(torch.equal(left[1][name], tensor) for name, tensor in left[0].items())
    drawn = task_of({**fields, "lora": None}).seeded_model(5).state_dict()
    frozen, _ = split(left[0])
    assert drawn.keys() == frozen.keys()
    assert all(torch.equal(frozen[name], tensor) for name, tensor in drawn.items())


def test_a_run_can_write_afterwards(base: Path, fields: dict[str, Any], tmp_path: Path) -> None:
    """By its merged weights, which need no `peft`."""
    fields = {**fields, "model": str(base), "config": {}}
    result = package.simulate(recipe_of(fields), processes=1, out=tmp_path / "out")
    assert package.generate(result.directory, "the cat", tokens=8)


def test_memory_counts_adapters_and_their_base(fields: dict[str, Any]) -> None:
    """The optimizer's state is of the adapters; the base is there once for each copy."""
    task, bare = task_of(fields), task_of({**fields, "lora": None}).model()
    seen, count = look(task), adapter_weights(bare, ["query_key_value"], 4)
    assert seen is not None
    assert seen.vector_bytes == 4 * count
    assert seen.kept_bytes == 4 * sum(parameter.numel() for parameter in bare.parameters())
    counters = 4 * 4  # AdamW counts the steps of each of the four matrices
    assert seen.state_bytes == 2 * 4 * count + counters
    assert seen.activation_bytes is not None


def test_checkpointing_changes_no_gradient(fields: dict[str, Any]) -> None:
    gradients = []
    for checkpointing in (False, True):
        task = task_of({**fields, "gradient_checkpointing": checkpointing})
        model = task.seeded_model(0)
        layer = model.gpt_neox.layers[0].attention.query_key_value
        torch.nn.init.ones_(layer.lora_B.default.weight)
        task.loss(model, task.batches(SHARD, 0)).backward()
        gradients.append([layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad])
    for plain, again in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        (r".*\.mlp\.dense_h_to_4h", ["dense_h_to_4h"]),
        (["dense", "lm_head"], ["dense", "lm_head"]),
    ],
)
def test_layers_can_be_chosen(targets: Any, names: list[str], fields: dict[str, Any]) -> None:
    task = task_of({**fields, "lora": {**LORA, "target_modules": targets}})
    bare = task_of({**fields, "lora": None}).model()
    assert layout_of(task, task.model(), CPU).numel == adapter_weights(bare, names, 4)


# Mistakes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"lora": {"target_modules": ["querykey_value", "dense"]}},
            "task.lora.target_modules: the gpt_neox has no layer 'querykey_value' (did you mean "
            "'query_key_value'?)",
        ),
        (
            {"lora": {"target_modules": "nothing"}},
            "task.lora.target_modules: Target modules nothing not found in the base model.",
        ),
        (
            {"lora": {"target_modules": "("}},
            "task.lora.target_modules: missing ), unterminated subpattern at position 0",
        ),
        (
            {"lora": LORA, "blocks": True},
            "task.lora: a model in stages (pipeline.stages, task.blocks) cannot have adapters; "
            "leave one of them out",
        ),
        (
            {
                "lora": {"target_modules": ["embed_in"]},
                "config": {**FAMILIES["pythia-14m"], "tie_word_embeddings": True},
            },
            "task.lora.target_modules: the embedding and the output layer are one table here, "
            "which cannot have adapters; leave them out, or untie them with task.config = "
            "{tie_word_embeddings: false}",
        ),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], said: str, fields: dict[str, Any]) -> None:
    assert problem({**fields, **change}).startswith(said)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            {"r": 8},
            "task.lora.r: unknown key 'r'; allowed: rank, alpha, dropout, target_modules",
        ),
        ({"rank": 0}, "task.lora.rank = 0: should be greater than or equal to 1"),
    ],
)
def test_a_wrong_setting_is_named(lora: Any, said: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        package.simulate(recipe_of({**fields, "lora": lora}))
    assert str(error.value) == said


def test_without_peft_the_extra_is_told(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    said = problem(fields)
    assert said.startswith("task.lora needs peft, which cannot be imported")
    assert said.endswith("install it with: pip install 'archipel[hf]'")
