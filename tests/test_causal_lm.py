"""Task causal_lm: documents packed and dealt out, models of `transformers` on both clocks, and the
folder that others load. Nothing here asks the hub.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

import archipel as package
from archipel.errors import UserError
from archipel.train.configs import CausalLmTask
from archipel.train.data import Shard, shards_of
from archipel.train.documents import Source
from archipel.train.packed import Packed, dealt, packed
from archipel.train.shapes import SHAPES
from archipel.train.task import Task, make_task
from archipel.train.tokenizer import encode, load_tokenizer, size_of, train_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of huggingface_hub


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "pythia-14m": {**TINY, "intermediate_size": 64},
    "smollm2-135m": {**TINY, "intermediate_size": 64, "num_key_value_heads": 1},
    "qwen3-0.6b": {**TINY, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16},
}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "the", "dog", "ran", "far", "from", "home"]
SHARD = Shard(0, 1, 0, 1, seed=0)


def texts(count: int, words: int = 40) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, words)) for _ in range(count)]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 100 documents, half of them in each of two languages."""
    path = tmp_path_factory.mktemp("data") / "documents.parquet"
    pq.write_table(pa.table({"text": texts(100), "language": ["x", "y"] * 50}), path)
    return str(path)


@pytest.fixture
def fields(parquet: str, tmp_path: Path) -> dict[str, Any]:
    """A small task's settings."""
    return {
        "name": "causal_lm",
        "model": "pythia-14m",
        "config": FAMILIES["pythia-14m"],
        "data": parquet,
        "tokenizer": "bytes",
        "cache": str(tmp_path / "cache"),
        "sequence": 16,
        "batch_size": 4,
        "valid_sequences": 16,
    }


def task_of(fields: Mapping[str, Any]) -> Task:
    return make_task(CausalLmTask.model_validate(fields))


def problem(fields: Mapping[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        task_of(fields)
    return str(error.value)


def recipe_of(fields: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "method": {"name": "halos", "inner_steps": 4, "accumulate": 2},
        "topology": {
            "regions": {"a": [1.0, 1.0], "b": [1.0, 0.5]},
            "default": {"bandwidth_gbit_s": 1.0},
        },
        "profile": {"model_bytes": 10**6, "step_time_s": 0.1},
        "task": dict(fields),
        "run": {"steps": 200, "evaluations": 2},
        **changes,
    }


# Epochs


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 4])
def test_in_an_epoch_each_sequence_comes_once_whatever_the_number_of_workers(
    workers: int, size: int
) -> None:
    """23 sequences of which the first token tells the number; three epochs of each worker."""
    tokens = Packed((np.arange(23 * 5 + 1),), np.arange(6), ("",), 1, "")
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(3)}
    for rank, shard in enumerate(shards_of(["a"] * workers, seed=3)):
        share = len(range(rank, 23, workers))
        batches = [tokens.train_batch(shard, i, size, 5) for i in range(-(-3 * share // size))]
        firsts = torch.cat(batches)[: 3 * share, 0].tolist()
        for epoch in range(3):
            seen[epoch].update(first // 5 for first in firsts[epoch * share : (epoch + 1) * share])
    assert all(counts == Counter(range(23)) for counts in seen.values())


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return dealt(50, 0, 1, seed, range(50 * number, 50 * (number + 1)))

    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)


def test_a_sequence_is_its_tokens_and_the_one_behind_them() -> None:
    tokens = Packed((np.arange(100),), np.arange(1000, 1050), ("",), 1, "")
    batch = tokens.train_batch(SHARD, 0, 3, 8)
    assert batch.shape == (3, 9)
    assert batch.dtype == torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(9).expand(3, 9))
    assert set((batch[:, 0] % 8).tolist()) == {0}


def test_evaluations_see_sequences_all_over_the_held_out_data() -> None:
    tokens = Packed((np.arange(100),), np.arange(101), ("",), 1, "")
    firsts = [tokens.valid_batch(i, 2, 2, 10)[:, 0].tolist() for i in range(2)]
    assert firsts == [[0, 30], [60, 90]]


def test_fewer_sequences_than_workers_are_too_few() -> None:
    tokens = Packed((np.arange(21),), np.arange(6), ("",), 1, "")
    with pytest.raises(UserError, match=r"^task.data: 4 sequences of 5 tokens are too few for 5 w"):
        tokens.train_batch(Shard(0, 5, 0, 1, seed=0), 0, 1, 5)


# Documents


def tokens_of(path: Path | str, cache: Path, **changes: Any) -> Packed:
    source = Source(str(path), None, "text", changes.pop("region_column", None))
    chosen = {"split": "train", "valid": None, **changes}
    tokenizer = load_tokenizer("bytes", None)
    return packed(source, tokenizer=tokenizer, cache=str(cache), **chosen)


def text_of(tokens: np.ndarray) -> str:
    return str(load_tokenizer("bytes", None).decode(tokens.tolist()))


def write(path: Path, documents: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.table({"text": documents}), path)
        case ".jsonl":
            path.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
        case ".csv":
            path.write_text("text\n" + "".join(f"{one}\n" for one in documents))
    return path


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl", "d.csv"])
def test_documents_are_joined_by_the_end_of_a_text(name: str, tmp_path: Path) -> None:
    """Of 21 documents number 10 is held out."""
    documents = [f"héllo {i}" for i in range(21)]
    tokens = tokens_of(write(tmp_path / name, documents), tmp_path / "cache")
    assert text_of(tokens.valid) == "héllo 10<|endoftext|>"
    del documents[10]
    assert text_of(tokens.train[0]) == "".join(f"{one}<|endoftext|>" for one in documents)
    assert tokens.documents == 21


def test_of_few_documents_the_last_twentieth_of_each_is_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(name * 39)
    tokens = tokens_of(folder, tmp_path / "cache")
    assert text_of(tokens.train[0]) == "a" * 38 + "b" * 38
    assert text_of(tokens.valid) == "a<|endoftext|>b<|endoftext|>"


def test_validation_data_may_be_a_split_or_a_file(tmp_path: Path) -> None:
    """The names of files tell splits, as everywhere with `datasets`."""
    write(tmp_path / "data" / "train.parquet", ["seen"])
    write(tmp_path / "data" / "validation.parquet", ["unseen"])
    other = write(tmp_path / "other.jsonl", ["elsewhere"])
    split = tokens_of(tmp_path / "data", tmp_path / "cache", valid="validation")
    file = tokens_of(tmp_path / "data", tmp_path / "cache", valid=str(other))
    assert {text_of(one.train[0]) for one in (split, file)} == {"seen<|endoftext|>"}
    assert text_of(split.valid) == "unseen<|endoftext|>"
    assert text_of(file.valid) == "elsewhere<|endoftext|>"


def test_what_datasets_has_saved_can_be_read(tmp_path: Path) -> None:
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["a" * 40]}).save_to_disk(tmp_path / "saved")
    assert text_of(tokens_of(tmp_path / "saved", tmp_path / "cache").train[0]) == "a" * 39


