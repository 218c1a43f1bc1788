"""NoLoCo (Kolehmainen et al., arXiv 2506.10911): every worker now and then averages with one random
peer.

There is no collective, no server and no coordinator. Outer step t of a worker: m inner steps from
its slow weights φ give its fast weights θ and Δ = θ − φ; a permutation drawn from the shared seed
and t splits all workers into groups of n; the members send each other φ and Δ, and each one takes
the step of `outer.gossip` and goes on from its new φ.

Two workers may be many outer steps apart: a message says which step it belongs to, and one that
comes early is kept. Where n does not divide the number of workers, the last group is smaller; a
worker left over alone steps alone.

When a peer is lost, the rest of its group steps without it, if need be alone. A worker that comes
(back) takes φ and the outer step from one peer, if that one is further, and starts without
momentum. Nobody has to agree on who takes part: whoever gets the exchange of an outer step that it
has taken already, or takes without the sender, answers `Passed`, and is not waited for.

The learning rate follows the common progress, and nobody has to collect it: each worker knows from
the start how many inner steps every worker takes in an outer step, so it adds them up at each of
its own outer steps. Lost workers no longer count.

A worker's own exchange comes to it as a message too, as the others get it: where φ or Δ is rounded
on its way, all members of a group have to reckon with the same ones, or the pull towards the
group's mean would move the mean of all replicas. So an engine can refuse it like any other, too.
Then it takes the outer step as if its inner steps had not moved it. Otherwise the bad update
would be in its φ, and from there in the mean of all replicas.

Defaults are published (α = 0.5, β = 0.7, n = 2, m = 50). The paper does not print γ; 0.7 is what
its code uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
from pydantic import Field

from archipel.actor import (
    Actor,
    Context,
    Group,
    Joined,
    Lost,
    Message,
    MethodConfig,
    NodeId,
    Refused,
    Start,
    Trained,
    Update,
    Vector,
    World,
)
from archipel.outer import gossip
from archipel.vector import outer_gradient


class Config(MethodConfig):
    """NoLoCo's settings."""

    inner_steps: int = Field(
        50, ge=1, description="m: inner steps of a worker between two exchanges"
    )
    dynamic_steps: bool = Field(
        False,
        description="slower workers take fewer inner steps; a group waits for its slowest member",
    )
    group_size: int = Field(2, ge=1, description="n: workers that average together; 1: nobody does")
    alpha: float = Field(0.5, ge=0, lt=1, description="α: outer momentum")
    beta: float = Field(0.7, gt=0, description="β: outer learning rate")
    gamma: float = Field(0.7, ge=0, description="γ: pull towards the group's mean of slow weights")


@dataclass(frozen=True, eq=False, slots=True)
class Exchange(Update):
    """Between the members of a group: the outer gradient φ − θ of the sender's inner steps, and its
    slow weights φ.
    """

    values: ClassVar[tuple[str, ...]] = ("phi",)

    phi: Vector
    outer_step: int


@dataclass(frozen=True, eq=False, slots=True)
class Passed(Message):
    """The answer to an exchange that comes too late: do not wait for mine."""

    outer_step: int


@dataclass(frozen=True, eq=False, slots=True)
class SlowWeightsRequest(Message):
    """From a worker that has come (back) to one of its peers, which answers with `SlowWeights`."""


@dataclass(frozen=True, eq=False, slots=True)
class SlowWeights(Message):
    """The sender's slow weights φ, the outer step that it is in, and the common progress there."""

    values: ClassVar[tuple[str, ...]] = ("phi",)

    phi: Vector
    outer_step: int
    progress: int


