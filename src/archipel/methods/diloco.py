"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): many local steps, then an all-reduce of the displacement.

Every round all workers start from the same θ and take H inner steps (line 4-8); the outer gradient is the mean of
`θ_start − θ_i` (line 12); the outer optimizer is SGD with Nesterov momentum (line 14). A round lasts as long as its slowest worker
plus the all-reduce. With `dynamic_steps` slower workers take fewer steps (DynUpd in HALoS, arXiv 2506.04531).

Defaults are those of HALoS' comparison: H = 32, outer lr 0.7, momentum 0.9.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from archipel.actor import Actor, Context, Group, Message, MethodConfig, NodeId, Reduced, Start, Trained, Vector, World
from archipel.outer import Nesterov, nesterov
from archipel.vector import outer_gradient


class Config(MethodConfig):
    """DiLoCo's settings."""

    inner_steps: int = Field(32, ge=1, description="H: inner steps of a worker in one round")
    dynamic_steps: bool = Field(False, description="slower workers take fewer inner steps, so that all finish together")
    outer_lr: float = Field(0.7, gt=0, description="learning rate of the outer step")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer step")


@dataclass(kw_only=True)
class Worker(Actor):
    theta: Vector
    outer: Nesterov
    group: Group
    steps: int
    round_steps: int
    progress: int = 0

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                ctx.train(self.theta, self.steps, self.progress)
            case Trained(theta=theta):
                ctx.all_reduce(self.group, outer_gradient(self.theta, theta, len(self.outer.velocity)))
            case Reduced(mean=gradient):
                self.outer.step(self.theta, gradient)
                self.outer_steps += 1
                self.progress += self.round_steps
                self.absorbed = self.progress if self.me == self.group[0] else 0
                ctx.train(self.theta, self.steps, self.progress)

    def model(self) -> Vector | None:
        """All workers hold the same model: the first one's is taken."""
        return self.theta if self.me == self.group[0] else None

    def peers(self) -> Iterable[NodeId]:
        return self.group


def build(config: Config, world: World, theta: Vector) -> list[Worker]:
    """One actor a worker; each keeps the outer optimizer's state, equal on all."""
    steps = world.inner_steps(config.inner_steps, dynamic=config.dynamic_steps)
    return [
        Worker(
            me=me,
            theta=theta.clone(),
            outer=nesterov(config.outer_lr, config.outer_momentum, world.parameters),
            group=tuple(steps),
            steps=steps[me],
            round_steps=sum(steps.values()),
        )
        for me in steps
    ]
