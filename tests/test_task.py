"""`task.py` and `gpt.py`: the schedule, the optimizer's groups, the model against a plain one, and
tasks of the user's own.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from archipel.errors import UserError
from archipel.recipe import load_recipe, parse_recipe
from archipel.train.configs import CONFIGS, GptTask, SyntheticTask, TextTask, UserTask, task_config
from archipel.train.data import Shard
from archipel.train.gpt import GPT, next_token_loss
from archipel.train.task import Schedule, Task, adamw, make_task
from archipel.yamlfile import parse

SHARD = Shard(index=0, of=2, region=0, regions=2, seed=0)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """The path of a folder with two classes of text, one all `a`, one all `b`."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(name * 2000)
    return str(tmp_path)


# Schedule


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    schedule = Schedule(warmup=300 / 6144)
    factors = [schedule.factor(step, 6144) for step in range(301)]
    assert factors[:300] == pytest.approx([(step + 1) / 300 for step in range(300)])
    assert factors[300] == pytest.approx(1)


@pytest.mark.parametrize(
    ("part", "factor"), [(0, 1), (1 / 3, 0.775), (1 / 2, 0.55), (2 / 3, 0.325), (1, 0.1)]
)
def test_then_a_cosine_goes_down_to_a_tenth(part: float, factor: float) -> None:
    """0.1 + 0.9 · (1 + cos(π·part)) / 2; cos of 60, 90 and 120 degrees are 1/2, 0 and −1/2."""
    assert Schedule(warmup=300 / 6144).factor(300 + part * (6144 - 300), 6144) == pytest.approx(
        factor
    )


def test_beyond_the_plan_the_factor_stays_at_the_end() -> None:
    assert Schedule(final=0.25).factor(5000, 1000) == pytest.approx(0.25)


def test_without_warm_up_the_first_step_is_the_peak() -> None:
    assert Schedule(warmup=0).factor(0, 1000) == 1


def test_a_run_may_be_all_warm_up() -> None:
    assert Schedule(warmup=1).factor(499, 1000) == pytest.approx(0.5)


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1, 1e5),
    st.lists(st.floats(0, 1.5), min_size=2, max_size=10),
)
def test_the_factor_rises_then_falls_between_final_and_one(
    warmup: float, final: float, total: float, parts: list[float]
) -> None:
    schedule = Schedule(warmup, final)
    factors = [(part * total, schedule.factor(part * total, total)) for part in sorted(parts)]
    for (step, factor), (_, following) in pairwise(factors):
        if step >= warmup * total:
            assert following <= factor + 1e-12
            assert final - 1e-12 <= following <= 1
        assert 0 < factor <= 1 or final == 0


# Optimizer


def test_adamw_decays_matrices_only() -> None:
    """Without a gradient AdamW multiplies what decays by 1 − lr · decay and leaves the rest."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Linear(4, 5))
    optimizer = adamw(model, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.01 * 0.5 if name in ("0.weight", "2.weight") else 1
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_adamw_has_the_settings_it_is_given() -> None:
    for group in adamw(
        nn.Linear(2, 2), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5
    ).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)


def test_adamw_leaves_frozen_parameters_out() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    groups = adamw(model, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).param_groups
    assert [id(parameter) for group in groups for parameter in group["params"]] == [id(model.bias)]


# Model


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=11, context=8, layers=2, width=6, heads=3)


TOKENS = torch.tensor([[1, 5, 2, 9, 0], [10, 3, 3, 7, 4]])


def plain_gpt(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits of one sequence, position by position and head by head: shape (sequence,
    vocabulary).
    """

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return (
            centred
            / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
            * weights[f"{name}.weight"]
        )

    x = torch.stack(
        [
            weights["embed.tokens.weight"][t] + weights["embed.positions.weight"][i]
            for i, t in enumerate(tokens)
        ]
    )
    for block in ("block_0", "block_1"):
        q, k, v = (norm(x, f"{block}.norm_1") @ weights[f"{block}.attention_in.weight"].T).split(
            6, dim=-1
        )
        rows = []
        for i in range(len(tokens)):
            heads = []
            for h in (slice(0, 2), slice(2, 4), slice(4, 6)):
                scores = torch.stack([q[i, h] @ k[j, h] / math.sqrt(2) for j in range(i + 1)])
                heads.append(
                    sum(p * v[j, h] for j, p in enumerate(scores.exp() / scores.exp().sum()))
                )
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ weights[f"{block}.attention_out.weight"].T
        hidden = norm(x, f"{block}.norm_2") @ weights[f"{block}.mlp_in.weight"].T
        x = x + hidden.clamp(min=0) ** 2 @ weights[f"{block}.mlp_out.weight"].T
    return norm(x, "head.norm") @ weights["embed.tokens.weight"].T


