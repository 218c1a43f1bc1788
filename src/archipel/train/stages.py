"""The inner steps of a pipeline's replicas in one process, for the simulator. Live stages are
tested against them.

What belongs here: gradients along routes, for all nodes at once. What does not: a node that is a
process of its own (`stage.py`, which does the same operations in the same order), and how long
anything takes (`pipeline.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from archipel.train.batch import check_loss, loss_of, micro
from archipel.train.cut import parts_of
from archipel.train.data import Shard
from archipel.train.pipeline import Pipeline
from archipel.train.replica import Replica, Run, finite
from archipel.train.seeding import seed_step
from archipel.train.task import Task


class Stages:
    """A replica of every node of a pipeline, in one process, and the inner steps that they take
    together.
    """

    def __init__(self, task: Task, run: Run, device: torch.device, pipeline: Pipeline) -> None:
        self.task, self.run, self.device, self.pipeline = task, run, device, pipeline
        models = [
            parts_of(task, run.seed, pipeline.stages, pipeline.micro_batches)
            for _ in range(pipeline.replicas)
        ]
        self.replicas = [
            [Replica(task, run, device, model[k]) for model in models]
            for k in range(pipeline.stages)
        ]

    def train(
        self,
        team: Sequence[int],
        states: Sequence[Sequence[Tensor]],
        thetas: Sequence[Tensor],
        shards: Sequence[Shard],
        steps: int,
        progress: Sequence[int],
        cursor: int,
    ) -> list[list[float]]:
        """Take `steps` inner steps from number `cursor` on with the replicas `team`: all of them,
        or any that keep to themselves.

        `states`, `thetas` (both changed in place) and `progress` go by stage, then by replica of
        the team; `shards` has one for each replica of the pipeline. Returns for each of those the
        losses that its last stage saw, before each step: the mean over the micro-batches that came
        there; nothing for replicas outside the team.

        Raises:
            NonFiniteLoss: one of them is not finite.
        """
        nodes = [row[q] for row in self.replicas for q in team]
        losses: list[list[Tensor]] = [[] for _ in self.replicas[0]]
        with ExitStack() as stack:
            for node, state, theta in zip(nodes, states, thetas, strict=True):
                stack.enter_context(node.working(state, theta))
            for i in range(steps):
                for q, loss in self._gradients(team, shards, cursor + i).items():
                    losses[q].append(loss)
                norms = {
                    q: norm_of([row[q].gradient_norm().square() for row in self.replicas])
                    for q in team
                }
                for node, told, q in zip(nodes, progress, itertools.cycle(team), strict=False):
                    node.step(told + i * self.run.workers, norms[q])
        return [finite(one, cursor) for one in losses]

    def _gradients(
        self, team: Sequence[int], shards: Sequence[Shard], step: int
    ) -> dict[int, Tensor]:
        """Leave in every node the gradient over the micro-batches that came to it; the mean loss of
        each last stage.
        """
        micro_batches = self.pipeline.micro_batches
        routes = self.pipeline.routes(self.run.seed, step)
        losses = {q: torch.zeros(()) for q in team}
        for row in self.replicas:
            for q in team:
                row[q].zero_gradient()
        batches = {q: micro(self.task.batches(shards[q], step), micro_batches) for q in team}
        # To every node comes one micro-batch of each number: it adds gradients up in this order.
        for j in range(micro_batches):
            for q in team:
                number = step * micro_batches + j
                seeds = partial(seed_step, self.run.seed, shards[q], number, self.device)
                seeds()
                way = [row[routes[j, k, q]].module for k, row in enumerate(self.replicas)]
                loss = loss_of(self.task, _Way(way, seeds), batches[q][j], self.device)
                check_loss(loss)
                (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
                losses[routes[j, -1, q]] += loss.detach().cpu() / micro_batches
        for row in self.replicas:
            for q in team:
                row[q].collect()
        return losses


class _Way(nn.Module):
    """What a task's loss takes for the model: a micro-batch's way through the stages, each of which
    draws its own random numbers (see `seed_step`).
    """

    def __init__(self, modules: Sequence[nn.Module], seed: Callable[[int], None]) -> None:
        super().__init__()
        self.stages, self.seed = nn.ModuleList(modules), seed

    def forward(self, x: Any) -> Any:
        for k, module in enumerate(self.stages):
            if k:  # the first one goes on from what the loss has drawn before it
                self.seed(k)
            x = module(x)
        return x


def norm_of(squares: Sequence[Tensor]) -> Tensor:
    """The norm of a replica's gradient from the squares of its stages' norms, summed up from the
    last stage to the first, as the nodes of a live run do.
    """
    total = squares[-1]
    for square in reversed(squares[:-1]):
        total = square + total
    return total.sqrt()
