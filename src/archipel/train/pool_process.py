"""One process of the pool: what it is told, the memory that it shares, and the jobs it computes.

What belongs here: the side of the pool that computes. What does not: which job is next, and whose
(`pool.py`).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from archipel.errors import UserError
from archipel.pyfile import whereabouts
from archipel.train.configs import TaskConfig
from archipel.train.data import Shard
from archipel.train.optimizer_state import TensorSpec
from archipel.train.pipeline import Pipeline
from archipel.train.replica import NonFiniteLoss, Replica, Run
from archipel.train.shared_memory import shared_tensors
from archipel.train.stages import Stages
from archipel.train.task import Task, make_task
from archipel.train.trial import try_out


@dataclass(frozen=True)
class Setup:
    """What a pool process is told when it starts. `shards` has one shard for each replica; without
    stages that is one for each worker.
    """

    task: TaskConfig
    run: Run
    shards: tuple[Shard, ...]
    pipeline: Pipeline | None
    specs: tuple[TensorSpec, ...]
    device: str


@dataclass(frozen=True)
class WorkerMemory:
    """One worker's part of the memory: its vector (numel,), read and written; an averaged gradient
    (numel,), read; and its state.
    """

    theta: Tensor
    gradient: Tensor
    state: list[Tensor]


@dataclass(frozen=True)
class EvaluationMemory:
    """A model to evaluate: its vector (numel,) and its integer buffers."""

    theta: Tensor
    integers: list[Tensor]


def specs_of(workers: Sequence[Replica], whole: Replica) -> tuple[TensorSpec, ...]:
    """All shared tensors: each worker's vector, gradient and state; then models to evaluate, one
    more than there are workers.
    """
    specs = []
    for replica in workers:
        vector = TensorSpec((replica.layout.numel,), torch.float32)
        specs += [vector, vector, *replica.state_specs]
    integers = [TensorSpec(tuple(t.shape), t.dtype) for t in whole.first_integers]
    model = [TensorSpec((whole.layout.numel,), torch.float32), *integers]
    return (*specs, *model * (len(workers) + 1))


def split_memory(
    tensors: list[Tensor], states: Sequence[int], integers: int
) -> tuple[list[WorkerMemory], list[EvaluationMemory]]:
    """The parts of all workers, and models to evaluate; `states` has the number of tensors in each
    worker's state, `integers` that of the model's integer buffers.
    """
    rest = iter(tensors)
    parts = [
        WorkerMemory(next(rest), next(rest), [next(rest) for _ in range(state)]) for state in states
    ]
    models = [
        EvaluationMemory(next(rest), [next(rest) for _ in range(integers)])
        for _ in range(len(parts) + 1)
    ]
    return parts, models


def serve(connection: Connection, descriptor: int) -> None:
    """Compute jobs until the other end closes the connection; a `Setup` comes before the first one
    of a run.
    """
    torch.set_num_threads(1)
    task_of = cache(make_task)  # one for all runs: what has been found out about it holds
    while True:
        match connection.recv():
            case Setup() as setup:
                memory = shared_tensors(descriptor, setup.specs, create=False)
                process = Computer(setup, task_of(setup.task), memory)
            case what, arguments:
                answer: tuple[Any, tuple[str, str] | None]
                try:
                    answer = process.compute(what, arguments), None
                except (NonFiniteLoss, UserError) as error:
                    answer = None, (type(error).__name__, str(error))
                except Exception as error:
                    why = f"the task failed at {whereabouts(error)}"
                    answer = None, (type(error).__name__, why)
                connection.send(answer)


class Computer:
    """What a pool process has for one run: the replicas, and the memory that it shares."""

    def __init__(self, setup: Setup, task: Task, tensors: list[Tensor]) -> None:
        device = torch.device(setup.device)
        self.shards = setup.shards
        self.replica = Replica(task, setup.run, device)
        self.stages = Stages(task, setup.run, device, setup.pipeline) if setup.pipeline else None
        if self.stages:
            states = [
                len(stage.state_specs)
                for column in zip(*self.stages.replicas, strict=True)
                for stage in column
            ]
        else:
            states = [len(self.replica.state_specs)] * len(self.shards)
        self.workers, self.evaluations = split_memory(
            tensors, states, len(self.replica.first_integers)
        )

    def compute(self, what: str, arguments: Any) -> Any:
        """One job's losses; its vectors change in place."""
        replica, workers = self.replica, self.workers
        match what, arguments:
            case "train", (rank, steps, progress, cursor):
                return replica.train(
                    workers[rank].state,
                    workers[rank].theta,
                    self.shards[rank],
                    steps,
                    progress,
                    cursor,
                )
            case "train_stages", (team, steps, progress, cursor):
                assert self.stages is not None
                ranks = self.stages.pipeline.ranks(team)
                states, thetas = (
                    [workers[rank].state for rank in ranks],
                    [workers[rank].theta for rank in ranks],
                )
                return self.stages.train(team, states, thetas, self.shards, steps, progress, cursor)
            case "gradient", (rank, cursor):
                return replica.gradient(
                    workers[rank].state, workers[rank].theta, self.shards[rank], cursor
                )
            case "apply", (rank, progress):
                return replica.apply(
                    workers[rank].state, workers[rank].theta, workers[rank].gradient, progress
                )
            case "evaluate", (slot,):
                model = self.evaluations[slot]
                return replica.evaluate(model.theta, model.integers)
            case "try", ():
                try_out(replica, self.shards[0])
                return []
            case "measure", ():
                return [median_step_time_s(replica, self.shards[0])]
            case _:
                raise AssertionError(what)


def median_step_time_s(replica: Replica, shard: Shard, warm_up: int = 5, steps: int = 20) -> float:
    """Seconds of one inner step on this device, measured on a worker that is thrown away; any other
    can use `replica` afterwards.
    """
    state, theta = replica.new_state(), replica.first.clone()
    times = []
    for step in range(warm_up + steps):
        start = time.perf_counter()
        replica.train(state, theta, shard, 1, 0, step)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm_up:])


def main() -> None:
    """A pool process, started with the descriptors of its connection and of the shared memory."""
    try:
        serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
