"""Tasks that are not plain: parts of a model that do not train, buffers that are no statistics,
optimizers that keep things elsewhere, random numbers, odd batches, mistakes.

What is right is right for every method, whatever the number of processes; what cannot be right is
refused before the start, in one line.
"""

from __future__ import annotations

import random
import re
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from worlds import small

from archipel import Schedule, Task, UserError, methods, simulation
from archipel.recipe import Recipe, parse_recipe
from archipel.train.batch import micro, tensors
from archipel.train.configs import UserTask
from archipel.train.data import Shard
from archipel.train.inner_steps import Solo
from archipel.train.pool_process import median_step_time_s
from archipel.train.replica import Replica, Run
from archipel.train.statistics import changing
from archipel.train.task import make_task
from archipel.train.trial import try_out

CPU = torch.device("cpu")
SHARD = Shard(index=0, of=2, region=0, regions=1, seed=0)
OTHER = replace(SHARD, index=1)


def batches(shard: Shard, index: int) -> tuple[Tensor, Tensor]:
    seed = 10**9 + index if shard.split == "valid" else shard.index * 10**4 + index
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(dim=1, keepdim=True)


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))


TASK = Task(mlp, squared, batches, adamw, valid_batches=2)


def replica_of(task: Task, workers: int = 2) -> Replica:
    return Replica(task, Run(40, workers, seed=5), CPU)


def plain_loop(task: Task, steps: int) -> nn.Module:
    """What anybody would write."""
    model = task.seeded_model(5)
    optimizer = task.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batches(SHARD, step)).backward()
        optimizer.step()
    return model


# Parts of a model that do not train


class Everything(nn.Module):
    """One of each kind that a state dict may hold; the values of `CONSTANTS` stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))
        self.again = self.net[1]  # a layer with statistics, used under two names
        self.out = nn.Linear(6, 1)
        self.out_again = self.out  # tied
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.halves = nn.Parameter(
            torch.full((3,), 1 / 3, dtype=torch.float16), requires_grad=False
        )
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
        self.register_buffer("far", torch.tensor([float("inf"), float("nan"), 1.0]))
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("tenth", torch.full((7,), 0.1))
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("large", torch.tensor(2**62 + 1))
        self.register_buffer("small", torch.tensor([1, 2], dtype=torch.uint16))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.fill_(True)
        masked = 0 * torch.softmax(self.mask, dim=-1).sum()
        return self.out(self.again(self.net(self.frozen(x)))) + masked


CONSTANTS = ("frozen.weight", "halves", "mask", "far", "third", "tenth", "turns", "large", "small")


def everything() -> Task:
    return replace(TASK, model=Everything)


def test_what_training_changes_is_told_from_what_it_does_not() -> None:
    assert changing(everything(), CPU) == {
        "net.1.running_mean",
        "net.1.running_var",
    }


def test_a_state_dict_has_every_name_and_every_type() -> None:
    replica = replica_of(everything())
    own = replica.module.state_dict()
    integers = dict(zip(replica.layout.integers, replica.first_integers, strict=True))
    found = replica.layout.state_dict(replica.first, integers)
    assert found.keys() == own.keys()
    for name in CONSTANTS:
        assert found[name].dtype == own[name].dtype
        assert torch.equal(found[name].nan_to_num(7), own[name].nan_to_num(7))
    assert "cache" not in found
    Everything().load_state_dict(found, strict=True)


TASK_FILE = """
from neighbour import task_of
import test_unusual_tasks as tests

def everything():
    return tests.everything()

def neighbourly():
    return task_of()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's task file, with a neighbour beside it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "neighbour.py").write_text(
        "import test_unusual_tasks as tests\n\ndef task_of():\n    return tests.TASK\n"
    )
    (folder / "task.py").write_text(f"import sys\nsys.path.append({str(Path(__file__).parent)!r})")
    with (folder / "task.py").open("a") as text:
        text.write(TASK_FILE)
    return folder / "task.py"