@dataclass(kw_only=True)
class Worker(Actor):
    """One worker.

    Attributes:
        phi, velocity: φ and δ.
        workers: everybody, in rank order.
        rank: my place in `workers`.
        seed: the same for all workers; groups are drawn from it.
        steps: my inner steps in one outer step.
        steps_of: the inner steps of each worker in one outer step.
        round_steps: the inner steps of all workers together in one outer step.
        progress: inner steps that all workers together have taken, as far as my own outer steps
            tell.
        inbox: exchanges of this outer step and later ones, by outer step and sender; None: the
            exchange was refused.
        partners: the members of my group in this outer step, me among them, in rank order; None
            until my inner steps are done.
        away: peers that are lost; True: the peer may still be running, but I cannot reach it.
        asked: the peer that I have asked for its slow weights, after I came (back); until it
            answers I take no outer step.
    """

    config: Config
    phi: Vector
    velocity: Vector
    workers: Group
    rank: int
    seed: int
    steps: int
    steps_of: dict[NodeId, int]
    round_steps: int
    progress: int = 0
    inbox: dict[int, dict[NodeId, Exchange | None]] = field(default_factory=dict)
    partners: Group | None = None
    away: dict[NodeId, bool] = field(default_factory=dict)
    asked: NodeId | None = None

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                self.train(ctx)
            case Trained(theta=theta):
                exchange = Exchange(
                    outer_gradient(self.phi, theta, self.velocity.numel()),
                    self.phi.clone(),
                    self.outer_steps,
                )
                self.partners = tuple(member for member in self.group() if member not in self.away)
                arrives = exchange
                for peer in self.partners:
                    if peer != self.me:
                        arrives = ctx.send(peer, exchange)
                ctx.after(0.0, arrives)
            case (
                Exchange(outer_step=outer_step) | Refused(update=Exchange(outer_step=outer_step))
            ) if self.asked or outer_step < self.outer_steps:
                ctx.send(sender, Passed(outer_step))
            case Exchange(outer_step=outer_step):
                self.keep(outer_step, sender, message, ctx)
            case Refused(update=Exchange(outer_step=outer_step)):
                self.keep(outer_step, sender, None, ctx)
            case Passed(outer_step=self.outer_steps):
                self.go_without(sender, ctx)
            case Lost(node=node, unreachable=unreachable):
                self.away[node] = unreachable
                # If it comes back it is another one, and knows nothing of my exchanges.
                for exchanges in self.inbox.values():
                    exchanges.pop(node, None)
                if node == self.asked:
                    self.ask(ctx)
                self.go_without(node, ctx)
            case Joined(node=self.me):
                self.velocity.zero_()
                self.inbox, self.partners, self.away = {}, None, {}
                self.ask(ctx)
            case Joined(node=node):
                self.away.pop(node, None)  # from my next exchange on
            case SlowWeightsRequest():
                ctx.send(sender, SlowWeights(self.phi.clone(), self.outer_steps, self.progress))
            case SlowWeights(phi=phi, outer_step=outer_step) if sender == self.asked:
                if outer_step > self.outer_steps:
                    self.phi, self.outer_steps = phi.clone(), outer_step
                    self.progress = message.progress
                self.asked = None
                self.train(ctx)

    def ask(self, ctx: Context) -> None:
        """Ask the first peer after me for its slow weights; if none is there, go on from mine."""
        others = (*self.workers[self.rank + 1 :], *self.workers[: self.rank])
        self.asked = next((peer for peer in others if peer not in self.away), None)
        if self.asked is None:
            self.train(ctx)
        else:
            ctx.send(self.asked, SlowWeightsRequest())

    def train(self, ctx: Context) -> None:
        ctx.train(self.phi, self.steps, self.progress)

    def keep(
        self, outer_step: int, sender: NodeId, exchange: Exchange | None, ctx: Context
    ) -> None:
        self.inbox.setdefault(outer_step, {})[sender] = exchange
        self.step_when_complete(ctx)

    def go_without(self, peer: NodeId, ctx: Context) -> None:
        if self.partners is not None and peer not in self.inbox.get(self.outer_steps, {}):
            self.partners = tuple(member for member in self.partners if member != peer)
            self.step_when_complete(ctx)

    def step_when_complete(self, ctx: Context) -> None:
        received = self.inbox.get(self.outer_steps, {})
        if self.partners is None or any(member not in received for member in self.partners):
            return
        exchanges = [
            exchange
            for member in self.partners
            if (exchange := self.part_of(member, received[member])) is not None
        ]
        config, mine = self.config, self.part_of(self.me, received[self.me])
        assert mine is not None
        gossip(
            self.phi,
            self.velocity,
            [exchange.gradient for exchange in exchanges],
            [exchange.phi for exchange in exchanges],
            told=mine.phi,
            alpha=config.alpha,
            beta=config.beta,
            gamma=config.gamma,
        )
        for stranger in received:
            if stranger not in self.partners:
                ctx.send(stranger, Passed(self.outer_steps))
        del self.inbox[self.outer_steps]
        self.partners = None
        self.outer_steps += 1
        self.absorbed += self.steps if received[self.me] is not None else 0
        gone = (peer for peer, unreachable in self.away.items() if not unreachable)
        self.progress += self.round_steps - sum(self.steps_of[peer] for peer in gone)
        self.train(ctx)

    def part_of(self, member: NodeId, exchange: Exchange | None) -> Exchange | None:
        """What a member brings to the outer step: nothing if that was refused, and I in that case
        my φ, unmoved.
        """
        if exchange is None and member == self.me:
            return Exchange(
                outer_gradient(self.phi, self.phi, self.velocity.numel()),
                self.phi,
                self.outer_steps,
            )
        return exchange

    def group(self) -> Group:
        """My group in this outer step, in rank order: the same on every member, from the shared
        seed alone.
        """
        size = self.config.group_size
        ranks = partition(len(self.workers), size, self.seed, self.outer_steps)
        return tuple(self.workers[rank] for rank in ranks[self.rank])

    def model(self) -> Vector:
        return self.phi

    def peers(self) -> Iterable[NodeId]:
        return self.workers

    def waits_for(self) -> str:
        if self.asked is not None:
            return f"the weights of {self.asked}"
        missing = [
            str(peer)
            for peer in self.partners or ()
            if peer not in self.inbox.get(self.outer_steps, {})
        ]
        return f"the exchange of outer step {self.outer_steps} from {', '.join(missing)}"


