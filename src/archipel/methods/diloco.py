"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): many local steps, then an all-reduce of
the displacement.

Every round all workers start from the same θ and take H inner steps (line 4-8); the outer gradient
is the mean of `θ_start − θ_i` (line 12); the outer optimizer is SGD with Nesterov momentum (line
14). A round lasts as long as its slowest worker plus the all-reduce. With `dynamic_steps` slower
workers take fewer steps (DynUpd in HALoS, arXiv 2506.04531).

`collective.py` sees to workers that come and go: the mean is taken without lost ones, and a
newcomer gets θ and the momentum.

Defaults are those of HALoS' comparison: H = 32, outer lr 0.7, momentum 0.9.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from archipel.actor import (
    Context,
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
from archipel.outer import Nesterov, nesterov
from archipel.vector import outer_gradient


class Config(MethodConfig):
    """DiLoCo's settings."""

    inner_steps: int = Field(32, ge=1, description="H: inner steps of a worker in one round")
    dynamic_steps: bool = Field(
        False, description="slower workers take fewer inner steps, so that all finish together"
    )
    outer_lr: float = Field(0.7, gt=0, description="learning rate of the outer step")
    outer_momentum: float = Field(
        0.9, ge=0, lt=1, description="Nesterov momentum of the outer step"
    )


@dataclass(kw_only=True)
class Worker(Member):
    """One worker. `steps` are its own inner steps in a round, `steps_of` those of each worker, and
    `round_steps` those of all workers together.
    """

    outer: Nesterov
    steps: int
    steps_of: dict[NodeId, int]
    round_steps: int

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                self.begin(ctx)
            case Trained(theta=theta):
                if self.computed(ctx):
                    ctx.all_reduce(
                        self.group,
                        outer_gradient(self.theta, theta, self.outer.velocity.numel()),
                        self.number,
                        difference=True,
                    )
            case Reduced(mean=gradient, group=group, refused=refused) if self.is_current(message):
                if len(refused) < len(
                    group
                ):  # else the mean is nobody's, and there is no step in this round
                    self.outer.step(self.theta, gradient)
                self.agree(group)
                whole = group is self.everybody and not refused
                self.progress += (
                    self.round_steps
                    if whole
                    else sum(self.steps_of[node] for node in group if node not in refused)
                )
                self.next_round(ctx)
            case _:
                self.upon_membership(message, sender, ctx)

    def compute(self, ctx: Context) -> None:
        self.outer_steps = self.round
        ctx.train(self.theta, self.steps, self.progress)

    def momentum(self) -> Vector:
        return self.outer.velocity

    def take_over(self, momentum: Vector | None) -> None:
        assert momentum is not None
        self.outer.velocity = momentum.clone()


def build(config: Config, world: World, theta: Vector) -> list[Worker]:
    """One actor a worker; each keeps the outer optimizer's state, equal on all."""
    steps = world.inner_steps(config.inner_steps, dynamic=config.dynamic_steps)
    everybody, round_steps = tuple(steps), sum(steps.values())
    return [
        Worker(
            me=me,
            theta=theta.clone(),
            outer=nesterov(config.outer_lr, config.outer_momentum, world.parameters),
            everybody=everybody,
            group=everybody,
            steps=steps[me],
            steps_of=steps,
            round_steps=round_steps,
        )
        for me in steps
    ]
