"""`replica.py` against plain loops of torch: a worker's inner steps are what anybody would write,
whoever else uses the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archipel.train.configs import TextTask
from archipel.train.data import Shard
from archipel.train.gpt import GPT, next_token_loss
from archipel.train.replica import NonFiniteLoss, Replica, Run, TensorSpec
from archipel.train.task import Schedule, Task, make_task
from archipel.vector import Layout

CPU = torch.device("cpu")
SHARD = Shard(index=0, of=2, region=0, regions=1, seed=0)
OTHER = replace(SHARD, index=1)

State = list[Tensor]


def batches(shard: Shard, index: int) -> tuple[Tensor, Tensor]:
    """8 inputs of 6 numbers each, and 8 targets."""
    draw = torch.Generator().manual_seed(
        1000 * shard.index + index + (7 if shard.split == "valid" else 0)
    )
    return torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)


def mse(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(module(x).float(), y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


TASK = Task(mlp, mse, batches, adam, valid_batches=3)


def replica_of(task: Task, total_steps: int = 20, workers: int = 1) -> Replica:
    return Replica(task, Run(total_steps, workers, seed=5), CPU)


def fresh(replica: Replica) -> State:
    """The state of a worker that has not begun."""
    state = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in replica.state_specs]
    replica.reset(state)
    return state


def start(replica: Replica) -> Tensor:
    """The weights that all workers start from."""
    return replica.layout.read(replica.task.seeded_model(replica.run.seed))


def trained(task: Task, pieces: Iterable[int], total_steps: int = 20) -> tuple[Tensor, list[float]]:
    """The weights and losses of one worker that trains in `pieces`, and sees no others."""
    replica = replica_of(task, total_steps)
    theta, state, losses = start(replica), fresh(replica), []
    for steps in pieces:
        losses += replica.train(state, theta, SHARD, steps, len(losses), len(losses))
    return theta, losses


def plain_loop(task: Task, steps: int, total_steps: int = 20) -> tuple[nn.Module, list[float]]:
    """The model after `steps` of a loop with torch alone, and its losses."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = task.model()
    optimizer = task.optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, task.batches(SHARD, step))
        loss.backward()
        if task.gradient_clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.gradient_clip)
        if task.schedule is not None:
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * task.schedule.factor(step, total_steps)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def assert_trains_as_a_plain_loop(task: Task, pieces: Iterable[int] = (1, 6, 5)) -> None:
    theta, losses = trained(task, pieces)
    model, expected = plain_loop(task, len(losses))
    expected_theta = replica_of(task).layout.read(model)
    torch.testing.assert_close(theta, expected_theta, rtol=1e-5, atol=1e-6)
    assert losses == pytest.approx(expected, rel=1e-5)


# One worker


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gradient_clip": 0.05},
        {"gradient_clip": None},
        {"schedule": None},
        {"gradient_accumulation": 2},
        {"schedule": Schedule(warmup=0.5, final=0.3), "gradient_clip": 0.05},
    ],
    ids=["default", "tight clip", "no clip", "constant rate", "in two parts", "long warm-up"],
)
def test_a_worker_trains_as_a_plain_loop(change: dict[str, Any]) -> None:
    assert_trains_as_a_plain_loop(replace(TASK, **change))


def test_a_worker_trains_a_gpt_as_a_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    config = TextTask(path=str(tmp_path), layers=1, width=16, heads=2, sequence=16, batch_size=4)
    task = make_task(config)

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim != 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
        )

    theta, losses = trained(task, [5, 5])
    model, expected = plain_loop(replace(task, optimizer=optimizer), 10)
    torch.testing.assert_close(theta, Layout.of(model).read(model), rtol=1e-3, atol=2e-5)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_cutting_the_steps_into_pieces_changes_no_bit() -> None:
    whole, in_pieces = trained(TASK, [12]), trained(TASK, [1, 1, 6, 4])
    assert torch.equal(whole[0], in_pieces[0])
    assert whole[1] == in_pieces[1]


def test_the_first_loss_is_that_of_the_weights_before_the_step() -> None:
    model = TASK.seeded_model(5)
    _, losses = trained(TASK, [1])
    assert losses == [pytest.approx(float(mse(model, batches(SHARD, 0)).detach()))]


def test_what_was_trained_stands_in_the_vector_that_was_given() -> None:
    replica = replica_of(TASK)
    theta = start(replica)
    before = theta.clone()
    replica.train(fresh(replica), theta, SHARD, 1, 0, 0)
    assert not torch.equal(theta, before)


