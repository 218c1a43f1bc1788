"""What workers and a parameter server say to each other, and the worker's side of it.

What belongs here: the part that all methods with servers share. What does not: servers, because
they are what makes those methods different.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from archipel.actor import Actor, Context, Joined, Message, NodeId, Trained, Update, Vector
from archipel.vector import outer_gradient


@dataclass(frozen=True, eq=False, slots=True)
class Model(Message):
    """From a server: its newest weights, and the inner steps that all workers together have taken,
    as far as it knows.
    """

    values: ClassVar[tuple[str, ...]] = ("theta",)

    theta: Vector
    progress: int


@dataclass(frozen=True, eq=False, slots=True)
class Delta(Update):
    """To a server: the outer gradient of `steps` inner steps. It is answered with a `Model`, also
    if it is `Refused`.
    """

    steps: int


@dataclass(kw_only=True)
class Worker(Actor):
    """Gets a model, takes its inner steps, sends the displacement, and gets the newest model in
    return.

    `start` is the model from which its inner steps began; None: it is waiting for a model. A server
    that was lost and is back sends its model to all who may be waiting; a worker that is not
    waiting ignores it.
    """

    server: NodeId
    steps: int
    parameters: int
    start: Vector | None = None

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Model(theta=theta, progress=progress) if self.start is None:
                self.start = theta
                ctx.train(theta, self.steps, progress)
            case Trained(theta=theta, steps=steps):
                assert self.start is not None
                ctx.send(
                    self.server, Delta(outer_gradient(self.start, theta, self.parameters), steps)
                )
                self.start = None
            case Joined(node=self.me):
                self.start = None

    def peers(self) -> Iterable[NodeId]:
        return (self.server,)

    def waits_for(self) -> str:
        return f"a model from {self.server}"
