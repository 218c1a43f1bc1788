"""An all-reduce as messages between nodes, some of which may be lost while it goes on.

What belongs here: who sends which part of a sum to whom, and how those who are left begin again.
What does not: what is said (`sums.py`), who carries the messages (`host.py`), which nodes take
part, and what they do with the mean (`collective.py`).

The first of a group *leads*. All members know the same chain of them, which the leader begins,
from their group alone, see `sim/routes.py`. Vectors are cut into chunks, which follow each other.
The leader sends the first sums up the chain; each member adds its own; the last one divides, and
the means travel back down. Of a large vector every second chunk goes the other way: its sum begins
at the last of the chain, and the leader divides. So both directions of all links are busy from the
start, and a link between two regions carries the vector once each way. (A ring carries it up to
twice, one way.) A chunk that goes up, in a chain that has the order of the group, gets the bits of
`outer.mean`.

Where sums travel in fewer bits (`run/wire.py`), each member rounds what it passes on, and keeps
what that leaves over for its next mean. An attempt that comes to nothing leaves nothing over.

The leader says who takes part, because it may know of a newcomer that the others have not heard of.

If a member is lost, those who have not got their mean begin again, without it:

- An *attempt* has the number of losses that its leader had been told of, and how often the leader
  has begun again since. Everybody is told of all losses in one order, so a higher number is later
  news: whoever has seen a later attempt takes no part in an earlier one, and whoever has not been
  told of so many yet waits until it has.
- Whoever has got its mean already takes no part in a later attempt, and gives all the others that
  mean. So an attempt either comes to its end with everybody in it, or ends with the mean that
  somebody has: there is one mean, whoever is lost.
- Whoever waits asks the leader, for the leader may have got its mean and have nothing more to
  begin.

A member that cannot be reached is still a member, and is waited for. What was on its way between
the two is lost. If they follow each other in the chain, then, when they reach each other again:

- Whoever waits asks the leader to begin again, unless it has done so already: parts of a sum may
  be lost.
- Each asks the other for the whole mean: parts of it may be lost.

Whoever has its mean and sees that the leader begins again gives it to those before and behind it in
the chain. So does whoever has got its mean in this way. So if anybody has a mean, all get it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from archipel.actor import Group, Message, NodeId, Reduced, Vector
from archipel.errors import TrainingError
from archipel.live.sums import (
    NONE,
    Again,
    AllReduceMessage,
    Begin,
    LastMean,
    Mean,
    MeanQuery,
    NeighboursMean,
    Sum,
    Waiting,
)
from archipel.run.codec import decoded
from archipel.run.wire import Coder
from archipel.sim import routes


@dataclass
class AllReduces:
    """One node's part in all-reduces.

    Attributes:
        me: the node.
        send: carries a message to a node, in the order of sending; if that node is lost, so is the
            message.
        finish: called with each mean, and with the time at which this node had called for it.
        chain: puts the members of a group in the order of the chain.
        coder: how this node's vectors travel.
        losses: how often any node has been lost in this run.
        gone: nodes that are lost now.
        waiting: the all-reduces that this node waits for, by round.
        early: beginnings and sums that have come before this node has called for the mean that they
            are of, or has been told of all losses that their leader knows of.
        held: messages for nodes that are lost as far as this node knows; the leader may know
            already that they are there again.
        outcome: of the last all-reduce that has ended; None before.
    """

    me: NodeId
    send: Callable[[NodeId, Message], object]
    finish: Callable[[Reduced, float], None]
    chain: Callable[[Group], Group] = lambda group: group
    coder: Coder = field(default_factory=Coder)
    losses: int = 0
    gone: set[NodeId] = field(default_factory=set)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    early: list[Begin | Sum] = field(default_factory=list)
    held: dict[NodeId, list[Message]] = field(default_factory=dict)
    outcome: LastMean | None = None

    def call(
        self,
        group: Group,
        vector: Vector,
        round: int,
        since_s: float,
        *,
        refused: bool = False,
        difference: bool = False,
    ) -> None:
        """Call for the mean over `group`. If `vector` is `refused`, it is left out of the mean and
        gives nothing but its shape. The sums of a `difference` may travel in fewer bits.

        Rounds go up. A node that calls for an earlier round than it waits for has begun again, and
        does not wait for the later one any more. After a loss it may also call for the same round
        again, with another `group`; what it gave before stands, for others may have it.

        Raises:
            TrainingError: this node waits for this round already, and nobody has been lost.
        """
        before = self.waiting.get(round)
        if before and not self.losses:
            raise TrainingError(f"{self.me} called for all-reduce {round} while it waits for it")
        self.waiting = {number: call for number, call in self.waiting.items() if number <= round}
        members = tuple(node for node in group if node not in self.gone)
        if before:
            leads = before.group[0] == self.me
            before.group, before.since_s = members, since_s
        else:
            leads = False
            chunks = torch.split(vector, routes.chunk_size(len(vector)))
            self.waiting[round] = Waiting(members, chunks, refused, difference, since_s)
        if members[0] == self.me and not leads:
            self._begin(round, self.waiting[round])
        self._try_early()

    def receive(self, message: AllReduceMessage, sender: NodeId) -> None:
        match message:
            case Begin() | Sum():
                self._join(message)
            case Mean(round=round) if call := self.waiting.get(round):
                if message.settled:
                    call.givers.add(sender)
                self._take(call, message)
            case MeanQuery(round=round) if self.outcome and self.outcome.round == round:
                self._settle(self.outcome, (sender,))
            case MeanQuery(round=round) if call := self.waiting.get(round):
                call.asking[sender] = None
            case NeighboursMean(round=round) if self.outcome and self.outcome.round == round:
                self._settle(self.outcome, (sender,))
            case NeighboursMean(round=round) if call := self.waiting.get(round):
                call.neighbours = (*call.neighbours, sender)
            case Again(round=round, attempt=attempt) if call := self.waiting.get(round):
                if call.group[0] == self.me and NONE < call.attempt <= attempt:
                    self._begin(round, call)

    def lost(self, node: NodeId) -> None:
        self.losses += 1
        self.gone.add(node)
        self.held.pop(node, None)
        for round, call in list(self.waiting.items()):
            was_named = node in call.group
            call.group = tuple(member for member in call.group if member != node)
            if call.group[0] != self.me:
                # Also if I have not named it: the leader may have, and it may have had my mean.
                self._send(call.group[0], MeanQuery(round))
            elif was_named:
                self._begin(round, call)
        self._try_early()

    def joined(self, node: NodeId) -> None:
        self.gone.discard(node)
        for message in self.held.pop(node, []):
            self.send(node, message)

    def mended(self, node: NodeId) -> None:
        """A member can be reached again. What was on its way between us is lost."""
        for round, call in list(self.waiting.items()):
            leader = call.group[0]
            groups = [self.chain(group) for group in (call.group, call.latest) if group]
            if any(_are_neighbours(group, node, self.me) for group in groups):
                call.again = call.attempt
                self._send(node, NeighboursMean(round))
            if call.again > NONE:
                if leader == self.me:
                    self._begin(round, call)
                else:
                    self._send(leader, Again(round, call.again))
            if self.losses:  # somebody may have given me its mean
                for other in {leader, node} - {self.me}:
                    self._send(other, MeanQuery(round))

    def waits_for(self) -> str | None:
        """In which all-reduce this node waits, and for whom; None: in none."""
        for round, call in self.waiting.items():
            others = [node for node in call.group if node != self.me]
            more = f" and {len(others) - 4} more" if others[4:] else ""
            return (
                f"waits in all-reduce {round} of {len(call.group)} for "
                f"{', '.join(map(str, others[:4]))}{more}"
            )
        return None

    # Sums

    def _begin(self, round: int, call: Waiting) -> None:
        """The leader begins an attempt."""
        losses, times = call.attempt
        attempt = self.losses, times + 1 if losses == self.losses else 0
        begin = Begin(call.group, round, attempt)
        self._take_part(call, begin)
        self._pass_beginning_up(call, begin)  # first, for it is small
        self._begin_sums(call, begin, down=False)

    def _pass_beginning_up(self, call: Waiting, message: Begin) -> None:
        chain = self.chain(message.group)
        if chain[-1] == self.me:
            self._begin_sums(call, message, down=True)
        elif any(self._goes_down(call, number) for number in range(len(call.mine))):
            self._send(chain[chain.index(self.me) + 1], message)

    def _begin_sums(self, call: Waiting, message: Begin, *, down: bool) -> None:
        """Begin the sums of those chunks that go up, or down."""
        for number, mine in enumerate(call.mine):
            if self._goes_down(call, number) == down:
                first = torch.zeros_like(mine) if call.refused else mine
                begun = Sum(message.group, message.round, message.attempt, number, first, ())
                self._pass_on(call, begun, begins=True)

    def _goes_down(self, call: Waiting, number: int) -> bool:
        return routes.goes_down(number, len(call.mine))

    def _try_early(self) -> None:
        early, self.early = self.early, []
        for message in early:
            self._join(message)

    def _join(self, message: Begin | Sum) -> None:
        """Take part in an attempt, or do what is right instead."""
        outcome, call = self.outcome, self.waiting.get(message.round)
        if message.attempt[0] > self.losses:
            # Its leader knows of a loss that I have not been told of. If I passed it on now, it
            # might go to a node that is lost, and be lost with it.
            self.early.append(message)
        elif (
            outcome
            and not call
            and message.round == outcome.round
            and message.attempt > outcome.answered
        ):
            self.outcome = replace(outcome, answered=message.attempt)  # once an attempt
            if message.attempt[0] == outcome.answered[0]:
                self._settle(outcome, self._neighbours(outcome.group))
            else:
                self._settle(outcome, tuple(node for node in message.group if node != self.me))
        elif call is None or message.group[0] != call.group[0]:
            self.early.append(message)
        elif message.attempt >= call.attempt:
            if message.attempt > call.attempt:
                self._take_part(call, message)
            if isinstance(message, Begin):
                self._pass_beginning_up(call, message)
            else:
                self._pass_on(call, message)

    @staticmethod
    def _take_part(call: Waiting, message: Begin | Sum) -> None:
        """This node takes part in a later attempt than before."""
        call.attempt, call.latest, call.means = message.attempt, message.group, {}
        call.again, call.neighbours = NONE, ()

    def _pass_on(self, call: Waiting, message: Sum, *, begins: bool = False) -> None:
        """Put this node's part into a sum and send it on; the last one divides, and sends the mean
        back. Who begins has nothing in `message` to add to.
        """
        group, line, chunk = message.group, self._line(message, call), message.chunk
        refused = (*message.refused, self.me) if call.refused else message.refused
        if line[-1] != self.me:
            total = call.with_mine(message, self.coder, begins=begins)
            following = line[line.index(self.me) + 1]
            self._send(following, replace(message, total=total, refused=refused))
        else:
            refused = tuple(node for node in group if node in refused)
            given = max(1, len(group) - len(refused))
            mean = call.with_mine(message, self.coder, given, begins=begins)
            self._take(call, Mean(group, message.round, message.attempt, chunk, mean, refused))

    def _line(self, message: Sum | Mean, call: Waiting) -> Group:
        """The members in the order in which a chunk's sum passes them."""
        return routes.line(self.chain(message.group), message.chunk, len(call.mine))

    # Means

    def _take(self, call: Waiting, message: Mean) -> None:
        if not message.settled:
            if message.attempt != call.attempt:
                return
            line = self._line(message, call)
            if place := line.index(self.me):
                self._send(line[place - 1], message)
        means = call.means.setdefault(message.attempt, {})
        means[message.chunk] = message.mean
        if len(means) == len(call.mine):
            del self.waiting[message.round]
            self.early = [
                other
                for other in self.early
                if other.round != message.round or other.attempt >= message.attempt
            ]
            over = call.left.get(message.attempt, {})
            left = [over.get(number) for number in range(len(call.mine))]
            numel = sum(map(len, call.mine))
            self.coder.keep(self.coder.left_of_parts(numel, len(call.mine[0]), left))
            chunks = tuple(means[number] for number in range(len(call.mine)))
            self.outcome = LastMean(
                message.group,
                message.round,
                message.attempt,
                chunks,
                message.refused,
                answered=message.attempt,
            )
            asked = {*call.asking, *call.neighbours}
            if call.givers:
                asked |= {*self._neighbours(message.group)} - call.givers
            self._settle(self.outcome, tuple(sorted(asked)))
            self.finish(
                Reduced(
                    torch.cat([decoded(chunk) for chunk in chunks]),
                    message.group,
                    message.round,
                    message.refused,
                ),
                call.since_s,
            )

    def _neighbours(self, group: Group) -> Group:
        """The nearest members before and behind this node in the chain that are not lost."""
        if self.me not in group:
            return ()
        chain = self.chain(group)
        place = chain.index(self.me)
        before = [node for node in chain[:place] if node not in self.gone]
        behind = [node for node in chain[place + 1 :] if node not in self.gone]
        return (*before[-1:], *behind[:1])

    def _settle(self, outcome: LastMean, others: Group) -> None:
        """Give others the mean that this node has got."""
        for number, mean in enumerate(outcome.chunks):
            for node in others:
                self._send(
                    node,
                    Mean(
                        outcome.group,
                        outcome.round,
                        outcome.attempt,
                        number,
                        mean,
                        outcome.refused,
                        settled=True,
                    ),
                )

    def _send(self, to: NodeId, message: Message) -> None:
        if to in self.gone:
            self.held.setdefault(to, []).append(message)
        else:
            self.send(to, message)


def _are_neighbours(chain: Group, a: NodeId, b: NodeId) -> bool:
    """Whether one of them follows the other in a chain."""
    return any(pair in ((a, b), (b, a)) for pair in itertools.pairwise(chain))
