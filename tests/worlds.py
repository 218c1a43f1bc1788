"""Fakes for tests: trainers that compute in this process, at once, and a way to run a method on
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from archipel import methods
from archipel.actor import Actor, Gradient, NodeId, Trained, World
from archipel.run.census import Plan
from archipel.run.invariants import Ledger
from archipel.run.metrics import Recorder
from archipel.sim.clock import Simulator
from archipel.sim.network import Network
from archipel.sim.schedule import Faults
from archipel.sim.topology import PROFILES, Profile, Topology, load_topology
from archipel.train.data import Shard
from archipel.train.replica import Replica, Run
from archipel.train.task import Schedule, Task, adamw
from archipel.train.trainer import Done

PROFILE = PROFILES["pythia-70m-h100"]
TINY = Profile(name="tiny", model_bytes=1_000_000, step_time_s=1.0)
"""Times that can be counted in the head."""


@dataclass
class Inline:
    """Real inner steps on `task`, in this process; worker i has shard i, or `shards[i]`."""

    task: Task
    run: Run
    workers: Sequence[NodeId]
    shards: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.replica = Replica(self.task, self.run, torch.device("cpu"))
        self.rank = {worker: i for i, worker in enumerate(self.workers)}
        self.states = [
            [torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.replica.state_specs]
            for _ in self.workers
        ]
        for state in self.states:
            self.replica.reset(state)
        self.cursors = [0] * len(self.workers)

    def shard(self, rank: int) -> Shard:
        index = rank if self.shards is None else self.shards[rank]
        return Shard(index, len(self.workers), 0, 1, self.run.seed)

    def train(self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float) -> Done:
        rank, result = self.rank[worker], theta.clone()
        losses = self.replica.train(
            self.states[rank], result, self.shard(rank), steps, progress, self.cursors[rank]
        )
        self.cursors[rank] += steps
        return Done(Trained(result, steps, tuple(losses)))

    def gradient(self, worker: NodeId, theta: Tensor, due_s: float) -> Done:
        rank, result = self.rank[worker], theta.clone()
        [loss] = self.replica.gradient(
            self.states[rank], result, self.shard(rank), self.cursors[rank]
        )
        self.cursors[rank] += 1
        return Done(Gradient(result, loss))

    def apply(
        self, worker: NodeId, theta: Tensor, gradient: Tensor, progress: int, due_s: float
    ) -> Done:
        result = theta.clone()
        self.replica.apply(self.states[self.rank[worker]], result, gradient, progress)
        return Done(Trained(result, 1, ()))

    def evaluate(self, theta: Tensor, due_s: float) -> Done:
        return Done(self.replica.evaluate(theta.clone())[0])

    def reset_optimizer(self, worker: NodeId) -> None:
        self.replica.reset_optimizer(self.states[self.rank[worker]])


@dataclass
class Quadratic:
    """Plain gradient descent on ½|θ − target|², whose steps are a closed form; no data."""

    numel: int = 8
    lr: float = 0.05
    target: float = 0.0
    calls: list[str] = field(default_factory=list)

    def train(self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float) -> Done:
        self.calls.append("train")
        result = self.target + (theta - self.target) * (1 - self.lr) ** steps
        return Done(
            Trained(result, steps, (float((theta - self.target).square().sum() / 2),) * steps)
        )

    def gradient(self, worker: NodeId, theta: Tensor, due_s: float) -> Done:
        self.calls.append("gradient")
        return Done(Gradient(theta - self.target, float((theta - self.target).square().sum() / 2)))

    def apply(
        self, worker: NodeId, theta: Tensor, gradient: Tensor, progress: int, due_s: float
    ) -> Done:
        self.calls.append("apply")
        return Done(Trained(theta - self.lr * gradient, 1, ()))

    def evaluate(self, theta: Tensor, due_s: float) -> Done:
        return Done(float((theta - self.target).square().sum() / 2))

    def reset_optimizer(self, worker: NodeId) -> None:
        pass

    def state_of(self, worker: NodeId) -> None:
        return None

    def put(self, worker: NodeId, state: None) -> None:
        pass


def linear_task(features: int = 6, batch_size: int = 8) -> Task:
    """Noisy linear regression through a small hidden layer; every batch is a function of (seed,
    shard, index).
    """
    truth = torch.from_numpy(np.random.default_rng(7).standard_normal(features).astype(np.float32))

    def batches(shard: Shard, index: int) -> tuple[Tensor, Tensor]:
        rng = shard.rng(index)
        x = torch.from_numpy(rng.standard_normal((batch_size, features)).astype(np.float32))
        noise = torch.from_numpy(rng.standard_normal(batch_size).astype(np.float32))
        return x, x @ truth + 0.1 * noise

    return Task(
        model=lambda: nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 1)),
        loss=lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square().mean(),
        batches=batches,
        optimizer=lambda model: adamw(model, 0.02, (0.9, 0.95), 1e-8, 0.1),
        valid_batches=2,
        tokens_per_step=batch_size,
        schedule=Schedule(warmup=0.1),
    )


def workers_of(topology: Topology) -> list[NodeId]:
    return [worker.id for worker in topology.workers]


def simulator(
    method: str,
    trainer: Any,
    *,
    topology: Topology | str = "one-node",
    steps: int | None = 100,
    settings: dict[str, Any] | None = None,
    theta: Tensor | None = None,
    profile: Profile = PROFILE,
    plan: Plan | None = None,
    evaluate_every: int = 10**9,
    strict: bool = False,
    seed: int = 0,
    actors: Sequence[Actor] | None = None,
    parameters: int | None = None,
    faults: Faults | None = None,
    **more: Any,
) -> Simulator:
    """A simulator that is ready to run `method`, or any `actors`."""
    topology = load_topology(topology) if isinstance(topology, str) else topology
    if theta is None:
        theta = (
            trainer.replica.layout.read(trainer.replica.module)
            if isinstance(trainer, Inline)
            else torch.ones(trainer.numel)
        )
    if parameters is None:
        parameters = (
            trainer.replica.layout.parameters if isinstance(trainer, Inline) else theta.numel()
        )
    if actors is None:
        module = methods.load(method)
        actors = module.build(
            module.Config(**(settings or {})), World(topology.workers, parameters, seed), theta
        )
    watches = [Ledger(frozenset(workers_of(topology)))] if faults is not None else []
    return Simulator(
        actors,
        topology.workers,
        Network(topology, np.random.default_rng(seed)),
        profile,
        trainer,
        Recorder(),
        replace(
            plan or Plan(steps), tokens_per_step=1, evaluate_every=evaluate_every, strict=strict
        ),
        numel=theta.numel(),
        parameters=parameters,
        seed=seed,
        faults=faults,
        observers=watches,
        **more,
    )


def train_with(simulator: Simulator, trainer: Any) -> None:
    """Have another trainer compute what a simulator that has not run asks for."""
    simulator.engine.setting = replace(simulator.engine.setting, trainer=trainer)


def watch_calls(simulator: Simulator, verb: str, watch: Any) -> None:
    """`watch(node, *arguments)` is called whenever an actor calls a verb, before it does
    anything.
    """

    def watched(me: NodeId, call: Any) -> Any:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            watch(me, *arguments)
            return call(*arguments, **keywords)

        return wrapped

    for me, context in simulator.engine.contexts.items():
        setattr(context, verb, watched(me, getattr(context, verb)))


def ledger_of(simulator: Simulator) -> Ledger:
    """What is noted beside a run with faults."""
    [ledger] = [one for one in simulator.state.observers if isinstance(one, Ledger)]
    return ledger


def model_of(simulator: Simulator) -> Tensor:
    """The model that a user would take home."""
    return torch.stack(simulator.parts()).mean(dim=0)


PLAIN: dict[str, Any] = {
    "inner_steps": 4,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "buffer": 1,
    "alpha": 0.0,
    "beta": 1.0,
    "gamma": 0.0,
    "accumulate": 2,
    "merge_weight": 0.0,
    "report_since": "send",
    "local_lr": 1.0,
    "local_momentum": 0.0,
    "local_buffer": 1,
    "global_lr": 1.0,
    "global_momentum": 0.0,
    "global_buffer": 1,
}
"""Settings with which methods add up what workers do, so that a model says which inner steps are in
it. A new method whose settings have other names adds them here.
"""


def plain(method: str) -> dict[str, Any]:
    """Those of `PLAIN` that a method has."""
    known = methods.load(method).Config.model_fields
    return {name: value for name, value in PLAIN.items() if name in known}


def small(method: str, **chosen: Any) -> dict[str, Any]:
    """Settings with which a short run takes several outer steps; `chosen` ones as they are given,
    where a method has them.
    """
    known = methods.load(method).Config.model_fields
    settings = {"inner_steps": 3, "accumulate": 2, **chosen}
    return {name: value for name, value in settings.items() if name in known}