def test_gpt_is_the_plain_transformer() -> None:
    model = small_gpt()
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # far from the start, where attention is nearly uniform
            parameter += 0.5 * torch.randn(parameter.shape)
        logits = model(TOKENS)
        for row, tokens in zip(logits, TOKENS.tolist(), strict=True):
            torch.testing.assert_close(
                row, plain_gpt(dict(model.state_dict()), tokens), rtol=1e-4, atol=1e-4
            )


def test_gpt_gives_logits_for_each_position() -> None:
    assert small_gpt()(TOKENS).shape == (2, 5, 11)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, changed = small_gpt(), TOKENS.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    before, after = model(TOKENS), model(changed)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3:], before[:, 3:])


def test_head_and_embedding_are_one_parameter() -> None:
    model = small_gpt()
    assert model.head.logits.weight is model.embed.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("vocabulary", "context", "layers", "width"), [(11, 8, 2, 6), (256, 64, 3, 12)]
)
def test_gpt_has_twelve_squares_of_the_width_a_layer(
    vocabulary: int, context: int, layers: int, width: int
) -> None:
    model = GPT(vocabulary=vocabulary, context=context, layers=layers, width=width, heads=3)
    expected = (vocabulary + context) * width + layers * (12 * width**2 + 2 * width) + width
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_what_is_added_to_the_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=100, context=100, layers=8, width=64, heads=2)
    std = {
        name: float(parameter.detach().std())
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    }
    for name, value in std.items():
        expected = 0.02 / 4 if name.endswith(("attention_out.weight", "mlp_out.weight")) else 0.02
        assert value == pytest.approx(expected, rel=0.06), name


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"^width 7 is not divisible by heads 2$"):
        GPT(vocabulary=11, context=8, layers=1, width=7, heads=2)


def test_the_loss_is_the_mean_surprise_at_the_next_token() -> None:
    model = small_gpt()
    probabilities = model(TOKENS[:, :-1]).softmax(dim=-1).tolist()
    surprises = [
        -math.log(probabilities[b][t][TOKENS[b, t + 1]]) for b in range(2) for t in range(4)
    ]
    assert float(next_token_loss(model, TOKENS).detach()) == pytest.approx(
        sum(surprises) / 8, rel=1e-5
    )


def test_a_fresh_gpt_knows_nothing() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=32, layers=2, width=32, heads=2)
    batch = torch.randint(256, (8, 33))
    assert float(next_token_loss(model, batch).detach()) == pytest.approx(math.log(256), rel=0.01)


# Built-in tasks


def test_a_task_takes_its_sizes_from_the_configuration(corpus: str) -> None:
    task = make_task(TextTask(path=corpus, layers=1, width=8, heads=2, sequence=16, batch_size=3))
    assert task.batches(SHARD, 0).shape == (3, 17)
    assert task.tokens_per_step == 48
    size = sum(parameter.numel() for parameter in task.model().parameters())
    assert size == (256 + 16) * 8 + 12 * 8**2 + 2 * 8 + 8
    assert f"a GPT of 1 x 8 ({size:,} parameters) on {corpus} (2 files, " in task.description


@pytest.mark.parametrize("sequences", [1, 7, 64])
def test_an_evaluation_sees_so_many_sequences_whatever_the_batch(
    corpus: str, sequences: int
) -> None:
    valid = replace(SHARD, split="valid")
    seen = []
    for batch_size in (1, 3):
        task = make_task(
            TextTask(path=corpus, sequence=16, batch_size=batch_size, valid_sequences=sequences)
        )
        seen.append(torch.cat([task.batches(valid, index) for index in range(task.valid_batches)]))
    assert seen[0].shape == (sequences, 17)
    assert torch.equal(seen[0], seen[1])