def recipe(task: str, method: str, workers: int = 3) -> Recipe:
    return parse_recipe(
        {
            "method": {"name": method, **small(method, accumulate=3)},
            "topology": {
                "regions": {"a": [1.0] * (workers - 1), "b": [0.7]},
                "default": {"bandwidth_gbit_s": 1.0},
            },
            "task": task,
            "run": {"steps": 90, "evaluations": 2},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", methods.names())
def test_every_method_takes_the_whole_model_home_and_constants_to_the_bit(
    pools: Any, file: Path, method: str, tmp_path: Path
) -> None:
    """Three workers: a mean of three equal numbers need not be that number."""
    given = recipe(f"{file}:everything", method)
    summary = simulation.simulate(given, pools(given), tmp_path / "run")
    assert summary["final_loss"] < 20
    assert not summary["refused_updates"]
    model = everything().seeded_model(1)
    model.load_state_dict(load_file(tmp_path / "run" / "weights.safetensors"), strict=True)
    for name in CONSTANTS:
        first = everything().seeded_model(0).state_dict()[name]
        assert torch.equal(model.state_dict()[name].nan_to_num(7), first.nan_to_num(7)), name
    assert bool(model.seen)
    assert torch.equal(model.out.weight, model.out_again.weight)
    assert not torch.equal(model.again.running_mean, torch.zeros(6))


class Teacher(nn.Module):
    """A frozen copy that follows the weights slowly, as in self-supervised learning."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 1), nn.Linear(8, 1)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    slow.lerp_(fast, 0.1)
        return self.student(x) + self.teacher(x)


def test_a_frozen_parameter_that_training_changes_is_the_workers_own() -> None:
    task = replace(TASK, model=Teacher, schedule=None, gradient_clip=None)
    replica = replica_of(task)
    theta, other = replica.first.clone(), replica.first.clone()
    state = replica.new_state()
    for step in range(5):
        replica.train(state, theta, SHARD, 1, step, step)
        replica.train(replica.new_state(), other, OTHER, 1, step, step)
    expected = replica.layout.read(plain_loop(task, 5))
    torch.testing.assert_close(theta, expected, rtol=1e-5, atol=1e-6)
    assert replica.layout.numel - replica.layout.parameters == 9


class Late(nn.Module):
    """A buffer that changes for the first time at the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("late", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count > 3:
            self.late += 1
        return self.net(x)


def test_a_buffer_that_changes_later_is_named() -> None:
    replica = replica_of(replace(TASK, model=Late))
    state, theta = replica.new_state(), replica.first.clone()
    replica.train(state, theta, SHARD, 3, 0, 0)
    with pytest.raises(UserError, match=r"^task\.model: 'late' has been changed in training"):
        replica.train(state, theta, SHARD, 1, 3, 3)


class Writes(nn.Module):
    """Writes to a buffer with a value of the given kind in every step."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("kept", value)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.mul_(1)
        return self.net(x)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            torch.ones(2, dtype=torch.complex64),
            "task.model: 'kept' is torch.complex64, and training changes it; workers can average "
            "floating-point tensors only",
        ),
        (
            torch.tensor([1.0, float("-inf")]),
            "task.model: training writes to 'kept', and not all of it is finite, so that workers "
            "cannot average it",
        ),
    ],
)
def test_a_buffer_that_cannot_be_averaged_is_refused_before_the_start(
    value: Tensor, text: str
) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(text)}"):
        replica_of(replace(TASK, model=lambda: Writes(value.clone())))


class Holds(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("kept", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_a_type_that_no_file_can_hold_is_refused_before_the_start() -> None:
    task = replace(TASK, model=lambda: Holds(torch.ones(2, dtype=torch.complex128)))
    with pytest.raises(UserError) as error:
        try_out(replica_of(task), SHARD)
    assert str(error.value) == (
        "task.model: 'kept' is torch.complex128 (torch.strided), which weights.safetensors cannot "
        "hold; register it with persistent=False"
    )


def test_a_parameter_that_no_batch_touches_stays_as_in_plain_torch() -> None:
    """AdamW decays what has a gradient, if it is 0."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = mlp(), nn.Linear(3, 3)
            self.bf16 = nn.Linear(3, 3, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    task = replace(TASK, model=Unused, schedule=None, gradient_clip=None)
    replica, plain = replica_of(task), plain_loop(task, 6)
    theta, applied = replica.first.clone(), replica.first.clone()
    state, other = replica.new_state(), replica.new_state()
    for step in range(6):
        replica.train(state, theta, SHARD, 1, step, step)
        gradient = applied.clone()
        replica.gradient(other, gradient, SHARD, step)
        replica.apply(other, applied, gradient, step)
    first = replica.layout.named(replica.first)
    for found in (replica.layout.named(theta), replica.layout.named(applied)):
        assert torch.equal(found["unused.weight"], first["unused.weight"])
        assert torch.equal(found["bf16.weight"], first["bf16.weight"])
        torch.testing.assert_close(found["net.0.weight"], plain.net[0].weight.detach())


def test_a_parameter_that_is_touched_later_begins_then_as_in_plain_torch() -> None:
    """Also between other workers' turns: its moments begin with the first gradient."""

    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.late = mlp(), nn.Linear(8, 1)
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.net(x) + (self.late(x) if self.count % 3 == 0 else 0)

    task = replace(TASK, model=Later, schedule=None, gradient_clip=None)
    replica = replica_of(task)
    state, theta = replica.new_state(), replica.first.clone()
    for step in range(8):
        replica.train(state, theta, SHARD, 1, step, step)
        replica.train(replica.new_state(), theta.clone(), OTHER, 4, 0, 0)
    expected = replica.layout.read(plain_loop(task, 8))
    torch.testing.assert_close(theta, expected, rtol=1e-5, atol=1e-6)


# Optimizers


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers behind one face; their states are shared with it or their own."""

    def __init__(self, model: nn.Module, shared: bool) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        super().__init__([{"params": matrices, "lr": 1e-2}, {"params": others, "lr": 1e-2}], {})
        self.parts = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
        if shared:
            for part in self.parts:
                part.state = self.state

    def step(self, closure: None = None) -> None:
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups[0]["lr"] = group["lr"]
            part.step()


class Counting(torch.optim.SGD):
    """A warm-up of its own, counted in an attribute."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-2)
        self.taken = 0

    def step(self, closure: None = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 * min(1.0, self.taken / 10)
        super().step()


class Lookahead(torch.optim.SGD):
    """Every third step, slow weights in a list of attributes follow (arXiv 1907.08610)."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.5)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.inside = {"count": 0}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        self.inside["count"] += 1
        if self.inside["count"] % 3 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Decaying(torch.optim.SGD):
    """Lowers its own learning rate."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.9


class Scheduled(torch.optim.SGD):
    """Has one of torch's schedules inside."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self, 0.8)

    def step(self, closure: None = None) -> None:
        super().step()
        self.schedule.step()


def of_parameters(kind: Any, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **settings)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD, Nesterov": of_parameters(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "Adam": of_parameters(torch.optim.Adam, lr=0.01),
    "Adam, foreach": of_parameters(torch.optim.Adam, lr=0.01, foreach=True),
    "AdamW": of_parameters(torch.optim.AdamW, lr=0.01),
    "AdamW, fused": of_parameters(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW, rate in a tensor": of_parameters(
        torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False
    ),
    "Adagrad": of_parameters(torch.optim.Adagrad, lr=0.1),
    "Adadelta": of_parameters(torch.optim.Adadelta, lr=0.5),
    "Adamax": of_parameters(torch.optim.Adamax, lr=0.01),
    "NAdam": of_parameters(torch.optim.NAdam, lr=0.01),
    "RAdam": of_parameters(torch.optim.RAdam, lr=0.01),
    "RMSprop": of_parameters(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Rprop": of_parameters(torch.optim.Rprop, lr=0.01),
    "ASGD": of_parameters(torch.optim.ASGD, lr=0.01, t0=3),
    "Adafactor": of_parameters(torch.optim.Adafactor, lr=0.01),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01),
    "Muon and AdamW, one state": lambda model: MuonAndAdamW(model, shared=True),
    "Muon and AdamW, two states": lambda model: MuonAndAdamW(model, shared=False),
    "counting": of_parameters(Counting),
    "lookahead": of_parameters(Lookahead),
    "decaying": of_parameters(Decaying, lr=0.05),
    "scheduled": of_parameters(Scheduled),
}


def with_optimizer(name: str, model: Callable[[], nn.Module] = mlp) -> Task:
    return replace(TASK, model=model, optimizer=OPTIMIZERS[name], schedule=None, gradient_clip=None)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_workers_take_turns_on_any_optimizer_as_if_alone_in_plain_torch(name: str) -> None:
    task = with_optimizer(name)
    replica = replica_of(task)
    try_out(replica, SHARD)
    state, theta = replica.new_state(), replica.first.clone()
    other, other_theta = replica.new_state(), replica.first.clone()
    for turn in range(4):
        replica.train(state, theta, SHARD, 2, 0, 2 * turn)
        replica.train(other, other_theta, OTHER, 3, 0, 3 * turn)
    expected = replica.layout.read(plain_loop(task, 8))
    torch.testing.assert_close(theta, expected, rtol=1e-5, atol=1e-6)
    again, again_theta = replica.new_state(), replica.first.clone()
    replica.train(again, again_theta, OTHER, 12, 0, 0)
    assert torch.equal(again_theta, other_theta)


@pytest.mark.parametrize(
    "name", ["Muon and AdamW, one state", "Muon and AdamW, two states", "AdamW"]
)
def test_an_optimizer_of_a_bf16_model_moves_the_fp32_weights_wherever_it_holds_them(
    name: str,
) -> None:
    task = replace(
        with_optimizer(name, lambda: mlp().bfloat16()),
        loss=lambda model, batch: squared(model, (batch[0].bfloat16(), batch[1])).float(),
    )
    replica = replica_of(task)
    theta = replica.first.clone()
    replica.train(replica.new_state(), theta, SHARD, 4, 0, 0)
    moved = (theta != replica.first).float().mean()
    assert moved > 0.95
    assert not torch.equal(theta, theta.bfloat16().float())


def test_a_worker_whose_optimizer_is_reset_begins_it_anew() -> None:
    task = with_optimizer("lookahead")
    solo, fresh = Solo(replica_of(task), SHARD), Solo(replica_of(task), SHARD)
    theta = solo.replica.first.clone()
    solo.train(theta, 5, 0, 0, lambda: None)
    solo.reset_optimizer()
    start = theta.clone()
    solo.train(theta, 2, 0, 5, lambda: None)
    fresh.train(start, 2, 0, 5, lambda: None)
    assert torch.equal(theta, start)


class History(torch.optim.SGD):
    """Keeps all of its gradients."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("past", []).append(parameter.grad.clone())


class Words(torch.optim.SGD):
    """Keeps a text that changes."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.word = getattr(self, "word", "") + "a"


class Drawing(torch.optim.SGD):
    """Has random numbers of its own, which nobody else can see."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.01)
        self.draws = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += 0.01 * torch.randn(parameter.shape, generator=self.draws)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            of_parameters(torch.optim.LBFGS),
            r"^task\.optimizer: a step of LBFGS failed at .*closure.*; an inner optimizer gets its "
            r"gradients and no closure: take one whose step\(\) needs none$",
        ),
        (
            lambda model: [adamw(model)],
            r"^task\.optimizer returned a list: it must return one torch\.optim\.Optimizer; "
            r"several can be put behind one",
        ),
        (
            torch.optim.SGD,
            r"^task\.optimizer failed at .*: TypeError: 'Sequential' object is not an iterator|"
            r"^task\.optimizer failed at ",
        ),
        (
            lambda model: torch.optim.SGD([nn.Parameter(torch.ones(3))]),
            r"^task\.optimizer: SGD moves a tensor of shape \(3,\) that is no parameter of the",
        ),
        (
            of_parameters(History, lr=0.01),
            r"^task\.optimizer: History keeps 'state / a parameter / past / 1' after one of its "
            r"first two steps and not after the other",
        ),
        (
            of_parameters(Words, lr=0.01),
            r"^task\.optimizer: Words changes 'word' from 'a' to 'aa' in a step; only tensors and "
            r"numbers can be kept for each worker$",
        ),
        (
            of_parameters(Drawing),
            r"^task\.optimizer: Drawing keeps something between steps that cannot be seen: a "
            r"worker's first two inner steps, taken twice, gave different results\.",
        ),
    ],
)
def test_an_optimizer_that_cannot_serve_workers_in_turn_is_refused_before_the_start(
    optimizer: Any, text: str
) -> None:
    with pytest.raises(UserError, match=text) as error:
        try_out(replica_of(replace(TASK, optimizer=optimizer)), SHARD)
    assert "\n" not in str(error.value)


# Random numbers


def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that draws from every generator that a task may use."""
    x = batch[0] + 0.3 * torch.randn_like(batch[0])
    x = x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape)).float()
    return squared(model, (x + 0.1 * random.random(), batch[1]))


def test_an_evaluation_draws_the_same_numbers_each_time_and_disturbs_nobody() -> None:
    replica = replica_of(replace(TASK, loss=noisy))
    thetas, losses = [], []
    for evaluate in (False, True):
        state, theta = replica.new_state(), replica.first.clone()
        for step in range(4):
            replica.train(state, theta, SHARD, 1, step, step)
            if evaluate:
                losses.append(replica.evaluate(replica.first))
        thetas.append(theta)
    assert torch.equal(*thetas)
    assert losses == [losses[0]] * 4
    other = Replica(replica.task, Run(40, 2, seed=6), CPU)
    assert other.evaluate(replica.first) == losses[0]  # whatever the run's seed


def test_an_evaluation_and_a_trial_leave_the_programs_own_random_numbers_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), np.random.random(), float(torch.rand(()))
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    replica = replica_of(replace(TASK, loss=noisy))
    try_out(replica, SHARD)
    replica.evaluate(replica.first)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == expected


def test_an_optimizer_that_draws_does_so_alike_on_all_workers() -> None:
    """In synchronous training all take the same step with the same gradient."""

    class Langevin(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                parameter += 0.01 * torch.randn_like(parameter)

    replica = replica_of(replace(TASK, optimizer=of_parameters(Langevin, lr=0.01)))
    gradient = torch.ones_like(replica.first)
    thetas = []
    for _ in range(2):
        theta = replica.first.clone()
        replica.apply(replica.new_state(), theta, gradient, progress=4)
        thetas.append(theta)
        torch.rand(7)
    assert torch.equal(*thetas)


class Forgetful(nn.Module):
    """Counts in a plain attribute, which no worker can call its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x) * (1 + 0.1 * self.calls)


def test_a_model_that_keeps_something_out_of_sight_is_refused_before_the_start() -> None:
    with pytest.raises(UserError, match=r"^task: its model, loss or batches keep something"):
        try_out(replica_of(replace(TASK, model=Forgetful)), SHARD)


def test_an_evaluation_has_the_integer_buffers_that_it_is_given() -> None:
    """And not those of whoever used the replica last."""

    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.count += 1
            return self.net(x) * self.count

    replica = replica_of(replace(TASK, model=Annealed))
    [first] = replica.evaluate(replica.first)
    replica.train(replica.new_state(), replica.first.clone(), SHARD, 5, 0, 0)
    assert replica.evaluate(replica.first) == [first]
    assert replica.evaluate(replica.first, [torch.tensor(2)]) != [first]


# Batches


class Encoding(UserDict[str, Tensor]):
    """A mapping as tokenizers return it."""

    def __init__(self, data: dict[str, Tensor], name: str = "") -> None:
        super().__init__(data)
        self.name = name


class Named(NamedTuple):
    x: Tensor
    words: list[str]


@dataclass(frozen=True)
class Sample:
    x: Tensor
    scale: float


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (Encoding({"x": torch.arange(4)}, "kept"), lambda part: part["x"]),
        (MappingProxyType({"x": torch.arange(4)}), lambda part: part["x"]),
        (Named(torch.arange(4), list("abcd")), lambda part: part.x),
        (Sample(torch.arange(4), 0.5), lambda part: part.x),
        ([np.arange(4), torch.arange(4)], lambda part: torch.from_numpy(part[0])),
        ({"a": (Sample(torch.arange(4), 0.5), "b")}, lambda part: part["a"][0].x),
    ],
    ids=["mapping", "read-only", "named tuple", "dataclass", "array", "nested"],
)
def test_a_batch_of_any_usual_type_is_cut_and_keeps_its_type(
    batch: Any, rows: Callable[[Any], Tensor]
) -> None:
    first, second = micro(batch, 2)
    assert type(first) is type(batch)
    assert (rows(first).tolist(), rows(second).tolist()) == ([0, 1], [2, 3])
    assert [tensor.tolist() for tensor in tensors(batch)] == [[0, 1, 2, 3]]