def test_tokens_are_made_once_and_anew_when_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write(tmp_path / "d.jsonl", ["one"] * 30), tmp_path / "cache"
    first = tokens_of(path, cache)
    with monkeypatch.context() as patch:
        patch.setattr(Source, "documents", lambda *_: pytest.fail("read again"))
        assert tokens_of(path, cache).digest == first.digest
    write(path, ["other"] * 30)
    assert tokens_of(path, cache).digest != first.digest


def test_a_full_disk_is_told_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write(tmp_path / "d.jsonl", ["one"] * 30), tmp_path / "cache"

    def full(*_: Any) -> Iterator[tuple[str, np.ndarray]]:
        yield "", np.arange(40, dtype=np.uint16)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("archipel.train.packed._tokens", full)
        with pytest.raises(UserError) as error:
            tokens_of(path, cache)
    assert str(error.value) == f"task.cache: {cache}: No space left on device"
    assert [file.suffix for file in cache.iterdir()] == [".lock"]
    assert tokens_of(path, cache).documents == 30


def test_regions_see_the_documents_of_their_keys(parquet: str, tmp_path: Path) -> None:
    """Within a region the workers share its documents, and miss none."""
    tokens = tokens_of(parquet, tmp_path, region_column="language")
    assert tokens.keys == ("x", "y")
    shards = shards_of(["a", "a", "b"], seed=0)
    for shard, key in zip(shards, (0, 0, 1), strict=True):
        assert tokens.tokens_for(shard) == (tokens.train[key],)
    count = (len(tokens.train[0]) - 1) // 16
    seen = [
        tokens.train_batch(shard, 0, len(range(rank, count, 2)), 16)
        for rank, shard in enumerate(shards[:2])
    ]
    expected = torch.from_numpy(tokens.train[0][: count * 16].astype(np.int64)).view(-1, 16)
    assert sorted(torch.cat(seen)[:, :16].tolist()) == sorted(expected.tolist())