def test_a_task_takes_its_optimizer_from_the_configuration(corpus: str) -> None:
    fields: dict[str, Any] = {
        "lr": 0.02,
        "betas": (0.5, 0.6),
        "eps": 1e-5,
        "weight_decay": 0.3,
        "warmup": 0.25,
    }
    task = make_task(TextTask(path=corpus, **fields, gradient_clip=None, precision="bf16"))
    group = task.optimizer(task.model()).param_groups[0]
    assert {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        key: fields[key] for key in ("lr", "betas", "eps", "weight_decay")
    }
    assert (task.schedule, task.gradient_clip, task.autocast) == (
        Schedule(warmup=0.25),
        None,
        torch.bfloat16,
    )


def test_regions_see_different_classes_with_a_small_concentration(corpus: str) -> None:
    """Seeds 0 to 9: each region sees nearly one class only, and not all see the same."""
    task = make_task(TextTask(path=corpus, sequence=16, dirichlet=1e-4))
    seen = [
        set(task.batches(replace(SHARD, region=region), 0).flatten().tolist())
        for region in range(10)
    ]
    assert all(len(tokens) == 1 for tokens in seen)
    assert set.union(*seen) == set(b"ab")


def test_regions_that_differ_are_validated_on_the_same_data(corpus: str) -> None:
    plain, mixed = (
        make_task(TextTask(path=corpus, sequence=16, dirichlet=dirichlet))
        for dirichlet in (None, 1e-4)
    )
    valid = replace(SHARD, split="valid")
    assert torch.equal(plain.batches(valid, 0), mixed.batches(valid, 0))


def test_a_model_depends_on_the_seed_alone(corpus: str) -> None:
    task = make_task(TextTask(path=corpus))
    torch.manual_seed(1)
    one = task.seeded_model(5).embed.tokens.weight
    torch.manual_seed(2)
    same, other = task.seeded_model(5).embed.tokens.weight, task.seeded_model(6).embed.tokens.weight
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_making_a_seeded_model_leaves_the_random_numbers_alone(corpus: str) -> None:
    task = make_task(TextTask(path=corpus))
    state = torch.get_rng_state()
    task.seeded_model(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_synthetic_task_knows_its_best_loss() -> None:
    task = make_task(SyntheticTask(vocabulary=4, sources=1))
    assert task.entropy_rate is not None
    assert 0 < task.entropy_rate < math.log(4)
    assert task.loss_name == "validation loss (nats per token)"


def test_heads_that_do_not_divide_the_width_are_the_users_mistake(corpus: str) -> None:
    with pytest.raises(UserError) as error:
        make_task(TextTask(path=corpus, width=30, heads=4))
    assert str(error.value) == "task.width = 30: must be divisible by task.heads = 4"


def test_a_text_task_needs_its_path() -> None:
    with pytest.raises(UserError) as error:
        make_task(TextTask(path="no/such/place"))
    assert (
        str(error.value)
        == f"task.path: there is no file or folder 'no/such/place' (relative to {Path.cwd()})"
    )


def test_every_task_is_found_by_its_name() -> None:
    for name, kind in CONFIGS.items():
        assert task_config(name) is kind
    assert task_config("mytask.py:make") is UserTask


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UserError) as error:
        task_config("stdlb")
    assert str(error.value) == (
        "task = 'stdlb': allowed are none, stdlib, synthetic, text, causal_lm and your own "
        "'file.py:function' (did you mean 'stdlib'?)"
    )


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.95)])
def test_betas_are_from_zero_to_below_one(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="betas"):
        GptTask(name="stdlib", betas=betas)


