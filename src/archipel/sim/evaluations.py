"""Evaluations that are being computed in the background of a simulation.

What belongs here: which evaluations have been asked for, and recording them when they are ready.
What does not: when the model is evaluated (`run/census.py`), and how a loss is computed (`train/`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from archipel import outer
from archipel.actor import Vector
from archipel.errors import TrainingError, UserError
from archipel.run.census import put_down, spread
from archipel.run.metrics import Evaluation
from archipel.train.trainer import Promise, Trainer


@dataclass
class Pending:
    """An evaluation under way: the loss of the model to take home, and of each replica if it is a
    mean.
    """

    evaluation: Evaluation
    loss: Promise
    own: list[Promise]


@dataclass
class Evaluations:
    """The evaluations under way, in the order of time."""

    pending: list[Pending] = field(default_factory=list)

    def submit(
        self,
        evaluation: Evaluation,
        parts: Sequence[Vector],
        parameters: int,
        trainer: Trainer,
        now: float,
    ) -> None:
        """Have the mean of `parts` evaluated, and the parts themselves where that means
        something; earlier ones that are ready are put down.
        """
        self.collect_ready()
        mean = outer.mean(parts)
        evaluation.replica_std = spread(parts, mean, parameters)
        compared = parts if evaluation.replica_std is not None else ()
        own = [trainer.evaluate(part, now) for part in compared]
        self.pending.append(Pending(evaluation, trainer.evaluate(mean, now), own))

    def collect_ready(self) -> None:
        """Put down the first ones, as long as their losses are there and finite: whoever watches
        the run need not wait for its end. What is put down does not depend on when.
        """
        while self.pending and _is_fine(self.pending[0]):
            self._put_down(self.pending.pop(0))

    def collect(self) -> None:
        """Wait for those under way and put down their losses.

        Raises:
            Diverged: one is not finite.
        """
        for pending in self.pending:
            self._put_down(pending)
        self.pending = []

    @staticmethod
    def _put_down(pending: Pending) -> None:
        own = [promise.result() for promise in pending.own]
        put_down(pending.evaluation, pending.loss.result(), own, " on the virtual clock")


def _is_fine(pending: Pending) -> bool:
    """All its losses are there, and none would end the run."""
    promises = [pending.loss, *pending.own]
    if not all(promise.done for promise in promises):
        return False
    try:
        losses = [promise.result() for promise in promises]
    except (UserError, TrainingError):
        return False
    return all(loss is None or math.isfinite(loss) for loss in losses)