def scalar_task(gradient: float, **changes: Any) -> Task:
    """One weight, 0 at the start, and a loss with a constant gradient; plain SGD of rate 1, no clip
    and no schedule.
    """

    def model() -> nn.Module:
        return nn.ParameterDict({"w": nn.Parameter(torch.zeros(1))})

    def loss(module: Any, batch: None) -> Tensor:
        return (gradient * module["w"]).sum()

    task = Task(
        model,
        loss,
        lambda shard, index: None,
        lambda module: torch.optim.SGD(module.parameters(), lr=1.0),
    )
    return replace(task, **{"gradient_clip": None, "schedule": None, **changes})


def test_the_learning_rate_follows_the_common_progress() -> None:
    """4 workers, 40 steps in all: each has 10, and step k of 3 from progress 8 is step 2 + k of
    them.
    """
    schedule = Schedule(warmup=0.4, final=0.1)
    replica = replica_of(scalar_task(1.0, schedule=schedule), total_steps=40, workers=4)
    theta = start(replica)
    replica.train(fresh(replica), theta, SHARD, steps=3, progress=8, cursor=100)
    assert theta.item() == pytest.approx(-sum(schedule.factor(step, 10) for step in (2, 3, 4)))


@pytest.mark.parametrize(("gradient", "moved"), [(4.0, 1.5), (1.5, 1.5), (0.3, 0.3)])
def test_a_long_gradient_is_clipped_and_a_short_one_is_not(gradient: float, moved: float) -> None:
    theta, _ = trained(scalar_task(gradient, gradient_clip=1.5), [1])
    assert theta.item() == pytest.approx(-moved, rel=1e-5)


# Optimizers


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls with a count that is a Python number, and a running sum that is
    replaced, not changed.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["decay"] = state.get("decay", 1.0) * 0.9
                state["sum"] = state.get("sum", torch.zeros_like(parameter)) * 0.5 + parameter.grad
                assert isinstance(state["step"], int)
                parameter.sub_(state["sum"], alpha=group["lr"] * state["decay"] / state["step"])


class Early(torch.optim.Optimizer):
    """SGD with a running sum that starts at the weights, and a number that stays, both there before
    the first step.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"sum": parameter.detach().clone(), "decay": 0.5}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"].mul_(state["decay"]).add_(parameter.grad)
                parameter.sub_(state["sum"], alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "numbers": Counting,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "heavy ball": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "early": Early,
}


def with_optimizer(name: str) -> Task:
    return replace(TASK, optimizer=lambda module: OPTIMIZERS[name](module.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_in_a_plain_loop(name: str) -> None:
    assert_trains_as_a_plain_loop(with_optimizer(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_workers_that_take_turns_on_a_replica_do_not_meet(name: str) -> None:
    """Every bit as if each had a replica of its own."""
    task = with_optimizer(name)
    together = replica_of(task, workers=2)
    alone = {SHARD: replica_of(task, workers=2), OTHER: replica_of(task, workers=2)}
    states = {shard: (fresh(together), fresh(own)) for shard, own in alone.items()}
    thetas = {shard: (start(together), start(together)) for shard in alone}
    for turn, steps in enumerate((1, 3, 2)):
        for shard, own in alone.items():
            shared_state, own_state = states[shard]
            shared_theta, own_theta = thetas[shard]
            together.train(shared_state, shared_theta, shard, steps, 6 * turn, 3 * turn)
            own.train(own_state, own_theta, shard, steps, 6 * turn, 3 * turn)
    for shared_theta, own_theta in thetas.values():
        assert torch.equal(shared_theta, own_theta)
    assert not torch.equal(thetas[SHARD][0], thetas[OTHER][0])


def test_a_worker_that_is_reset_begins_anew() -> None:
    replica = replica_of(TASK)
    state = fresh(replica)
    first, again = start(replica), start(replica)
    replica.train(state, first, SHARD, 4, 0, 0)
    replica.reset(state)
    replica.train(state, again, SHARD, 4, 0, 0)
    assert torch.equal(first, again)


def test_an_optimizer_without_state_keeps_its_settings_alone() -> None:
    flags, numbers = replica_of(with_optimizer("sgd")).state_specs
    assert numbers.dtype == torch.float64
    assert flags == TensorSpec((1 + numbers.shape[0],), torch.bool)


def test_the_state_is_flags_and_numbers_and_the_tensors_that_the_optimizer_keeps() -> None:
    _, _, *tensors = replica_of(with_optimizer("heavy ball")).state_specs
    assert [spec.shape for spec in tensors] == [(5, 6), (5,), (3, 5), (3,)]


class CountingByGroup(torch.optim.Optimizer):
    """SGD whose rate falls with a count that all parameters share, kept as schedule-free optimizers
    keep theirs.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