def test_regions_need_as_many_keys(parquet: str, tmp_path: Path) -> None:
    tokens = tokens_of(parquet, tmp_path, region_column="language")
    with pytest.raises(UserError) as error:
        tokens.train_batch(shards_of(["a", "b", "c"], seed=0)[0], 0, 1, 16)
    assert str(error.value) == (
        "task.region_column: 3 regions need as many keys, and there are 2: x, y"
    )


def test_one_key_is_too_few_for_two_regions(tmp_path: Path) -> None:
    tokens = Packed((np.arange(50),), np.arange(6), ("x",), 1, "")
    assert tokens.tokens_for(SHARD) == tokens.train
    with pytest.raises(UserError, match=r"2 regions need as many keys, and there are 1: x$"):
        tokens.tokens_for(Shard(0, 2, 0, 2, seed=0))


# Tokenizers


def test_any_text_comes_back_from_a_tokenizer_of_bytes() -> None:
    tokenizer, text = load_tokenizer("bytes", None), "naïve 東京 \n\t 🙂"
    assert size_of(tokenizer) == 257
    [tokens] = encode(tokenizer, [text])
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


def test_tokenize_trains_a_tokenizer_that_a_task_can_use(
    archipel: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "tokenizer.json"
    answer = archipel("tokenize", fields["data"], "--vocabulary", 300, "--out", out)
    assert (answer.code, answer.err) == (0, "")
    tokenizer = load_tokenizer(str(out), None)
    assert answer.out == f"{out}: {size_of(tokenizer)} tokens\n"
    [tokens] = encode(tokenizer, ["the cat sat"])
    assert len(tokens) < 6
    assert tokenizer.decode(tokens) == "the cat sat"
    task = task_of({**fields, "tokenizer": str(out)})
    assert task.model().config.vocab_size == size_of(tokenizer) < 300


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_tokenizer_that_cannot_be_written_is_one_line(archipel: Any, parquet: str) -> None:
    answer = archipel("tokenize", parquet, "--vocabulary", 300, "--out", "/dev/full")
    assert answer.code == 1
    assert answer.err == "archipel: input or output: No space left on device\n"


def test_a_vocabulary_has_room_for_all_bytes() -> None:
    with pytest.raises(UserError) as error:
        train_tokenizer(["a"], 256)
    assert (
        str(error.value)
        == "--vocabulary 256: must be at least 257, for all bytes and <|endoftext|>"
    )


# Models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("pythia-14m", 14_067_712),
        ("pythia-31m", 30_494_720),
        ("pythia-70m", 70_426_624),
        ("pythia-160m", 162_322_944),
        ("pythia-410m", 405_334_016),
        ("pythia-1b", 1_011_781_632),
        ("gpt2", 124_439_808),
        ("opt-125m", 125_239_296),
        ("smollm2-135m", 134_515_008),
        ("tinyllama-1.1b", 1_100_048_384),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_a_shape_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**SHAPES[name])
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_every_shape_is_counted() -> None:
    [mark] = test_a_shape_has_the_published_number_of_parameters.pytestmark
    assert [name for name, _ in mark.args[1]] == list(SHAPES)


def test_the_loss_is_that_of_transformers(fields: dict[str, Any]) -> None:
    task = task_of(fields)
    model, batch = task.seeded_model(0), task.batches(SHARD, 0)
    torch.testing.assert_close(task.loss(model, batch), model(input_ids=batch, labels=batch).loss)


