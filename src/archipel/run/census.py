"""How far a run is, whatever its clock: who holds the model, when it is evaluated, when the run
ends.

What belongs here: totals over all nodes, marks, evaluations, stop rules, and the verdict on a loss
that is not finite. What does not: how an engine learns what a node has counted, and how a loss is
computed.

Actors count inner steps in two ways (see `actor.Actor`): *trained*, which the plan, the marks and
the learning rate follow, and *absorbed*, which is what the model to take home really holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from archipel.actor import NodeId, Vector
from archipel.errors import Diverged, TrainingError, UserError
from archipel.run.metrics import Evaluation, Recorder

NOT_FINITE = 3
"""So many losses of one worker in a row that are not finite, with no inner steps that it has
finished in between, end the run.
"""


PATIENCE = 1000
"""So many inner steps a worker may take without an outer step, however short the plan is: HALoS
with its published settings takes some hundreds before its first report.
"""


@dataclass(frozen=True)
class Plan:
    """When a run ends, at the first of its stop rules, and when its model is evaluated.

    Attributes:
        steps: inner steps that are trained.
        seconds: the run's length on the engine's clock.
        target_loss: validation loss.
        evaluate_every: inner steps between two marks.
        tokens_per_step: tokens of one inner step; None where nothing is trained.
        stages: how many nodes hold one replica. They take an inner step together, and each of them
            counts it.
        strict: the first training loss that is not finite ends the run.
    """

    steps: int | None = None
    seconds: float | None = None
    target_loss: float | None = None
    evaluate_every: int = 10**9
    tokens_per_step: int | None = None
    stages: int = 1
    strict: bool = False


def holders(holds: Mapping[NodeId, bool], down: Mapping[NodeId, float]) -> list[NodeId]:
    """Who holds a part of the model to take home: of those who are there, all that hold one; if
    there is none, those who were there last.

    Args:
        holds: whether each node has a part.
        down: who is not there, and since when.
    """
    having = [node for node, has in holds.items() if has]
    there = [node for node in having if node not in down]
    if there or not having:
        return there
    last_s = max(down[node] for node in having)
    return [node for node in having if down[node] == last_s]


@dataclass
class Census:
    """What is known of the whole run.

    Attributes:
        plan: when it ends.
        trained: inner steps that each holder of the model has counted; other nodes are left out.
        total: the sum of `trained`.
        next_mark: inner steps at which the model is evaluated next.
        since_change: inner steps of each worker since `total` last changed.
        steps_since_change: the sum of `since_change`.
        bad_losses: losses in a row that were not finite, by worker.
    """

    plan: Plan
    trained: dict[NodeId, int] = field(default_factory=dict)
    total: int = 0
    next_mark: int = 0
    since_change: dict[NodeId, int] = field(default_factory=dict)
    steps_since_change: int = 0
    bad_losses: dict[NodeId, int] = field(default_factory=dict)

    # Totals

    @property
    def inner_steps(self) -> int:
        """Inner steps of the run so far. One that a replica takes in stages is one."""
        return self.total // self.plan.stages

    def count(self, node: NodeId, trained: int) -> None:
        """A holder of the model has counted up to `trained` inner steps."""
        self.total += trained - self.trained.get(node, 0)
        self.trained[node] = trained

    def recount(self, trained: Mapping[NodeId, int]) -> None:
        """These, and nobody else, hold the model now."""
        self.trained = dict(trained)
        self.total = sum(trained.values())

    # Marks and evaluations

    def passes_mark(self) -> bool:
        """Whether a mark has been passed since this was asked last; the next one is then ahead."""
        if self.inner_steps < self.next_mark:
            return False
        every = self.plan.evaluate_every
        self.next_mark = (self.inner_steps // every + 1) * every
        return True

    def evaluation(
        self, time_s: float, absorbed_steps: int, outer_steps: int, recorder: Recorder
    ) -> Evaluation:
        """The model to take home at this moment, without its losses yet."""
        per_step = self.plan.tokens_per_step
        return Evaluation(
            time_s=time_s,
            inner_steps=self.inner_steps,
            tokens=None if per_step is None else self.inner_steps * per_step,
            absorbed_steps=absorbed_steps,
            outer_steps=outer_steps,
            sent_bytes=round(recorder.sent_bytes),
            slow_link_bytes=round(recorder.slow_link_bytes),
        )

    # When it ends

    def reached(self, last_loss: float | None) -> str | None:
        """The name of the stop rule that holds now, but for `seconds`, which is the engine's."""
        plan = self.plan
        if plan.target_loss is not None and last_loss is not None and last_loss <= plan.target_loss:
            return "target_loss"
        if plan.steps is not None and self.inner_steps >= plan.steps:
            return "steps"
        return None

    def changed(self) -> None:
        """The model to take home has changed."""
        self.since_change.clear()
        self.steps_since_change = 0

    def finishes(self, worker: NodeId, steps: int, lost_servers: Sequence[NodeId]) -> None:
        """A worker has finished `steps` inner steps with finite losses. An answer without inner
        steps of its own, to `Context.apply`, is none of a worker that trains on.

        Raises:
            UserError, TrainingError: the run would never end, because workers train on and on while
                no outer step is taken; the latter if that is because one of `lost_servers` is lost.
        """
        if not steps:
            return
        self.bad_losses.pop(worker, None)
        already = self.since_change.get(worker, 0)
        if already >= PATIENCE and self._is_stuck():
            plan, taken = self.plan.steps, self.steps_since_change // self.plan.stages
            if lost_servers:
                raise TrainingError(
                    f"the model to take home has not changed for {taken:,} inner steps, and "
                    f"{', '.join(map(str, lost_servers))} is lost: it does not come back soon "
                    "enough, or "
                    "never"
                )
            raise UserError(
                f"the workers have taken {taken:,} inner steps since the model to take home last "
                f"changed, and the run is planned for {plan:,}: outer steps come too seldom; lower "
                "inner_steps or accumulate, or give it more steps"
            )
        self.since_change[worker] = already + steps
        self.steps_since_change += steps

    def _is_stuck(self) -> bool:
        """The workers have trained for ten times the plan, and the model has not changed."""
        plan = self.plan.steps
        return plan is not None and self.steps_since_change > 10 * plan * self.plan.stages

    def bad_loss(self, worker: NodeId, what: str) -> None:
        """A loss of `worker` is not finite; `what` says so. It is to go on with a new inner
        optimizer.

        Raises:
            Diverged: the run ends: it is strict, in stages, or this has happened too often.
        """
        count = self.bad_losses[worker] = self.bad_losses.get(worker, 0) + 1
        if self.plan.strict or self.plan.stages > 1 or count == NOT_FINITE:
            times = f", {count} times in a row" if count > 1 else ""
            raise Diverged(f"{what}{times}; try a lower learning rate")