def groups(workers: Group, size: int, seed: int, outer_step: int) -> dict[NodeId, Group]:
    """The group of each worker in one outer step: a random partition into groups of `size`, the
    last one maybe smaller.
    """
    ranks = partition(len(workers), size, seed, outer_step)
    return {
        me: tuple(workers[rank] for rank in group) for me, group in zip(workers, ranks, strict=True)
    }


# Every worker asks for the same partition, which takes time that grows with their number: so it is
# kept, for the few outer steps that are under way at one time. It goes by ranks, because a cache
# hashes its key at each call, and to hash all addresses takes as long as to make the partition.
@lru_cache(maxsize=64)
def partition(count: int, size: int, seed: int, outer_step: int) -> list[tuple[int, ...]]:
    """The ranks of the group of each worker, in rank order."""
    order = np.random.default_rng((seed, outer_step)).permutation(count).tolist()
    group_of: list[tuple[int, ...]] = [()] * count
    for first in range(0, count, size):
        group = tuple(sorted(order[first : first + size]))
        for rank in group:
            group_of[rank] = group
    return group_of


def build(config: Config, world: World, theta: Vector) -> list[Worker]:
    """One actor a worker."""
    steps = world.inner_steps(config.inner_steps, dynamic=config.dynamic_steps)
    workers = tuple(
        steps
    )  # one object for all: of 10,000 workers each would else hold 10,000 names
    round_steps = sum(steps.values())
    return [
        Worker(
            me=me,
            config=config,
            phi=theta.clone(),
            velocity=theta.new_zeros(world.parameters),
            workers=workers,
            rank=rank,
            seed=world.seed,
            steps=steps[me],
            steps_of=steps,
            round_steps=round_steps,
        )
        for rank, me in enumerate(workers)
    ]
