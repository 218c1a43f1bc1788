"""The hosts of a live run as Ray actors, and the calls to them that have not come back.

What belongs here: calls, their answers, and Ray's errors in the words of this project. What does
not: what is done about a host that has died (`watch.py`), and what a host is (`host.py`).
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
import torch

from archipel.actor import NodeId, Vector
from archipel.errors import TrainingError, UserError
from archipel.live.cluster import Machine, machines, place
from archipel.live.meeting import Meeting
from archipel.live.protocol import HostSetup, News
from archipel.live.ray_host import make_followers, make_host
from archipel.recipe import Recipe
from archipel.transport.frames import Address
from archipel.transport.keys import Keys

CHUNK = 1 << 14
"""Entries of a vector that travel to or from this process in one piece: 64 KiB. So small a piece is
part of a call, or of its answer. A larger one would be an object of its own, which Ray asks for
again, from its start, if it has not come within 10 s.
"""
CHUNKS = 16
"""Pieces that are under way at a time, so that a distant host does not wait for each next question.
"""

What = Literal["connect", "run", "begin_again", "save", "mark", "next_event", "status"]
"""A call to a host, by the name of `RayHost`'s method."""


class Died(TrainingError):
    """A host's process is gone, or does not answer."""


@dataclass(frozen=True)
class Reply:
    """The answer to a call.

    Attributes:
        node: whose host was called.
        what: the call.
        value: what the host returned, or the error that it raised.
    """

    node: NodeId
    what: What
    value: Any


