"""A host as a Ray actor, and what all hosts of a run are made from.

What belongs here: the thin layer between `host.py`, which knows no Ray, and Ray. What does not:
calls to hosts that have not come back (`fleet.py`), and whether hosts are alive (`watch.py`).
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch

from archipel import methods
from archipel.actor import NodeId
from archipel.live.cluster import Machine, on
from archipel.live.compute import device
from archipel.live.host import Host
from archipel.live.initial import OtherWeights
from archipel.live.line import Line, LineSetup
from archipel.live.mail import Envelope
from archipel.live.meeting import Meeting, free_port, meet
from archipel.live.protocol import (
    BadLoss,
    HostSetup,
    Mark,
    Membership,
    NeedsWeights,
    News,
    Ready,
    Record,
    Status,
)
from archipel.recipe import Recipe
from archipel.train.sharded import ShardedReplica
from archipel.train.task import make_task
from archipel.transport.frames import Address
from archipel.transport.keys import Keys

CUT_IS_FOUND = 0.75
"""A peer that has taken nothing for this part of the deadline is cut off. When it was hailed last,
and when the transport looks, comes on top.
"""


@ray.remote(
    num_cpus=0,
    max_restarts=0,
    concurrency_groups={"news": 1, "status": 1, "marks": 1, "events": 1, "save": 1},
)
class RayHost:
    """A `Host` as a Ray actor. News and questions come in threads of their own, beside the one that
    runs it; mail from other hosts does not come over Ray (`line.py`).
    """

    def __init__(self, method: str, setup: bytes, line: LineSetup) -> None:
        methods.load(method)  # so that what it defines can be unpickled
        self.setup: HostSetup = pickle.loads(setup)
        self.line_setup = line
        self.line: Line | None = None
        self.lock = threading.Lock()  # held while `early` grows or becomes the host's
        self.made: Host | None = None
        self.early: list[News] = []
        self.pieces: dict[int, list[np.ndarray]] = {}
        self.meeting: Meeting | None = None
        self.followers: list[Any] = []

    @property
    def host(self) -> Host:
        assert self.made is not None
        return self.made

    def connect(
        self, meeting: Meeting | None = None, followers: Sequence[Any] = ()
    ) -> Ready | NeedsWeights:
        """Be ready to run. If it takes the initial weights to be sent, this is called again,
        without arguments, when they have been.
        """
        self.meeting, self.followers = meeting or self.meeting, list(followers) or self.followers
        pieces = [torch.from_numpy(np.concatenate(self.pieces[k])) for k in sorted(self.pieces)]
        self.pieces = {}
        try:
            host = Host(self.setup, self._post, pieces or None, self._forget)
        except OtherWeights:
            return NeedsWeights()
        with self.lock:
            self.made = host
            for news in self.early:
                host.tell(news)
        self.line = Line(host.me, self.line_setup, host.deliver, host.mailbox.put)
        if self.meeting:
            ours = self.followers
            host.compute.meet(self.meeting, lambda what, values: _tell(ours, what, values))
        return Ready(self.line.transport.address, host.load())

    def take_weights(self, stage: int, piece: np.ndarray) -> None:
        """The next entries of the initial weights of a stage."""
        self.pieces.setdefault(stage, []).append(piece)

    def run(self, clock_s: float, peers: dict[NodeId, Address | None]) -> Record:
        assert self.line is not None
        self.line.know(peers)
        self.line.begin_beat()
        return self.host.run(clock_s)

    @ray.method(concurrency_group="news")
    def tell(self, news: News, address: Address | None) -> None:
        """`address`: where a node is that is there again."""
        if self.line is not None:  # else `run` will say it
            self.line.tell(news.node, address)
        with self.lock:
            if self.made is None:
                self.early.append(news)
            else:
                self.made.tell(news)

    @ray.method(concurrency_group="news")
    def cut(self, off: frozenset[NodeId]) -> None:
        """These nodes cannot be reached from now on, on purpose."""
        if self.line is not None:
            self.line.cut(off)

    @ray.method(concurrency_group="status")
    def die(self) -> None:
        """Be killed, on purpose."""
        os.kill(os.getpid(), signal.SIGKILL)

    # In the same group as `tell`: what it says of others must not overtake the news of them.
    @ray.method(concurrency_group="news")
    def begin_again(self, membership: Membership) -> None:
        self.host.begin_again(membership)

    @ray.method(concurrency_group="save")
    def save(self) -> None:
        self.host.save()

    @ray.method(concurrency_group="status")
    def status(self, released: int) -> Status:
        assert self.line is not None
        status = self.host.status(released)
        moves, under_way = self.line.under_way()
        return replace(status, quiet_s=0.0 if moves else status.quiet_s, under_way=under_way)

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

    def _post(self, to: NodeId, envelope: Envelope) -> None:
        assert self.line is not None
        self.line.post(to, envelope)

    def _forget(self, to: NodeId) -> None:
        assert self.line is not None
        self.line.forget(to)


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


def line_of(recipe: Recipe, machine: Machine, keys: Keys) -> LineSetup:
    """What a host on a machine needs to be reached by the others."""
    first, last = recipe.live.ports or (0, -1)
    # Hosts must have found a cut before the watch finds that nothing happens for the deadline.
    deadline_s = recipe.live.deadline_s * CUT_IS_FOUND
    return LineSetup(keys, machine.address, range(first, last + 1), deadline_s)


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
