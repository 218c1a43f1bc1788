"""Which nodes are gone, which cannot reach each other, and who is told of it.

What belongs here: what is so after a crash, a return, or a link that goes down or comes up, and the
news that follow. What does not: when that happens (`schedule.py`), which messages are lost
(`links.py`), and telling actors (`trouble.py`): the functions here return news, and tell nobody.

A node that is *down* computes nothing and gets nothing. Its peers do not know that yet: when they
have been told, at its deadline or because it said so, it is *lost*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archipel.actor import Actor, Joined, Lost, Message, NodeId, Vector

News = tuple[NodeId, Message]
"""Somebody, and what is to be told."""
Peers = Mapping[NodeId, None]
"""Whom a node may send to, in the order that its actor gives: a set that keeps its order."""


@dataclass(frozen=True, eq=False, slots=True)
class Saved:
    """What a node would restart from.

    Attributes:
        actor: its actor.
        worker: for a worker, what the trainer keeps of it.
        left: what rounding has left over; see `wire.Coder`.
    """

    actor: Actor
    worker: Any
    left: dict[str, Vector]


@dataclass
class Outages:
    """Which nodes and links are there, and what has been told of them.

    Attributes:
        peers: the nodes that each node may send to. Nodes with the same peers share one object.
        rng: drawn from for messages that are lost or doubled.
        down: nodes that are not there, and since when.
        lost: nodes that are down, and whose peers have been told.
        left: nodes that never come back.
        severed: pairs of regions whose nodes take each other for lost, each pair in both orders.
        begun: some node has been down at some time of the run.
        saves: what nodes would restart from.
        before: for each worker that will restart, what the trainer kept of it before the inner
            steps that it is taking now.
    """

    peers: Mapping[NodeId, Peers]
    rng: np.random.Generator
    down: dict[NodeId, float]
    lost: dict[NodeId, None] = field(default_factory=dict)
    left: dict[NodeId, None] = field(default_factory=dict)
    severed: dict[tuple[str, str], None] = field(default_factory=dict)
    begun: bool = False
    saves: dict[NodeId, Saved] = field(default_factory=dict)
    before: dict[NodeId, Any] = field(default_factory=dict)

    def connected(self, a: NodeId, b: NodeId) -> bool:
        """No link that is down for long lies between two nodes."""
        return (a.region, b.region) not in self.severed

    def reachable(self, a: NodeId, b: NodeId) -> bool:
        """What `a` sends to `b` now arrives."""
        return a not in self.down and b not in self.down and self.connected(a, b)

    def fail(self, node: NodeId, now: float) -> None:
        """A node is gone. Its peers do not know yet."""
        self.down[node] = now
        self.begun = True

    def lose(self, node: NodeId) -> Iterator[News]:
        """Its peers are told that a node is gone."""
        self.lost[node] = None
        for other in self._peers_that_are_there(node):
            yield other, Lost(node)

    def rejoin(self, node: NodeId) -> None:
        """A node is there again."""
        del self.down[node], self.lost[node]

    def news_of_rejoining(self, node: NodeId) -> Iterator[News]:
        """What is told when a node has been told that it is there again: its peers of it, it of
        them.
        """
        for other in self._peers_that_are_there(node):
            if self.connected(other, node):
                yield other, Joined(node)
            else:  # which is not gone any more, as it has been told
                yield other, Lost(node, unreachable=True)
        for peer in self.peers[node]:
            if peer in self.lost:
                yield node, Lost(peer)
            elif not self.connected(node, peer):
                yield node, Lost(peer, unreachable=True)

    def cut(self, link: tuple[str, str]) -> list[News]:
        """Nodes on both sides of a link have not reached each other for the whole deadline."""
        self.severed[link] = self.severed[link[::-1]] = None
        return [(a, Lost(b, unreachable=True)) for a, b in self._across(link)]

    def mend(self, link: tuple[str, str]) -> list[News]:
        """They reach each other again."""
        del self.severed[link], self.severed[link[::-1]]
        return [(a, Joined(b)) for a, b in self._across(link)]

    def excused(self, workers: Iterable[NodeId]) -> set[NodeId]:
        """Those of `workers` that may have to wait until a server of theirs is there, or a link is
        up.
        """
        training = dict.fromkeys(workers)
        away = [node for node in self.down if node not in training]
        return {
            node
            for node in training
            if any(server in self.peers[node] for server in away)
            or (self.severed and any(not self.connected(node, peer) for peer in self.peers[node]))
        }

    def _peers_that_are_there(self, node: NodeId) -> list[NodeId]:
        return [
            other
            for other, peers in self.peers.items()
            if other != node and other not in self.down and node in peers
        ]

    def _across(self, link: tuple[str, str]) -> list[tuple[NodeId, NodeId]]:
        """Those that are there and have a peer at the other end of a link, and that peer."""
        return [
            (node, peer)
            for node, peers in self.peers.items()
            if node.region in link and node not in self.down
            for peer in peers
            if {node.region, peer.region} == {*link} and peer not in self.down
        ]


def peers_of(actors: Iterable[Actor]) -> dict[NodeId, Peers]:
    """Whom each actor may send to. Actors that give one and the same object share one answer."""
    found: dict[
        int, tuple[Iterable[NodeId], Peers]
    ] = {}  # holds the object, so that its id is its own
    peers: dict[NodeId, Peers] = {}
    for actor in actors:
        given = actor.peers()
        if id(given) not in found:
            found[id(given)] = given, dict.fromkeys(given)
        peers[actor.me] = found[id(given)][1]
    return peers
