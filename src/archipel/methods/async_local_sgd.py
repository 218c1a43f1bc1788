"""Async-Local-SGD (Liu et al., arXiv 2401.09135): one parameter server, and nobody waits for
anybody.

A worker pulls θ, takes its H inner steps, sends `θ_start − θ_end`, and gets the newest θ at once.
The server applies each outer gradient on arrival with delayed Nesterov momentum (their algorithm
3). `dynamic_steps` is their DyLU: slower workers take fewer steps.

Defaults are those of HALoS' comparison (arXiv 2506.04531): H = 32, momentum 0.9, buffer 32, and an
outer learning rate of 0.05 per arrival, which is 0.05 · 32 = 1.6 in delayed Nesterov's terms. The
server sits in the topology's first region.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from archipel.actor import (
    Actor,
    Context,
    Joined,
    Message,
    MethodConfig,
    NodeId,
    Refused,
    Start,
    Vector,
    World,
)
from archipel.outer import DelayedNesterov, delayed_nesterov
from archipel.parameter_server import Delta, Model, Worker


class Config(MethodConfig):
    """Async-Local-SGD's settings."""

    inner_steps: int = Field(
        32, ge=1, description="H: inner steps of the fastest worker between two exchanges"
    )
    dynamic_steps: bool = Field(
        True, description="slower workers take fewer inner steps, so that all finish together"
    )
    outer_lr: float = Field(
        1.6, gt=0, description="learning rate of the server; one arrival moves by outer_lr / buffer"
    )
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the server")
    buffer: int = Field(32, ge=1, description="N: arrivals between two refreshes of the momentum")


@dataclass(kw_only=True)
class Server(Actor):
    theta: Vector
    outer: DelayedNesterov
    workers: tuple[NodeId, ...]

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case (
                Start() | Joined(node=self.me)
            ):  # after a restart, whoever waited for an answer would wait for ever
                for worker in self.workers:
                    ctx.send(worker, Model(self.theta.clone(), self.absorbed))
            case Delta(gradient=gradient, steps=steps):
                self.outer.step(self.theta, gradient)
                self.outer_steps += 1
                self.absorbed += steps
                ctx.send(sender, Model(self.theta.clone(), self.absorbed))
            case Refused():
                ctx.send(sender, Model(self.theta.clone(), self.absorbed))
            case Joined(node=worker):
                ctx.send(worker, Model(self.theta.clone(), self.absorbed))

    def model(self) -> Vector:
        return self.theta

    def peers(self) -> Iterable[NodeId]:
        return self.workers

    def waits_for(self) -> str:
        return "an outer gradient from any worker"


def build(config: Config, world: World, theta: Vector) -> list[Actor]:
    """The server, and one actor a worker."""
    steps = world.inner_steps(config.inner_steps, dynamic=config.dynamic_steps)
    server = Server(
        me=NodeId(world.regions[0], "server"),
        theta=theta.clone(),
        outer=delayed_nesterov(
            config.outer_lr, config.outer_momentum, config.buffer, world.parameters
        ),
        workers=tuple(steps),
    )
    workers = [
        Worker(me=me, server=server.me, steps=steps[me], parameters=world.parameters)
        for me in steps
    ]
    return [server, *workers]