def test_what_a_batch_holds_besides_tensors_stays_or_is_cut_with_them() -> None:
    first, second = micro(Named(torch.arange(4), list("abcd")), 2)
    assert (first.words, second.words) == (["a", "b"], ["c", "d"])
    assert [part.scale for part in micro(Sample(torch.arange(4), 0.5), 2)] == [0.5, 0.5]
    assert micro(Encoding({"x": torch.arange(4)}, "kept"), 2)[1].name == "kept"


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"x": torch.ones(4), "other": deque([torch.ones(4)])},
            "a batch with a deque cannot be cut; mappings, tuples, lists and dataclasses of "
            "tensors can",
        ),
        (
            torch.eye(4).to_sparse(),
            "a batch with a tensor of layout torch.sparse_coo cannot be cut",
        ),
        (
            nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
            "a batch with a PackedSequence cannot be cut",
        ),
        (
            {"x": torch.ones(4), "weight": torch.tensor(1.0)},
            "2 equal parts cannot be made of a batch of shape ()",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_with_the_reason(batch: Any, text: str) -> None:
    with pytest.raises(UserError) as error:
        micro(batch, 2)
    assert str(error.value) == text


# Mistakes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": mlp()}, "Task.model = a Sequential: must be a function that makes it"),
        ({"model": None}, "Task.model = a NoneType: must be a function that makes it"),
        ({"loss": 3}, "Task.loss = a int: must be a function of a model and a batch"),
        ({"batches": []}, "Task.batches = a list: must be a function of a shard and a number"),
        (
            {"optimizer": adamw(mlp())},
            "Task.optimizer = a AdamW: must be a function that makes it of a model",
        ),
        ({"valid_batches": 0}, "Task.valid_batches = 0: must be a whole number, at least 1"),
        ({"valid_batches": 2.0}, "Task.valid_batches = 2.0: must be a whole number, at least 1"),
        ({"valid_batches": True}, "Task.valid_batches = True: must be a whole number, at least 1"),
        ({"tokens_per_step": -5}, "Task.tokens_per_step = -5: must be a whole number, at least 1"),
        (
            {"gradient_clip": 0},
            "Task.gradient_clip = 0: must be a number above 0, or None: gradients as they are",
        ),
        (
            {"gradient_clip": float("nan")},
            "Task.gradient_clip = nan: must be a number above 0, or None: gradients as they are",
        ),
        (
            {"schedule": 0.1},
            "Task.schedule = 0.1: must be an archipel.Schedule, or None: constant",
        ),
        (
            {"autocast": "bf16"},
            "Task.autocast = 'bf16': must be torch.bfloat16, torch.float16 or None",
        ),
        ({"description": 5}, "Task.description = 5: must be a text"),
        ({"entropy_rate": "low"}, "Task.entropy_rate = 'low': must be a finite number, or None"),
    ],
)
def test_a_task_with_a_mistake_is_refused_when_it_is_made(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError) as error:
        replace(TASK, **changes)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"warmup": 1.5}, "Schedule.warmup = 1.5: must be a number from 0 to 1"),
        ({"warmup": "5 %"}, "Schedule.warmup = '5 %': must be a number from 0 to 1"),
        ({"final": -0.1}, "Schedule.final = -0.1: must be a finite number, at least 0"),
    ],
)
def test_a_schedule_with_a_mistake_is_refused_when_it_is_made(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError) as error:
        Schedule(**settings)
    assert str(error.value) == text