def test_what_an_optimizer_keeps_in_its_groups_belongs_to_the_worker() -> None:
    assert_trains_as_a_plain_loop(
        replace(TASK, optimizer=lambda module: CountingByGroup(module.parameters()))
    )


def test_making_a_replica_moves_no_weight() -> None:
    """The step that finds out what the optimizer keeps is undone; AdamW's decay moves weights
    without any gradient.
    """
    replica = replica_of(TASK)
    assert torch.equal(replica.layout.read(replica.module), start(replica))


# Kinds of models


def with_model(make: Callable[[], nn.Module]) -> Task:
    return replace(TASK, model=make)


class Strided(nn.Module):
    """A transposed weight and one that stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6).t())
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale


def test_strided_parameters_train_as_in_a_plain_loop() -> None:
    assert not Strided().weight.is_contiguous()
    assert_trains_as_a_plain_loop(with_model(Strided))


def test_an_optimizer_that_makes_its_state_early_trains_strided_parameters() -> None:
    assert_trains_as_a_plain_loop(
        replace(
            with_model(Strided), optimizer=lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1)
        )
    )


def channels_last() -> nn.Module:
    conv = nn.Sequential(nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(3, 3, (2, 1)), nn.Flatten())
    return conv.to(memory_format=torch.channels_last)


def test_channels_last_weights_train_as_in_a_plain_loop() -> None:
    assert_trains_as_a_plain_loop(with_model(channels_last))


def half_frozen() -> nn.Module:
    module = mlp()
    module[0].requires_grad_(False)
    return module


def test_frozen_parameters_stay_and_the_rest_trains_as_in_a_plain_loop() -> None:
    task = with_model(half_frozen)
    assert_trains_as_a_plain_loop(task)
    replica = replica_of(task)
    replica.train(fresh(replica), start(replica), SHARD, 5, 0, 0)
    assert torch.equal(replica.module[0].weight, task.seeded_model(5)[0].weight)


def test_a_bf16_model_has_an_fp32_master() -> None:
    """100 steps of 1e-4 from 1: each one alone is lost in bf16, whose numbers below 1 are 0.0039
    apart.
    """

    def model() -> nn.Module:
        return nn.ParameterDict({"w": nn.Parameter(torch.ones(1, dtype=torch.bfloat16))})

    task = scalar_task(
        1.0, model=model, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=1e-4)
    )
    theta, losses = trained(task, [50, 50])
    assert theta.item() == pytest.approx(0.99, abs=1e-5)
    assert losses[-1] == torch.tensor(1 - 99e-4).bfloat16().item()


def test_the_optimizer_of_a_bf16_model_keeps_fp32() -> None:
    specs = replica_of(with_model(lambda: mlp().bfloat16())).state_specs
    assert {spec.dtype for spec in specs[2:]} == {torch.float32}


def test_a_bf16_model_reads_what_was_trained() -> None:
    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return mse(module, (batch[0].bfloat16(), batch[1]))

    task = replace(TASK, model=lambda: mlp().bfloat16(), loss=loss)
    replica = replica_of(task)
    theta = start(replica)
    losses = replica.train(fresh(replica), theta, SHARD, 20, 0, 0)
    assert losses[-1] < losses[0]
    assert torch.equal(replica.layout.read(replica.module), theta.bfloat16().float())


def test_autocast_is_on_in_the_loss_and_only_if_asked_for() -> None:
    seen = []

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(module(batch[0]).dtype)
        return mse(module, batch)

    for autocast in (None, torch.bfloat16):
        trained(replace(TASK, loss=loss, autocast=autocast), [1])
    assert seen == [torch.float32, torch.bfloat16]


# Buffers


def normed() -> nn.Module:
    # A bias before a norm has no gradient but rounding, which AdamW would make big.
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_batch_norm_trains_as_in_a_plain_loop_and_its_statistics_stand_in_the_vector() -> None:
    task = with_model(normed)
    assert_trains_as_a_plain_loop(task)
    theta, losses = trained(task, [4])
    model, _ = plain_loop(task, len(losses))
    torch.testing.assert_close(
        theta[-10:], torch.cat([model[1].running_mean, model[1].running_var])
    )


def test_batches_that_a_norm_has_seen_are_counted_by_worker() -> None:
    replica = replica_of(with_model(normed), workers=2)
    one, other, theta = fresh(replica), fresh(replica), start(replica)
    replica.train(one, theta.clone(), SHARD, 3, 0, 0)
    replica.train(other, theta.clone(), OTHER, 5, 0, 0)
    replica.gradient(one, theta.clone(), SHARD, 3)
    assert (one[1].dtype, one[1].item(), other[1].item()) == (torch.int64, 4, 5)


def test_statistics_that_arrive_in_a_vector_are_gone_on_from() -> None:
    replica = replica_of(with_model(normed))
    theta = start(replica)
    theta[-10:] = 4.0
    replica.train(fresh(replica), theta, SHARD, 1, 0, 0)
    hidden = replica.task.seeded_model(5)[0](batches(SHARD, 0)[0]).detach()
    expected = torch.cat([0.9 * 4 + 0.1 * hidden.mean(dim=0), 0.9 * 4 + 0.1 * hidden.var(dim=0)])
    torch.testing.assert_close(theta[-10:], expected)


class Averaging(nn.Module):
    """Keeps a running mean of its inputs by putting a new tensor in the place of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * x.detach().mean(dim=0)
        return self.linear(x - self.seen)


