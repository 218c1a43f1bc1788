"""Who is lost, and who begins another life.

What belongs here: the numbers of lives and losses that all hosts of a run agree on, and how often a
process may be started again. What does not: how a host is found to be lost (`watch.py`), how one is
started (`fleet.py`), what an actor does when a peer is lost (`methods/`).

A host begins another life in two ways: its process has died and is started again, with what it
saved last; or a loss was not finite, and it keeps its process and its actor. For all others both
are the same: it is lost, and then it has joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from archipel.actor import NodeId
from archipel.live.protocol import Membership, News


@dataclass
class Restarts:
    """What is known of lost hosts.

    Attributes:
        most: how often one process may be started again.
        counts: how often each process has been started again, in the whole run.
        lives: how many earlier lives each host has had since the command started, as the others
            were told.
        begun: the same number, as each host was told itself.
        gone: hosts that are lost now, in the order in which they were lost.
        without_process: lost hosts whose process is to be started again.
        losses: how often any host has been lost since the command started.
    """

    most: int
    counts: dict[NodeId, int] = field(default_factory=dict)
    lives: dict[NodeId, int] = field(default_factory=dict)
    begun: dict[NodeId, int] = field(default_factory=dict)
    gone: dict[NodeId, None] = field(default_factory=dict)
    without_process: dict[NodeId, None] = field(default_factory=dict)
    losses: int = 0

    def may_restart(self, node: NodeId) -> bool:
        """Its process may be started once more."""
        return self.counts.get(node, 0) < self.most

    def lose(self, node: NodeId, *, process: bool, returns: bool = True) -> News | None:
        """A host is lost, `process`: together with its process. `returns`: that is started again.

        Returns:
            What the others are told; None: they have been told of this loss already.
        """
        if process:
            self.counts[node] = self.counts.get(node, 0) + returns
            self.without_process[node] = None
        if node in self.gone:
            return None
        self.losses += 1
        self.gone[node] = None
        return News(node)

    def begin_life(self, node: NodeId) -> Membership:
        """A lost host begins its next life: what it is told.

        Of another one that is lost it is told the life that has ended, even if the next one has
        begun already: the news of that will reach it, and mail that comes earlier waits for it.
        """
        self.begun[node] = self.begun.get(node, 0) + 1
        self.without_process.pop(node, None)
        return Membership(
            life=self.begun[node],
            lives={other: life for other, life in self.lives.items() if other != node},
            gone=tuple(other for other in self.gone if other != node),
            losses=self.losses,
        )

    def join(self, node: NodeId) -> News:
        """A host has begun its next life: what the others are told."""
        self.gone.pop(node, None)
        self.lives[node] = self.begun[node]
        return News(node, self.lives[node])
