"""Synchronous data-parallel training (DDP, FSDP): the baseline that communicates at every step.

Every step: each worker's gradient on its own batch, the mean of all of them, one step of the inner
optimizer. All workers hold the same weights and the same optimizer state throughout.

`collective.py` sees to workers that come and go. A newcomer gets the weights; the state of its
inner optimizer is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from archipel.actor import (
    Context,
    Gradient,
    Message,
    MethodConfig,
    NodeId,
    Reduced,
    Start,
    Trained,
    Vector,
    World,
)
from archipel.collective import Member


class Config(MethodConfig):
    """Nothing to set: the inner optimizer is the task's."""


@dataclass(kw_only=True)
class Worker(Member):
    """One worker. `averaged` is how many gradients are in the step that it is taking."""

    averaged: int = 0

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                self.begin(ctx)
            case Gradient(vector=gradient):
                if self.computed(ctx):
                    ctx.all_reduce(self.group, gradient, self.number, difference=True)
            case Reduced(mean=gradient, group=group, refused=refused) if self.is_current(message):
                self.agree(group)
                self.averaged = len(group) - len(refused)
                if self.averaged:
                    self.computing = True
                    ctx.apply(self.theta, gradient, self.progress)
                else:  # the mean is nobody's: no step in this round, the next batch
                    self.next_round(ctx)
            case Trained(theta=theta):
                if self.computed(ctx):
                    self.theta = theta
                    self.progress += self.averaged
                    self.next_round(ctx)
            case _:
                self.upon_membership(message, sender, ctx)

    def compute(self, ctx: Context) -> None:
        ctx.gradient(self.theta, self.progress)


def build(config: Config, world: World, theta: Vector) -> list[Worker]:
    """One actor a worker."""
    group = tuple(worker.id for worker in world.workers)
    return [Worker(me=me, theta=theta.clone(), everybody=group, group=group) for me in group]