def test_buffers_that_a_model_replaces_stand_in_the_vector() -> None:
    assert_trains_as_a_plain_loop(with_model(Averaging))


# Gradients by themselves


@pytest.mark.parametrize("make", [mlp, normed, Strided], ids=["mlp", "batch norm", "strided"])
def test_a_gradient_then_its_step_is_a_training_step(make: Callable[[], nn.Module]) -> None:
    replica = replica_of(with_model(make))
    whole, halves = start(replica), start(replica)
    whole_state, halves_state = fresh(replica), fresh(replica)
    for step in range(4):
        losses = replica.train(whole_state, whole, SHARD, 1, step, step)
        gradient = halves.clone()
        assert replica.gradient(halves_state, gradient, SHARD, step) == losses
        assert replica.apply(halves_state, halves, gradient, step) == []
        assert torch.equal(halves, whole)


def test_a_gradient_is_autograds_and_is_not_clipped() -> None:
    task = replace(TASK, gradient_clip=1e-3)
    replica = replica_of(task)
    gradient = start(replica)
    replica.gradient(fresh(replica), gradient, SHARD, 3)
    model = task.seeded_model(5)
    mse(model, batches(SHARD, 3)).backward()
    expected = torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )
    torch.testing.assert_close(gradient, expected)


def test_a_gradient_carries_the_new_buffers() -> None:
    replica = replica_of(with_model(normed))
    gradient, theta = start(replica), start(replica)
    replica.gradient(fresh(replica), gradient, SHARD, 0)
    replica.train(fresh(replica), theta, SHARD, 1, 0, 0)
    assert torch.equal(gradient[-10:], theta[-10:])


def test_a_known_gradient_is_applied_with_its_buffers() -> None:
    """The mean of several workers' gradients and buffers, none of which this replica has
    computed.
    """
    replica = replica_of(
        replace(
            with_model(normed),
            optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
            schedule=None,
        )
    )
    theta, count = start(replica), replica.layout.parameters
    gradient = torch.full_like(theta, 0.01)
    expected = torch.cat([theta[:count] - 0.5 * 0.01, gradient[count:]])
    replica.apply(fresh(replica), theta, gradient, 0)
    torch.testing.assert_close(theta, expected)


# Evaluation


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 3))


def test_an_evaluation_is_the_mean_loss_in_eval_mode() -> None:
    replica = replica_of(with_model(dropping))
    model = replica.task.seeded_model(5).eval()
    valid = replace(SHARD, split="valid")
    losses = [float(mse(model, batches(valid, index)).detach()) for index in range(3)]
    assert replica.evaluate(start(replica)) == [pytest.approx(sum(losses) / 3, rel=1e-6)]


def test_an_evaluation_leaves_the_vector_alone() -> None:
    replica = replica_of(with_model(dropping))
    theta = start(replica)
    replica.evaluate(theta)
    assert torch.equal(theta, start(replica))


def evaluated_or_not(task: Task) -> tuple[Tensor, Tensor]:
    """The weights after 4 steps, without and with evaluations of other weights in between."""
    thetas = []
    for evaluate in (False, True):
        replica = replica_of(task)
        theta, state = start(replica), fresh(replica)
        for step in range(4):
            replica.train(state, theta, SHARD, 1, step, step)
            if evaluate:
                replica.evaluate(torch.ones_like(theta))
        thetas.append(theta)
    return thetas[0], thetas[1]


def test_evaluations_in_between_change_no_bit_of_the_training() -> None:
    assert torch.equal(*evaluated_or_not(with_model(dropping)))


def partly_in_eval_mode() -> nn.Module:
    module = dropping()
    module[1].eval()  # the usual way to keep the statistics of a pretrained model
    return module