@dataclass
class Fleet:
    """All hosts.

    Attributes:
        recipe: the recipe of the run.
        places: the machine of each node.
        weights: the initial weights of each stage of the model, for hosts that cannot make them.
        hosts: the Ray actor of each host that is there or being started.
        followers: the other processes of workers that have several.
        calls: the calls that have not been answered.
        files: the files through which processes found each other; removed at the end.
        addresses: where the mail of each host goes that is ready to run.
        keys: of the run: who has them is let in.
    """

    recipe: Recipe
    places: dict[NodeId, Machine]
    weights: Sequence[Vector] = ()
    hosts: dict[NodeId, Any] = field(default_factory=dict)
    followers: dict[NodeId, list[Any]] = field(default_factory=dict)
    calls: dict[Any, tuple[NodeId, What]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    addresses: dict[NodeId, Address] = field(default_factory=dict)
    keys: Keys = field(default_factory=Keys.make)

    def make(self, node: NodeId, setup: HostSetup) -> None:
        """Start a host's process; `connect` makes it ready."""
        self.hosts[node] = make_host(self.recipe, setup, self.places[node], self.keys)

    def find_machine(self, node: NodeId, workers: Sequence[NodeId], address: str | None) -> bool:
        """Find a machine for a host that is to be started again: its own, or another one of its
        region; whether there is one.
        """
        found, live = machines(), self.recipe.live
        own = [machine for machine in found if machine.id == self.places[node].id]
        gpus = live.gpu_fraction * live.processes
        try:
            self.places |= place([node], workers, own or found, gpus, address)
        except UserError:
            return False
        return True

    def connect(self, setup: HostSetup, node: NodeId, meeting: Meeting | None) -> None:
        """Have a host be ready: it listens for mail, and meets those with whom it takes its inner
        steps.
        """
        processes = self.recipe.live.processes
        if processes > 1 and setup.trains:
            meeting = Meeting(self.meeting_file(), 0, processes)
            self.followers[node] = make_followers(self.recipe, setup, self.places[node], meeting)
        self.call(node, "connect", meeting, self.followers.get(node, []))

    def run(self, node: NodeId, clock_s: float, peers: Sequence[NodeId]) -> None:
        """Let a host run, and tell it where its peers are, or that they are not there."""
        self.call(node, "run", clock_s, {peer: self.addresses.get(peer) for peer in peers})

    def meeting_file(self) -> str:
        """A place where processes of one machine can meet, and nobody else can guess."""
        self.files.append(Path(tempfile.gettempdir()) / f"archipel-{secrets.token_hex(16)}")
        return f"file://{self.files[-1]}"

    # Calls

    def call(self, node: NodeId, what: What, *arguments: Any) -> None:
        """Call a host; the answer will be among the replies."""
        self.calls[getattr(self.hosts[node], what).remote(*arguments)] = node, what

    def waiting(self, what: What) -> set[NodeId]:
        """The hosts that have not answered such a call."""
        return {node for node, other in self.calls.values() if other == what}

    def replies(self, timeout_s: float, *kinds: What, everything: bool = False) -> list[Reply]:
        """Those calls of some `kinds` that have come back, when one has, or `everything`, or when
        time is up.
        """
        refs = [ref for ref, (_, what) in self.calls.items() if what in kinds]
        if not refs:
            time.sleep(0.0 if everything else timeout_s)
            return []
        count = len(refs) if everything else 1
        ready, _ = ray.wait(refs, num_returns=count, timeout=timeout_s)
        replies = []
        for ref in ready:
            node, what = self.calls.pop(ref)
            replies.append(Reply(node, what, self._value(ref, node)))
        return replies

    def give_weights(self, node: NodeId) -> None:
        """Send a host the initial weights. It then goes on to be ready."""
        host = self.hosts[node]
        for k, weights in enumerate(self.weights):
            for piece in torch.split(weights, CHUNK):
                host.take_weights.remote(k, piece.numpy())
        self.call(node, "connect")

    def tell_others(self, news: News) -> None:
        """Tell all other hosts of one that is lost, or there again."""
        address = None if news.life is None else self.addresses[news.node]
        for node, host in self.hosts.items():
            if node != news.node:
                host.tell.remote(news, address)

    def stop(self, node: NodeId) -> None:
        """Have a host handle nothing more; its `run` then comes back."""
        self.hosts[node].stop.remote()

    def fetch(self, node: NodeId, number: int, deadline_s: float) -> Vector:
        """A host's part of the model at a mark.

        A slow link is no death: this takes as long as it takes, while the host answers questions
        within `deadline_s`.

        Raises:
            Died: it has died, or does not answer.
        """
        host, start = self.hosts[node], 0
        chunks: list[np.ndarray] = []
        under_way: deque[Any] = deque()
        while not chunks or len(chunks[-1]) == CHUNK:
            while len(under_way) < CHUNKS:
                under_way.append(host.part.remote(number, start, start + CHUNK))
                start += CHUNK
            chunk = self._fetched(under_way.popleft(), node, deadline_s)
            chunks.append(np.array(chunk))  # a copy: Ray can have the memory of the original back
        return torch.from_numpy(np.concatenate(chunks))

    def _fetched(self, ref: Any, node: NodeId, deadline_s: float) -> np.ndarray:
        while not ray.wait([ref], timeout=deadline_s)[0]:
            answer = self.hosts[node].status.remote(0)
            if not ray.wait([answer], timeout=deadline_s)[0]:
                raise Died(f"it has not answered for {2 * deadline_s:g} s")
        value: np.ndarray | Exception = self._value(ref, node)
        if isinstance(value, Exception):
            raise value
        return value

    def _value(self, ref: Any, node: NodeId) -> Any:
        """What a call has returned, or its error."""
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError | TrainingError):
                return error.cause
            name = type(error.cause).__name__
            return TrainingError(f"{self.describe(node)} failed: {name}: {error.cause}")
        except ray.exceptions.RayError as error:
            return Died(" ".join(str(error).split())[:80])

    # The end

    def kill(self, node: NodeId) -> None:
        """End what is left of a host. What it has been asked will not come back."""
        self.addresses.pop(node, None)
        for process in [self.hosts.pop(node), *self.followers.pop(node, [])]:
            ray.kill(process)
        for ref in [ref for ref, (owner, _) in self.calls.items() if owner == node]:
            del self.calls[ref]

    def end(self) -> None:
        """End all hosts, whatever they are doing. They know each other, so Ray would keep them for
        as long as the cluster runs.
        """
        for node in list(self.hosts):
            self.kill(node)
        for path in self.files:
            path.unlink(missing_ok=True)

    def __contains__(self, node: NodeId) -> bool:
        return node in self.hosts

    def describe(self, node: NodeId) -> str:
        """A node, its region and its machine, for a message."""
        return f"{node} in region {node.region!r} on {self.places[node].address}"
