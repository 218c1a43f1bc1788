"""A host as a Ray actor, and what all hosts of a run are made from.

What belongs here: the thin layer between `host.py`, which knows no Ray, and Ray. What does not:
calls to hosts that have not come back (`fleet.py`), and whether hosts are alive (`watch.py`).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch

from archipel import methods
from archipel.actor import NodeId
from archipel.errors import TrainingError
from archipel.live.cluster import Machine, on
from archipel.live.compute import device
from archipel.live.host import Host
from archipel.live.mail import Envelope, pack, unpack
from archipel.live.meeting import Meeting, free_port, meet
from archipel.live.protocol import (
    BadLoss,
    HostSetup,
    Mark,
    Membership,
    News,
    Ready,
    Record,
    Status,
    UnderWay,
)
from archipel.recipe import Recipe
from archipel.train.sharded import ShardedReplica
from archipel.train.task import make_task
from archipel.transport.frames import Address
from archipel.transport.keys import Keys
from archipel.transport.transport import Transfer, Transport

SHOWN_BYTES = 1_000_000
"""Smaller messages on their way are not shown."""


@dataclass(frozen=True)
class Line:
    """What a host needs to be reached by the others.

    Attributes:
        keys: of the run.
        machine: the address of its machine.
        ports: it listens on one of these; empty: on any that is free.
        deadline_s: a link over which nothing gets for so long is gone.
    """

    keys: Keys
    machine: str
    ports: Sequence[int]
    deadline_s: float


@ray.remote(
    num_cpus=0,
    max_restarts=0,
    concurrency_groups={"news": 1, "status": 1, "marks": 1, "events": 1, "save": 1},
)
class RayHost:
    """A `Host` as a Ray actor. News and questions come in threads of their own, beside the one that
    runs it; mail from other hosts does not come over Ray (`transport.py`).

    Attributes:
        peers: where the mail of each other node goes; None: it is lost.
    """

    def __init__(self, method: str, setup: bytes, line: Line) -> None:
        methods.load(method)  # so that what it defines can be unpickled
        self.host = Host(pickle.loads(setup), self._post)
        self.line = line
        self.peers: dict[NodeId, Address | None] = {}

    def connect(self, meeting: Meeting | None, followers: list[Any]) -> Ready:
        """Be ready to run."""
        self.transport = Transport(
            self.line.keys,
            self.line.machine,
            deliver=self._deliver,
            failed=self._failed,
            ports=self.line.ports,
            deadline_s=self.line.deadline_s,
        )
        if meeting:
            self.host.compute.meet(meeting, lambda what, values: _tell(followers, what, values))
        return Ready(self.transport.address, self.host.load())

    def run(self, clock_s: float, peers: dict[NodeId, Address]) -> Record:
        """`peers`: where they were when this was asked; what has been told since is newer."""
        self.peers = {**peers, **self.peers}
        return self.host.run(clock_s)

    @ray.method(concurrency_group="news")
    def tell(self, news: News, address: Address | None) -> None:
        """`address`: of a node that is there again."""
        before, self.peers[news.node] = self.peers.get(news.node), address
        if before is not None:
            self.transport.forget(before)
        self.host.tell(news)

    # In the same group as `tell`: what it says of others must not overtake the news of them.
    @ray.method(concurrency_group="news")
    def begin_again(self, membership: Membership) -> None:
        self.host.begin_again(membership)

    @ray.method(concurrency_group="save")
    def save(self) -> None:
        self.host.save()

    @ray.method(concurrency_group="status")
    def status(self, released: int) -> Status:
        status, transfers = self.host.status(released), self.transport.transfers()
        moves = any(transfer.bytes_per_s for transfer in transfers)
        return replace(
            status,
            quiet_s=0.0 if moves else status.quiet_s,
            under_way=self._slowest(transfers),
        )

    @ray.method(concurrency_group="status")
    def stop(self) -> None:
        self.host.stop()

    @ray.method(concurrency_group="marks")
    def mark(self) -> tuple[int, Mark] | None:
        return self.host.mark()

    @ray.method(concurrency_group="marks")
    def part(self, number: int, start: int, stop: int) -> np.ndarray:
        return self.host.part(number, start, stop)

    @ray.method(concurrency_group="events")
    def next_event(self) -> BadLoss | None:
        """Wait for something that the watch should look at."""
        return self.host.events.get()

    # Mail

    def _post(self, to: NodeId, envelope: Envelope) -> None:
        if to not in self.peers:
            raise TrainingError(
                f"{self.host.me} sent {envelope.kind.__name__} to {to}, which is none of its peers"
            )
        if (address := self.peers[to]) is not None:
            self.transport.send(address, pack(envelope))

    def _deliver(self, sender: Address, parts: list[memoryview]) -> None:
        self.host.deliver(unpack(parts))

    def _failed(self, address: Address, why: str) -> None:
        """Nothing gets through to a host any more. If it is not lost, its link is."""
        for node, current in self.peers.items():
            if current == address:
                self.host.mailbox.put(TrainingError(f"{self.host.me} cannot reach {node}: {why}"))

    def _slowest(self, transfers: Sequence[Transfer]) -> UnderWay | None:
        """The message that takes longest, if one takes long."""
        nodes = {address: node for node, address in self.peers.items()}
        slow = [
            UnderWay(nodes[one.to], one.done_bytes / one.total_bytes, one.bytes_per_s, one.left_s)
            for one in transfers
            if one.to in nodes and one.total_bytes > SHOWN_BYTES
        ]
        return max(
            slow, key=lambda one: math.inf if one.left_s is None else one.left_s, default=None
        )


@ray.remote(num_cpus=0, max_restarts=0)
class RayFollower:
    """One of the other processes of a worker that has several."""

    def __init__(self, setup: bytes, meeting: Meeting) -> None:
        torch.set_num_threads(1)
        told: HostSetup = pickle.loads(setup)
        assert told.shard is not None
        meet(meeting, told.deadline_s)
        self.replica = ShardedReplica(make_task(told.task), told.run, device(), told.shard)

    def follow(self, what: str, arguments: tuple[int, ...]) -> None:
        self.replica.follow(what, arguments)


@ray.remote(num_cpus=0, max_retries=0)
def _free_port() -> int:
    return free_port()


def ask_for_port(machine: Machine) -> int:
    """A port of a machine that nothing listens on."""
    return int(ray.get(_free_port.options(scheduling_strategy=on(machine)).remote(), timeout=60))


def _tell(followers: Sequence[Any], what: str, arguments: tuple[int, ...]) -> None:
    for follower in followers:
        follower.follow.remote(what, arguments)


def make_host(recipe: Recipe, setup: HostSetup, machine: Machine, keys: Keys) -> Any:
    """A host on a machine; a worker takes its part of a GPU there, if there are any."""
    return RayHost.options(  # type: ignore[attr-defined]
        scheduling_strategy=on(machine),
        num_gpus=recipe.live.gpu_fraction if machine.gpus and setup.shard is not None else 0,
    ).remote(recipe.method, pickle.dumps(setup), line_of(recipe, machine, keys))


def line_of(recipe: Recipe, machine: Machine, keys: Keys) -> Line:
    """What a host on a machine needs to be reached by the others."""
    first, last = recipe.live.ports or (0, -1)
    # A peer that is gone is found by its silence towards the command, and all are told of it. Only
    # a link that is gone is found by this.
    return Line(keys, machine.address, range(first, last + 1), 2 * recipe.live.deadline_s)


def make_followers(
    recipe: Recipe, setup: HostSetup, machine: Machine, meeting: Meeting
) -> list[Any]:
    """The other processes of a worker that has several; they meet its host."""
    return [
        RayFollower.options(  # type: ignore[attr-defined]
            scheduling_strategy=on(machine),
            num_gpus=recipe.live.gpu_fraction if machine.gpus else 0,
        ).remote(pickle.dumps(setup), replace(meeting, rank=rank))
        for rank in range(1, recipe.live.processes)
    ]
