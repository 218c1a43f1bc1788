"""Not a training method: the first worker sends a vector of 40 MB, the second one answers, and so
on. For `bench_live.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from archipel.actor import Actor, Context, Message, MethodConfig, NodeId, Start, Vector, World

NUMEL = 10_000_000


class Config(MethodConfig):
    """Nothing to set."""


@dataclass(frozen=True, eq=False, slots=True)
class Ping(Message):
    vector: Vector


@dataclass(frozen=True, eq=False, slots=True)
class Pong(Message):
    pass


@dataclass(kw_only=True)
class Node(Actor):
    peer: NodeId
    vector: Vector | None

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Ping():
                ctx.send(sender, Pong())
            case Start() | Pong() if self.vector is not None:
                self.absorbed += isinstance(message, Pong)
                ctx.send(self.peer, Ping(self.vector))

    def model(self) -> Vector | None:
        return None if self.vector is None else torch.empty(0)

    def peers(self) -> Iterable[NodeId]:
        return (self.peer,)


def build(config: Config, world: World, theta: Vector) -> list[Node]:
    """The one that sends vectors, and the one that answers."""
    first, second = (worker.id for worker in world.workers)
    return [
        Node(me=first, peer=second, vector=torch.ones(NUMEL)),
        Node(me=second, peer=first, vector=None),
    ]
