"""Which peers a host can reach, and how the two ends of a link come to one view of that.

What belongs here: the rules of a cut between two hosts that are both there, as one of the two sees
it. What does not: how a cut is found (`line.py`, by its transport), who is lost because it has died
(`restarts.py`), and what a method makes of the news (`methods/`).

Two hosts have a number in common: how often they have been cut off from each other, in these lives
of theirs. All mail carries it, and each host *hails* its peers with it now and then, so that there
is always something to find a cut by.

- Whoever cannot get a byte to a peer for the deadline raises the number by one. To it that peer is
  lost (`Lost` with `unreachable`), and it hails it with the new number until an answer comes.
- Whoever is hailed with a higher number than its own takes it over. If it had not noticed the cut,
  the peer is lost to it now. Then the peer is there again (`Joined`), and is hailed in turn.
- Whoever is cut off and is hailed with its own number knows that the other end has it too: the
  peer is there again.
- Mail with another number than the receiver's is dropped, and so is all mail of a peer that is cut
  off. A host hails before it sends mail with a new number, and mail keeps its order, so nothing is
  dropped that both ends count.

So it does not matter which end sees a cut, or in which order: all that was sent with the old number
is handled before that or never, and all that is sent with the new one comes after `Joined` at both
ends. The number only rises, so an old hail changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from archipel.actor import Message, NodeId


@dataclass(frozen=True, eq=False, slots=True)
class Hail(Message):
    """From host to host; an actor never sees it. `cuts`: how often the two have been cut off from
    each other, as far as the sender knows.
    """

    cuts: int


@dataclass(frozen=True)
class CutOff:
    """From the line to its host: nothing has got through to a peer for the deadline."""

    node: NodeId


@dataclass(frozen=True)
class Beat:
    """From the line to its host: it is time to hail all peers."""


@dataclass
class Reach:
    """Which peers one host can reach.

    Attributes:
        cuts: how often each peer and this host have been cut off from each other; 0 if it is not
            here.
        off: peers that are cut off now, in the order in which that was found.
    """

    cuts: dict[NodeId, int] = field(default_factory=dict)
    off: dict[NodeId, None] = field(default_factory=dict)

    def cut(self, node: NodeId) -> None:
        """A peer cannot be reached any more."""
        self.cuts[node] = self.cuts.get(node, 0) + 1
        self.off[node] = None

    def is_news(self, node: NodeId, cuts: int) -> bool:
        """Whether a hail with this number says that the peer can be reached again."""
        known = self.cuts.get(node, 0)
        return cuts > known or (cuts == known and node in self.off)

    def mend(self, node: NodeId, cuts: int) -> None:
        """A peer can be reached again, and both ends have this number."""
        self.cuts[node] = cuts
        self.off.pop(node, None)

    def counts(self, node: NodeId, cuts: int) -> bool:
        """Whether mail with this number from a peer counts."""
        return node not in self.off and cuts == self.cuts.get(node, 0)

    def begin(self, node: NodeId) -> None:
        """A peer begins another life. If it was cut off, it still is, for the first time in it."""
        self.cuts[node] = int(node in self.off)

    def begin_all(self) -> Reach:
        """This host begins another life. Whoever was cut off still is."""
        return Reach(dict.fromkeys(self.off, 1), dict(self.off))