def slip() -> nn.Module:
    return nn.Linear(8, widht=1)  # type: ignore[call-arg]  # the slip is on purpose


def frozen_through() -> nn.Module:
    return mlp().requires_grad_(False)


def crossed() -> nn.Module:
    """Two parameters in one memory."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


LINE = slip.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"model": slip},
            rf"^task\.model failed at .*test_unusual_tasks\.py:{LINE}: TypeError: .*'widht'$",
        ),
        (
            {"model": lambda: None},
            r"^task\.model returned a NoneType: it must return a torch\.nn\.Module$",
        ),
        (
            {"model": frozen_through},
            r"^task\.model: the Sequential has no parameter that can be trained",
        ),
        (
            {"model": lambda: nn.Sequential(nn.LazyLinear(1))},
            r"^task\.model: '0\.weight' has no shape yet \(a lazy module\); call the model once",
        ),
        (
            {"model": lambda: nn.Linear(8, 1, device="meta")},
            r"^task\.model: 'weight' is on the device 'meta' and has no values",
        ),
        (
            {"model": crossed},
            r"^task\.model: parameters '0\.weight' and '1\.weight' share memory",
        ),
        (
            {"loss": lambda model, batch: None},
            r"^task\.loss must return a 0-d tensor that depends on the model's parameters, not a "
            r"NoneType$",
        ),
        (
            {"loss": lambda model, batch: model(batch[0])},
            r"^task\.loss must return a 0-d tensor .*, not a tensor of shape \(16, 1\)$",
        ),
        (
            {"loss": lambda model, batch: squared(model, batch).detach()},
            r"^task\.loss must return a 0-d tensor .*, not a tensor of shape \(\) without a gradi",
        ),
        (
            {"batches": lambda shard, index: None},
            r"^task\.loss failed at .*: TypeError: 'NoneType' .* \(`batches` has returned None\)$",
        ),
        (
            {"batches": lambda shard: None},
            r"^task\.batches failed at .*: TypeError: .*takes 1 positional argument but 2",
        ),
        (
            {
                "batches": lambda shard, index: (
                    torch.empty(0) if shard.split == "valid" else batches(shard, index)
                )
            },
            r"^task\.batches failed at .*: ValueError: batch 0 of the validation data is empty",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_mistake_in_a_tasks_functions_is_one_line_before_the_start(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError, match=text) as error:
        try_out(replica_of(replace(TASK, **changes)), SHARD)
    assert "\n" not in str(error.value)


def test_a_mistake_in_make_says_where_the_task_was_made(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        "from archipel import Task\n\ndef make():\n"
        "    return Task(lambda: None, min, max, sum, valid_batches=0)\n"
    )
    with pytest.raises(UserError) as error:
        make_task(UserTask(name=f"{path}:make"))
    assert str(error.value) == (
        f"task.name = '{path}:make': make() failed at {path}:4: Task.valid_batches = 0: must be a "
        "whole number, at least 1"
    )


# A task file with neighbours


def test_a_task_file_imports_what_lies_beside_it(file: Path) -> None:
    before = list(sys.path)
    assert make_task(UserTask(name=f"{file}:neighbourly")).model is TASK.model
    assert sys.path.index(str(file.parent)) == 0 or str(file.parent) in before


@pytest.mark.slow
def test_so_does_one_in_the_processes_of_a_pool(pools: Any, file: Path, tmp_path: Path) -> None:
    given = recipe(f"{file}:neighbourly", "diloco")
    assert simulation.simulate(given, pools(given), tmp_path / "run")["final_loss"] < 20


# Measuring


def test_measuring_the_time_of_a_step_changes_nothing() -> None:
    replica = replica_of(everything())
    untouched = replica_of(everything())
    assert median_step_time_s(replica, SHARD, warm_up=1, steps=2) > 0
    assert torch.equal(replica.first, untouched.first)
    thetas = []
    for one in (replica, untouched):
        theta = one.first.clone()
        one.train(one.new_state(), theta, SHARD, 3, 0, 0)
        thetas.append(theta)
    assert torch.equal(*thetas)
    assert replica.evaluate(replica.first) == untouched.evaluate(untouched.first)