def spread(parts: Sequence[Vector], mean: Vector, parameters: int) -> float | None:
    """Standard deviation of replicas: sqrt(mean over weights and replicas of (φ_i − mean φ)²), as
    NoLoCo reports it (arXiv 2506.10911).

    Args:
        parts: the replicas, each of shape (numel,).
        mean: of them.
        parameters: leading entries that are weights; buffers behind them do not count.

    Returns:
        None where there are no replicas to compare.
    """
    if len(parts) < 2 or not parameters:
        return None
    squares = [(part - mean)[:parameters].square().mean() for part in parts]
    return float(torch.stack(squares).mean().sqrt())


def put_down(evaluation: Evaluation, loss: float | None, own: Sequence[float], clock: str) -> None:
    """Put down what an evaluation has come to.

    Args:
        loss: of the model to take home; None: it is not known, or nothing is trained.
        own: the losses of the replicas whose mean it is, if there are several.
        clock: where the run's time is: " on the virtual clock", or nothing.

    Raises:
        Diverged: a loss is not finite.
    """
    own_loss = float(np.mean(own)) if own else None
    for value in (loss, own_loss):
        if value is not None and not math.isfinite(value):
            raise Diverged(
                f"the validation loss is {value} at {evaluation.time_s:.1f} s{clock}, after "
                f"{evaluation.inner_steps:,} inner steps; try a lower learning rate, inner or outer"
            )
    evaluation.loss = loss
    if own_loss is not None:
        evaluation.replica_loss = own_loss
