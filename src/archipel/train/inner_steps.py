"""Taking a worker's inner steps in a live run: one protocol for all kinds of workers.

What belongs here: the protocol, and its two plain forms: for a worker that trains nothing, and for
one that trains alone. What does not: the two other forms, stages (`stage.py`) and workers of
several processes (`sharded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from archipel.train.data import Shard
from archipel.train.replica import Replica


class InnerSteps(Protocol):
    """The inner steps of one worker. Vectors have shape (numel,) and are overwritten with the
    result. Losses are those before each step.
    """

    @property
    def state(self) -> Sequence[Tensor]:
        """What the worker keeps between calls, to be saved, and to be copied into when it goes on
        from a save; empty where there is nothing to save.
        """

    def train(
        self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]
    ) -> list[float]:
        """Take `steps` inner steps from `theta`, on the batches from number `cursor` on, and call
        `after_step` after each; the losses.

        Raises:
            NonFiniteLoss: a loss is not finite.
        """

    def gradient(self, theta: Tensor, cursor: int) -> list[float]:
        """Make of `theta` the gradient there on batch `cursor`, with the new statistics behind it;
        the loss, alone in a list.

        Raises:
            NonFiniteLoss: the loss is not finite.
            UserError: a model in stages gives no single gradients.
        """

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        """One step of the inner optimizer from `theta` with a known gradient; no losses."""

    def reset_optimizer(self) -> None:
        """Have the inner optimizer begin anew; what it kept may not be finite."""

    def integers(self) -> dict[str, Tensor]:
        """The integer buffers of the worker's model, by name."""

    def take_counts(self) -> tuple[int, int, int]:
        """Messages, bytes, and bytes between regions that inner steps have sent since this was
        asked last.
        """


class NoSteps:
    """Inner steps where nothing is trained."""

    state: Sequence[Tensor] = ()

    def train(
        self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]
    ) -> list[float]:
        for _ in range(steps):
            after_step()
        return []

    def gradient(self, theta: Tensor, cursor: int) -> list[float]:
        return [0.0]

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        return []

    def reset_optimizer(self) -> None:
        pass

    def integers(self) -> dict[str, Tensor]:
        return {}

    def take_counts(self) -> tuple[int, int, int]:
        return 0, 0, 0


class Solo:
    """A replica that serves one worker alone, and keeps its state."""

    def __init__(self, replica: Replica, shard: Shard) -> None:
        self.replica, self.shard = replica, shard
        self.state = replica.new_state()

    def train(
        self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]
    ) -> list[float]:
        return self.replica.train(
            self.state, theta, self.shard, steps, progress, cursor, after_step
        )

    def gradient(self, theta: Tensor, cursor: int) -> list[float]:
        return self.replica.gradient(self.state, theta, self.shard, cursor)

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        return self.replica.apply(self.state, theta, gradient, progress)

    def reset_optimizer(self) -> None:
        self.replica.reset_optimizer(self.state)

    def integers(self) -> dict[str, Tensor]:
        return integers_in(self.replica, self.state)

    def take_counts(self) -> tuple[int, int, int]:
        return 0, 0, 0


def integers_in(replica: Replica, state: Sequence[Tensor]) -> dict[str, Tensor]:
    """The integer buffers in a worker's state, by name, as copies."""
    names = replica.layout.integers
    return {name: tensor.clone() for name, tensor in zip(names, state[1:], strict=False)}
