"""What the simulator needs to have inner steps taken, and what it uses where nothing is trained.

What belongs here: the protocol. What does not: who computes (`pool.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from archipel.actor import Gradient, NodeId, Trained, Vector


class Promise(Protocol):
    """A result that is being computed."""

    @property
    def done(self) -> bool:
        """Whether it is known to be there, so that nobody needs to wait for it."""

    def result(self) -> Any:
        """Wait for it."""


@dataclass(frozen=True)
class Done:
    """A result that is there already."""

    value: Any
    done: bool = True

    def result(self) -> Any:
        return self.value


class Trainer(Protocol):
    """Takes inner steps for an engine. `due_s` is when the engine will want the result, on its own
    clock.
    """

    def train(
        self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float
    ) -> Promise: ...

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise: ...

    def apply(
        self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float
    ) -> Promise: ...

    def train_stages(
        self,
        team: Sequence[int],
        thetas: Sequence[Vector],
        steps: int,
        progress: Sequence[int],
        due_s: float,
    ) -> Sequence[Promise]:
        """Inner steps of a pipeline's replicas `team` together; the rest, and the promises of
        `Trained`, by stage, then replica.
        """

    def evaluate(self, theta: Vector, due_s: float) -> Promise: ...

    def reset_optimizer(self, worker: NodeId) -> None:
        """Have a worker's inner optimizer begin anew. Here and below, the worker has no inner steps
        under way.
        """

    def state_of(self, worker: NodeId) -> Any:
        """What makes a worker the one it is, as a copy: its inner optimizer, its integer buffers,
        its place in the data.
        """

    def put(self, worker: NodeId, state: Any) -> None:
        """Make a worker again what `state_of` has seen."""

    def state(self) -> Any:
        """What `restore` needs to go on from here, when all that was asked for so far has been
        computed.
        """

    def restore(self, state: Any) -> None: ...


class NoTraining:
    """For `task: none`: every vector is empty, and every result is there at once."""

    empty = torch.empty(0)
    gradient_there = Done(Gradient(empty, 0.0))
    applied = Done(Trained(empty, 1, ()))

    def train(
        self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float
    ) -> Promise:
        return Done(Trained(self.empty, steps, ()))

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise:
        return self.gradient_there

    def apply(
        self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float
    ) -> Promise:
        return self.applied

    def train_stages(
        self,
        team: Sequence[int],
        thetas: Sequence[Vector],
        steps: int,
        progress: Sequence[int],
        due_s: float,
    ) -> Sequence[Promise]:
        return [Done(Trained(self.empty, steps, ()))] * len(thetas)

    def evaluate(self, theta: Vector, due_s: float) -> Promise:
        return Done(None)

    def reset_optimizer(self, worker: NodeId) -> None:
        pass

    def state_of(self, worker: NodeId) -> None:
        return None

    def put(self, worker: NodeId, state: None) -> None:
        pass

    def state(self) -> None:
        return None

    def restore(self, state: None) -> None:
        pass