def test_what_its_maker_put_into_eval_mode_stays_there() -> None:
    assert torch.equal(*evaluated_or_not(with_model(partly_in_eval_mode)))


# Random numbers in the model


def test_dropout_depends_on_the_run_the_worker_and_the_batch_alone() -> None:
    task = with_model(dropping)
    first = trained(task, [3])
    torch.rand(17)
    assert torch.equal(trained(task, [3])[0], first[0])


@pytest.mark.parametrize(
    ("shard", "cursor"), [(SHARD, 1), (OTHER, 0)], ids=["next batch", "other worker"]
)
def test_dropout_differs_from_batch_to_batch_and_worker_to_worker(
    shard: Shard, cursor: int
) -> None:
    """One batch for all, so that only the mask can differ."""
    task = replace(with_model(dropping), batches=lambda shard, index: batches(SHARD, 0))
    replica = replica_of(task)
    losses = [
        replica.gradient(fresh(replica), start(replica), shard, cursor)
        for shard, cursor in ((SHARD, 0), (shard, cursor))
    ]
    assert losses[0] != losses[1]


# What goes wrong


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_loss_that_is_not_finite_says_at_which_step(value: str) -> None:
    def loss(module: nn.Module, batch: tuple[int, tuple[Tensor, Tensor]]) -> Tensor:
        index, data = batch
        return mse(module, data) * float(value) if index == 6 else mse(module, data)

    task = replace(TASK, batches=lambda shard, index: (index, batches(shard, index)), loss=loss)
    replica = replica_of(task)
    replica.train(fresh(replica), start(replica), SHARD, steps=2, progress=4, cursor=4)
    with pytest.raises(NonFiniteLoss) as error:
        replica.train(fresh(replica), start(replica), SHARD, steps=3, progress=4, cursor=4)
    assert str(error.value) == f"the training loss is {value} at its inner step 6"


def test_a_gradient_at_a_loss_that_is_not_finite_says_so_too() -> None:
    task = replace(TASK, loss=lambda module, batch: mse(module, batch) * float("nan"))
    replica = replica_of(task)
    with pytest.raises(NonFiniteLoss) as error:
        replica.gradient(fresh(replica), start(replica), SHARD, cursor=9)
    assert str(error.value) == "the training loss is nan at its inner step 9"


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_a_shard_without_data_is_named(shape: tuple[int, int]) -> None:
    """Else its loss would be NaN, and the settings would be suspected."""

    def some(shard: Shard, index: int) -> Any:
        x, y = batches(shard, index)
        return (
            {"x": torch.empty(shape), "y": [torch.empty(0)]}
            if shard.index == OTHER.index
            else (x, y)
        )

    replica = replica_of(replace(TASK, batches=some))
    replica.train(fresh(replica), start(replica), SHARD, steps=1, progress=0, cursor=0)
    with pytest.raises(ValueError, match=r"is empty") as error:
        replica.train(fresh(replica), start(replica), OTHER, steps=1, progress=0, cursor=3)
    assert str(error.value) == (
        f"batch 3 of shard {OTHER.index} of {OTHER.of} is empty; `batches` must give every shard "
        "some data"
    )


def test_validation_data_that_is_empty_is_named() -> None:
    task = replace(
        TASK,
        batches=lambda shard, index: (
            torch.empty(0) if shard.split == "valid" else batches(shard, index)
        ),
    )
    replica = replica_of(task)
    with pytest.raises(
        ValueError,
        match=r"^batch 0 of the validation data is empty; `batches` must give every shard some "
        r"data$",
    ):
        replica.evaluate(start(replica))


@pytest.mark.parametrize("token", [11, 300, -1])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    task = replace(
        TASK,
        model=lambda: GPT(vocabulary=11, context=4, layers=1, width=4, heads=2),
        loss=next_token_loss,
        batches=lambda shard, index: torch.tensor([[3, token, 7, 1]]),
    )
    replica = replica_of(task)
    with pytest.raises(IndexError) as error:
        replica.train(fresh(replica), start(replica), SHARD, steps=1, progress=0, cursor=0)
    assert str(error.value) == (
        "an embedding has no such row: a token is outside the vocabulary, or a sequence longer "
        "than the context; "
        f"the numbers in the batch are from {min(1, token)} to {max(7, token)}"
    )


def test_another_index_that_is_out_of_range_is_told_as_it_is() -> None:
    task = replace(TASK, loss=lambda module, batch: batch[7])
    with pytest.raises(IndexError, match=r"^tuple index out of range$"):
        replica_of(task).train(
            fresh(replica_of(task)), start(replica_of(task)), SHARD, steps=1, progress=0, cursor=0
        )