@pytest.mark.parametrize(
    "fields", [{"width": "64"}, {"layers": True}, {"lr": "0.1"}, {"valid_sequences": 8.0}]
)
def test_numbers_in_quotes_and_truth_values_are_not_numbers(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        GptTask(name="stdlib", **fields)


# Tasks of the user's own

CONV = """
import torch
from torch import nn
from torch.nn import functional as F

from archipel import Shard, Task


def model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def batches(shard: Shard, index: int):
    rng = shard.rng(index)
    x = torch.from_numpy(rng.random((5, 1, 8, 8), dtype="float32"))
    return x, torch.from_numpy(rng.integers(3, size=5))


def loss(module, batch):
    images, labels = batch
    return F.cross_entropy(module(images), labels)


def make():
    def sgd(module):
        return torch.optim.SGD(module.parameters(), lr=0.1)

    return Task(model, loss, batches, sgd, description="a small conv net")


def make_with(lr, *, momentum=0.0):
    def sgd(module):
        return torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)

    return Task(model, loss, batches, sgd)


def make_named(name):
    return make()


def make_nothing():
    return None


answer = 42
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with a task of the user's own."""
    path = tmp_path / "own.py"
    path.write_text(CONV)
    return str(path)


def problem(name: str) -> str:
    """What `make_task` says against the user's task `name`."""
    with pytest.raises(UserError) as error:
        make_task(UserTask(name=name))
    return str(error.value)


def test_the_keys_of_a_task_are_its_functions_arguments(own: str) -> None:
    fields = {"name": f"{own}:make_with", "lr": 0.3, "momentum": 0.5}
    task = make_task(load_recipe({"method": "diloco", "task": fields}).task)
    [group] = task.optimizer(task.model()).param_groups
    assert (group["lr"], group["momentum"]) == (0.3, 0.5)
    assert task.description == "own.py:make_with(lr=0.3, momentum=0.5), a task of your own"
    recipe = load_recipe({"method": "diloco", "task": fields}, {"task.momentum": 0.9})
    assert recipe.task != load_recipe({"method": "diloco", "task": fields}).task
    again = parse_recipe(parse(recipe.to_yaml()))  # it is in the recipe that a run leaves
    assert again.task == recipe.task
    assert pickle.loads(pickle.dumps(recipe.task)) == recipe.task  # and processes are told


@pytest.mark.parametrize(
    ("function", "settings", "said"),
    [
        (
            "make_with",
            {"lr": 0.1, "momentun": 0.9},
            "has no argument 'momentun' (did you mean 'momentum'?); its arguments: lr, momentum",
        ),
        ("make_with", {"momentum": 0.9}, "task.lr is missing: "),
        ("make", {"lr": 0.1}, "has no argument 'lr'; it has no arguments"),
        ("make_named", {}, "has an argument `name`, and task.name is the file's: rename it"),
    ],
)
def test_a_setting_that_the_function_does_not_take_is_named(
    own: str, function: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as error:
        make_task(UserTask.model_validate({"name": f"{own}:{function}", **settings}))
    assert said in str(error.value)


def test_a_function_of_the_users_makes_a_task(own: str) -> None:
    task = make_task(UserTask(name=f"{own}:make"))
    assert isinstance(task, Task)
    assert task.description == "a small conv net"
    model = task.seeded_model(0)
    loss = task.loss(model, task.batches(SHARD, 0))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(3), rel=0.5)
    assert model[1].running_mean.any()


def test_a_task_has_defaults_for_all_but_its_four_callables() -> None:
    task = Task(lambda: nn.Linear(1, 1), F.mse_loss, lambda shard, index: None, torch.optim.SGD)
    assert (task.gradient_clip, task.schedule, task.autocast) == (1.0, Schedule(0.05, 0.1), None)


def test_a_missing_file_is_named() -> None:
    assert problem("no/own.py:make") == (
        f"task.name = 'no/own.py:make': there is no file 'no/own.py' (relative to {Path.cwd()})"
    )


def test_a_missing_function_names_the_nearest(own: str) -> None:
    name = f"{own}:mak"
    assert (
        problem(name)
        == f"task.name = {name!r}: {own!r} has no function 'mak' (did you mean 'make'?)"
    )


def test_what_is_not_a_function_is_none(own: str) -> None:
    assert problem(f"{own}:answer").startswith(
        f"task.name = '{own}:answer': {own!r} has no function 'answer'"
    )


def test_a_function_must_return_a_task(own: str) -> None:
    name = f"{own}:make_nothing"
    assert (
        problem(name)
        == f"task.name = {name!r}: make_nothing() returned NoneType, not an archipel.Task"
    )


def test_a_file_must_be_python(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(CONV)
    name = f"{path}:make"
    assert problem(name) == f"task.name = {name!r}: {str(path)!r} is not a Python file"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gpt_runs_in_the_type_of_its_weights(dtype: torch.dtype) -> None:
    model = GPT(vocabulary=11, context=6, layers=1, width=8, heads=2)
    tokens = torch.arange(6).view(1, 6)
    logits = model(tokens)
    other = model.to(dtype)(tokens)
    assert other.dtype == dtype
    torch.testing.assert_close(other.float(), logits, rtol=0.05, atol=0.02)
