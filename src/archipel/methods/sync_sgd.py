"""Synchronous data-parallel training (DDP, FSDP): the baseline that communicates at every step.

Every step: each worker's gradient on its own batch, the mean of all of them, one step of the inner optimizer. All workers hold the
same weights and the same optimizer state throughout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from archipel.actor import Actor, Context, Gradient, Group, Message, MethodConfig, NodeId, Reduced, Start, Trained, Vector, World


class Config(MethodConfig):
    """Nothing to set: the inner optimizer is the task's."""


@dataclass(kw_only=True)
class Worker(Actor):
    theta: Vector
    group: Group
    progress: int = 0

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                ctx.gradient(self.theta, self.progress)
            case Gradient(vector=gradient):
                ctx.all_reduce(self.group, gradient)
            case Reduced(mean=gradient):
                ctx.apply(self.theta, gradient, self.progress)
            case Trained(theta=theta):
                self.theta = theta
                self.progress += len(self.group)
                self.absorbed = self.progress if self.me == self.group[0] else 0
                ctx.gradient(self.theta, self.progress)

    def model(self) -> Vector | None:
        """All workers hold the same model: the first one's is taken."""
        return self.theta if self.me == self.group[0] else None

    def peers(self) -> Iterable[NodeId]:
        return self.group


def build(config: Config, world: World, theta: Vector) -> list[Worker]:
    """One actor a worker."""
    group = tuple(worker.id for worker in world.workers)
    return [Worker(me=me, theta=theta.clone(), group=group) for me in group]
