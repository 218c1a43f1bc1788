"""What the members of an all-reduce say to each other, and what each remembers meanwhile.

What belongs here: the messages, and one node's state of one all-reduce. What does not: who sends
what to whom, and what happens when a member is lost (`all_reduce.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from archipel.actor import Group, Message, NodeId, Vector
from archipel.run.codec import Coded, decoded, encode
from archipel.run.wire import Coder

Attempt = tuple[int, int]
"""How many losses its leader knew of, and how often it had begun again with those."""
NONE: Attempt = (-1, 0)


@dataclass(frozen=True, eq=False, slots=True)
class Begin(Message):
    """Up the chain, before the first sum of an attempt: its last member is to begin those sums that
    go down.
    """

    group: Group
    round: int
    attempt: Attempt


@dataclass(frozen=True, eq=False, slots=True)
class Sum(Message):
    """Along the chain, up or down: the sum of one chunk over all members before the receiver,
    without the vectors of those in `refused`.
    """

    group: Group
    round: int
    attempt: Attempt
    chunk: int
    total: Vector | Coded
    refused: Group


@dataclass(frozen=True, eq=False, slots=True)
class Mean(Message):
    """The way back of a sum: the mean of one chunk. `settled`: the sender has all chunks of the
    mean.
    """

    group: Group
    round: int
    attempt: Attempt
    chunk: int
    mean: Vector | Coded
    refused: Group
    settled: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class MeanQuery(Message):
    """To the leader, after a loss: have you got this round's mean?"""

    round: int


@dataclass(frozen=True, eq=False, slots=True)
class Again(Message):
    """To the leader, after a cut: something of this attempt, or of one before it, is lost."""

    round: int
    attempt: Attempt


@dataclass(frozen=True, eq=False, slots=True)
class NeighboursMean(Message):
    """To the next one up or down the chain, after a cut: something of the mean may be lost."""

    round: int


AllReduceMessage = Begin | Sum | Mean | MeanQuery | Again | NeighboursMean


@dataclass
class Waiting:
    """An all-reduce that this node waits for.

    Attributes:
        group: its members as far as this node knows, without those who are lost.
        mine: the chunks of this node's vector.
        refused: this node's vector is left out of the mean.
        difference: the sums may travel in fewer bits.
        since_s: when this node called for the mean.
        attempt: the latest attempt that this node has taken part in; NONE: none.
        latest: who takes part in it.
        means: chunks of the mean that have come, by attempt and number.
        left: what rounding leaves over at this node of each chunk, by attempt and number.
        asking: members that have asked for this mean and have had no answer.
        givers: who has sent some of a mean that they had already.
        again: something of this attempt may be lost; NONE: nothing is.
        neighbours: who has asked for the whole mean since the latest attempt began.
    """

    group: Group
    mine: tuple[Tensor, ...]
    refused: bool
    difference: bool
    since_s: float
    attempt: Attempt = NONE
    latest: Group = ()
    means: dict[Attempt, dict[int, Vector | Coded]] = field(default_factory=dict)
    left: dict[Attempt, dict[int, Tensor]] = field(default_factory=dict)
    asking: dict[NodeId, None] = field(default_factory=dict)
    givers: set[NodeId] = field(default_factory=set)
    again: Attempt = NONE
    neighbours: tuple[NodeId, ...] = ()

    def with_mine(
        self, message: Sum, coder: Coder, given: int | None = None, *, begins: bool
    ) -> Vector | Coded:
        """A sum with this node's part in it.

        Args:
            coder: how this node's vectors travel.
            given: the sum is made the mean of so many vectors; None: it is passed on.
            begins: there is nothing in `message` to add to.
        """
        chunk = message.chunk
        mine = None if self.refused else self.mine[chunk]
        if not coder.codes_sums(message.group, difference=self.difference):
            total = decoded(message.total)
            if mine is not None:
                total = mine if begins else total + mine
            return total / given if given else total
        start, numel = chunk * len(self.mine[0]), sum(map(len, self.mine))
        count = max(0, min(coder.parameters - start, len(self.mine[chunk])))
        if mine is None and not given:  # it passes on what has come
            return encode(decoded(message.total), coder.wire, count) if begins else message.total
        left = coder.left_of_sums(numel)
        coded, over = coder.pass_on(
            None if begins else message.total,
            mine,
            None if left is None else left[start : start + count],
            count,
            given or 1,
        )
        if over is not None:
            self.left.setdefault(message.attempt, {})[chunk] = over
        return coded


@dataclass(frozen=True)
class LastMean:
    """The last mean that this node has got, for members that may not have got it.

    Attributes:
        attempt: that it has come of.
        answered: the last attempt that this node has answered with it.
    """

    group: Group
    round: int
    attempt: Attempt
    chunks: tuple[Vector | Coded, ...]
    refused: Group
    answered: Attempt