def test_a_model_depends_on_the_seed_alone(fields: dict[str, Any]) -> None:
    task = task_of(fields)
    one, same, other = (task.seeded_model(seed).lm_head.weight for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_parts_of_a_batch_make_one_step(fields: dict[str, Any]) -> None:
    task = task_of({**fields, "batch_size": 2, "gradient_accumulation": 3})
    assert task.batches(SHARD, 0).shape == (6, 17)
    assert (task.gradient_accumulation, task.tokens_per_step) == (3, 96)


def test_checkpointing_changes_no_gradient(fields: dict[str, Any]) -> None:
    gradients = []
    for checkpointing in (False, True):
        task = task_of({**fields, "gradient_checkpointing": checkpointing})
        model = task.seeded_model(0)
        modules = model.modules()
        assert (
            any(getattr(one, "gradient_checkpointing", False) for one in modules) == checkpointing
        )
        task.loss(model, task.batches(SHARD, 0)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_a_fresh_models_ends_are_the_tokenizers(fields: dict[str, Any]) -> None:
    """And nothing is padded: OPT would never train the row of its own padding."""
    config = {"num_hidden_layers": 1, "vocab_size": 300}
    model = task_of({**fields, "model": "opt-125m", "config": config}).model()
    assert model.config.vocab_size == 300
    assert (model.config.eos_token_id, model.config.pad_token_id) == (0, None)
    assert model.training


def test_a_folders_model_can_have_fewer_layers(fields: dict[str, Any], tmp_path: Path) -> None:
    """Qwen3's configuration also lists the kind of each layer."""
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model("qwen3", **FAMILIES["qwen3-0.6b"])
    config.save_pretrained(tmp_path / "model")
    fields = {**fields, "model": str(tmp_path / "model"), "config": {"num_hidden_layers": 1}}
    assert len(task_of(fields).model().base_model.layers) == 1


# Runs


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


@pytest.mark.parametrize(
    ("name", "tied"), [("pythia-14m", False), ("smollm2-135m", True), ("qwen3-0.6b", False)]
)
def test_halos_trains_it_and_leaves_a_folder_that_others_load(
    name: str, tied: bool, fields: dict[str, Any], tmp_path: Path
) -> None:
    transformers = importlib.import_module("transformers")
    config = {**FAMILIES[name], "tie_word_embeddings": tied}
    fields = {**fields, "model": name, "config": config, "lr": 0.01}
    result = package.simulate(recipe_of(fields), processes=1, out=tmp_path / "out")
    assert result.summary["final_loss"] < result.evals[0]["loss"] - 0.5
    folder = result.directory / "model"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    task = task_of(fields)
    final, tokens = task.model(), task.batches(SHARD, 0)
    final.load_state_dict(load_file(result.directory / "weights.safetensors"))
    assert torch.equal(logits_of(loaded, tokens), logits_of(final, tokens))
    assert loaded.config.tie_word_embeddings == tied
    both = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    assert (both[0] is both[1]) == tied
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == "<|endoftext|>"
    # And it is a model to go on with.
    further = task_of({**fields, "model": str(folder), "config": {}, "tokenizer": None})
    assert torch.equal(logits_of(further.model(), tokens), logits_of(final, tokens))
    anew = task_of({**fields, "model": str(folder), "config": {}, "from_scratch": True})
    assert not torch.equal(logits_of(anew.seeded_model(0), tokens), logits_of(final, tokens))


def test_the_command_line_says_that_the_clock_is_another_models(
    archipel: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe_of(fields, profile="pythia-70m-h100", run={"steps": 16})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        answer = archipel(
            "run", tmp_path / "recipe.yaml", "--processes", 1, "--out", tmp_path / "out"
        )
    assert answer.code == 0
    assert answer.err.startswith(
        "archipel: warning: profile pythia-70m-h100: messages are timed as 281,706,496 bytes and "
        "inner steps as 0.238 s, whatever the task, whose model has 134,400 bytes; for its own "
        "times give `profile: measured`, or `profile: {model_bytes: 134400, step_time_s: …}`\n"
    )
    assert answer.out.startswith("Real: gradients of pythia-14m with hidden_size 32, ")
    assert "(33,600 parameters, random weights) on " in answer.out


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_the_model(name: str, fields: dict[str, Any]) -> None:
    fields = {**fields, "model": name, "config": FAMILIES[name]}
    whole, blocks = task_of(fields), task_of({**fields, "blocks": True})
    one, other, batch = whole.seeded_model(3), blocks.seeded_model(3), whole.batches(SHARD, 0)
    assert [*map(len, (other, one.base_model.layers))] == [4, 2]
    torch.testing.assert_close(other(batch), one(input_ids=batch).logits)
    torch.testing.assert_close(blocks.loss(other, batch), whole.loss(one, batch))


def test_noloco_trains_it_in_stages(fields: dict[str, Any], tmp_path: Path) -> None:
    """The folder it leaves is that of a whole model."""
    transformers = importlib.import_module("transformers")
    recipe = recipe_of(
        {**fields, "lr": 0.01},
        method={"name": "noloco", "inner_steps": 4},
        pipeline={"stages": 2, "micro_batches": 2},
        run={"steps": 80, "evaluations": 2},
    )
    result = package.simulate(recipe, processes=1, out=tmp_path / "out")
    assert result.summary["final_loss"] < result.evals[0]["loss"] - 0.5
    loaded = transformers.AutoModelForCausalLM.from_pretrained(result.directory / "model")
    task = task_of({**fields, "blocks": True})
    final, tokens = task.model().eval(), task.batches(SHARD, 0)
    final.load_state_dict(load_file(result.directory / "weights.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(loaded, tokens), final(tokens))


@pytest.mark.slow
@pytest.mark.live
def test_a_live_run_leaves_the_folder_too(fields: dict[str, Any], tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    recipe = recipe_of(
        fields,
        method={"name": "diloco", "inner_steps": 4},
        topology={"regions": {"a": [1.0, 1.0]}, "default": {"bandwidth_gbit_s": 1.0}},
        run={"steps": 16, "evaluations": 1},
    )
    result = package.launch(recipe, out=tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(result.directory / "model")
    weights = load_file(result.directory / "weights.safetensors")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[name])


# Mistakes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model": "pythia-71m"},
            "task.model = 'pythia-71m': allowed are pythia-14m, pythia-31m, pythia-70m, ",
        ),
        ({"model": "pythia-71m"}, " on the Hugging Face hub (did you mean 'pythia-70m'?)"),
        (
            {"config": {"hiden_size": 8}},
            "task.config: a gpt_neox has no field 'hiden_size' (did you mean 'hidden_size'?)",
        ),
        ({"config": {"num_attention_heads": 5}}, "task.config: no gpt_neox can be made of {"),
        (
            {"sequence": 4096},
            "task.sequence = 4096: pythia-14m takes sequences of up to 2048 tokens; give a shorter "
            "one, or change max_position_embeddings in task.config",
        ),
        (
            {"text_column": "texts"},
            "task.text_column = 'texts': the columns of DATA are text, language (did you mean "
            "'text'?)",
        ),
        (
            {"region_column": "lang"},
            "task.region_column = 'lang': the columns of DATA are text, language (did you mean "
            "'language'?)",
        ),
        ({"split": "trian"}, "task.split = 'trian': the splits of DATA are train (did you mean"),
        (
            {"data": "no/such.parquet"},
            f"task.data: there is no file or folder 'no/such.parquet' (relative to {Path.cwd()})",
        ),
        (
            {"data": "owner/name"},
            "task.data = 'owner/name': cannot be read, neither here nor from the Hugging Face hub: "
            "Couldn't reach 'owner/name' on the Hub",
        ),
        (
            {"model": "owner/name"},
            "task.model = 'owner/name': cannot be read, neither here nor from the Hugging Face hub",
        ),
        (
            {"tokenizer": "no.json"},
            f"task.tokenizer: there is no file 'no.json' (relative to {Path.cwd()})",
        ),
        (
            {"end_of_text": "<end>"},
            "task.end_of_text: tokenizer 'bytes' has none of the tokens '<end>'; name the one that "
            "ends a text",
        ),
        (
            {"config": {**FAMILIES["pythia-14m"], "vocab_size": 100}},
            "task.tokenizer: has 257 tokens, and the model's vocabulary 100; ",
        ),
        (
            {"sequence": 2000},
            "for validation are too little: each need 2001 tokens (task.sequence and",
        ),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], said: str, fields: dict[str, Any]) -> None:
    assert said.replace("DATA", fields["data"]) in problem({**fields, **change})


def test_what_the_hub_says_of_its_data_is_no_document(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", ["x" * 40])
    (tmp_path / "data" / "README.md").write_text("# About\n")
    (tmp_path / "data" / "dataset_infos.json").write_text("{}\n")
    assert text_of(tokens_of(tmp_path / "data", tmp_path / "cache").train[0]) == "x" * 39


def test_a_folder_of_several_kinds_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    write(folder / "a.parquet", ["a"])
    write(folder / "b.jsonl", ["b"])
    assert problem({**fields, "data": str(folder)}) == (
        f"task.data = {str(folder)!r}: expected files of one kind, ending in .parquet, .jsonl, "
        ".ndjson, .json, .arrow, .csv, .txt, .text, .md; found .jsonl, .parquet"
    )


def test_a_file_that_is_broken_is_named(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    said = problem({**fields, "data": str(tmp_path / "bad.parquet")})
    assert said.startswith(f"task.data = '{tmp_path / 'bad.parquet'}': Parquet magic bytes not ")


def test_without_the_extra_its_name_is_told(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert problem(fields).endswith("install it with: pip install 'archipel[hf]'")


def test_nothing_is_imported_before_a_task_asks_for_it(archipel: Any) -> None:
    code = (
        "import sys, archipel.cli, archipel.experiment; "
        "print({'transformers', 'datasets', 'tokenizers'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
    assert "causal_lm" in archipel("list").out
    assert "gradient_checkpointing" in archipel("list", "causal_lm").out


def test_a_task_is_a_key_of_caches(fields: dict[str, Any]) -> None:
    one, same, other = (
        CausalLmTask.model_validate({**fields, **change}) for change in ({}, {}, {"lr": 0.5})
    )
    assert hash(one) == hash(same)
    assert len({one, same, other}) == 2
