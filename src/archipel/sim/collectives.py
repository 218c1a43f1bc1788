"""All-reduces: which members have called, when a collective is complete, and what its mean is.

What belongs here: the members that wait, and the collectives that are under way. What does not:
what a collective costs (`network.py`), when it ends (`verbs.py`), and who is lost (`outages.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from archipel import outer
from archipel.actor import Group, NodeId, Reduced, Vector
from archipel.errors import TrainingError
from archipel.run.codec import Coded
from archipel.run.wire import Coder
from archipel.sim import routes


@dataclass(eq=False, slots=True)  # frozen ones are three times as slow to make
class Contribution:
    """What a member of a collective has called with.

    Attributes:
        group: the nodes that the member names, itself among them.
        vector: what it gives to the mean.
        round: the number of this mean.
        share: what the vector weighs on its way, in models.
        refused: its vector is not finite or absurdly large, and is left out of the mean.
        difference: see `actor.Context.all_reduce`.
        left: what rounding leaves over of its part in the mean under way; None: nothing is kept.
    """

    group: Group
    vector: Vector
    round: int
    share: float = 1.0
    refused: bool = False
    difference: bool = False
    left: Vector | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Complete:
    """A collective that can start.

    Attributes:
        group: its members, in the order in which the first of them names them. Where all members
            named one and the same object, it is that object. A member then needs one comparison
            (`is`) to see that nobody is missing.
        calls: what each member gives, in the same order.
    """

    group: Group
    calls: list[Contribution]


@dataclass
class Collectives:
    """All collectives of a run.

    Attributes:
        waiting: members whose collective is not complete yet, and what they gave.
        under_way: for each member that waits for a mean which is being computed, what it gave, and
            the number of the event that will bring the mean.
    """

    waiting: dict[NodeId, Contribution] = field(default_factory=dict)
    under_way: dict[NodeId, tuple[Contribution, int]] = field(default_factory=dict)

    def call(
        self, member: NodeId, contribution: Contribution, lost: Collection[NodeId], *, again: bool
    ) -> Complete | None:
        """Note a member's call. Returns its collective if that is complete now.

        Args:
            lost: nodes that are lost, and that nobody waits for.
            again: some node has been lost in this run. Then a waiting member may call again: it
                was told meanwhile of a later round, and only its last call counts.

        Raises:
            TrainingError: the member waits for another mean already.
        """
        if member in self.waiting and not again:
            raise TrainingError(
                f"{member} called all_reduce while it waits in one: a member is in one all-reduce "
                "at a time"
            )
        self.waiting[member] = contribution
        # Most calls end here, without a search: fewer nodes wait than must have called. It may only
        # skip searches that would fail, so it assumes that all of `lost` were in this group.
        if len(self.waiting) < len(contribution.group) - len(lost):
            return None
        return self.complete(member, lost)

    def complete(self, member: NodeId, lost: Collection[NodeId]) -> Complete | None:
        """The collective that `member` waits in, if it is complete: all have called whom the first
        of its group names.

        Members may name different groups: the first may have invited a newcomer of whom the others
        have not heard. Whoever is not named by the first of its own group waits.
        """
        if member not in self.waiting:
            return None
        group, number = self.waiting[member].group, self.waiting[member].round
        if not self._are_alone(group, number):
            first = group[0]
            if first not in self.waiting:
                return None
            group = tuple(node for node in self.waiting[first].group if node not in lost)
            if member not in group or not all(self._follows(node, first, number) for node in group):
                return None
        return Complete(group, [self.waiting.pop(node) for node in group])

    def _follows(self, node: NodeId, first: NodeId, number: int) -> bool:
        """A node has called for this round, and with a group whose first is `first`."""
        call = self.waiting.get(node)
        return call is not None and call.round == number and call.group[0] == first

    def _are_alone(self, group: Group, number: int) -> bool:
        """The usual case: only the members of one group wait, all for the same round, and all of
        them named the same object.
        """
        # Comparing objects and not their contents keeps this linear in the members: a thousand
        # members with tuples of a thousand names would make a million comparisons.
        return len(self.waiting) == len(group) and all(
            call.group is group and call.round == number for call in self.waiting.values()
        )

    def starts(self, complete: Complete, first_number: int) -> None:
        """A collective has started; its means arrive as events that are numbered from
        `first_number`.
        """
        calls = zip(complete.group, complete.calls, strict=True)
        for number, (node, call) in enumerate(calls, first_number):
            call.group = complete.group  # if one of these is lost, `leave` finds the others by it
            self.under_way[node] = call, number

    def ends(self, member: NodeId) -> Vector | None:
        """A member has got its mean; what rounding has left over there, if anything is kept."""
        call, _ = self.under_way.pop(member, (None, 0))
        return call.left if call else None

    def leave(self, node: NodeId) -> list[int]:
        """A node is gone. If a mean was being computed with it, the others wait again, for a mean
        without it.

        Returns:
            The numbers of the events that would have brought that mean, and are void now.
        """
        self.waiting.pop(node, None)
        if node not in self.under_way:
            return []
        del self.under_way[node]
        # The others' calls go back to `waiting`, as if they had just called. They still name the
        # node, so nothing starts before `forget`: its peers do not know of the loss until then.
        void = []
        for member, (call, number) in list(self.under_way.items()):
            if node in call.group:
                del self.under_way[member]
                self.waiting[member] = call
                void.append(number)
        return void

    def forget(self, node: NodeId) -> None:
        """Nobody waits for a node any longer."""
        # Members that named one group object name one object again: `_are_alone` asks for that.
        without: dict[int, Group] = {}
        for member, call in self.waiting.items():
            if id(call.group) not in without:
                without[id(call.group)] = tuple(other for other in call.group if other != node)
            self.waiting[member] = replace(call, group=without[id(call.group)])


def reduced(complete: Complete, coders: Sequence[Coder], chain: Group | None = None) -> Reduced:
    """The result of a collective, without the contributions that were refused.

    Args:
        coders: of its members, in their order; nothing is kept there yet.
        chain: its members in the order in which they pass on sums that are rounded at each hop;
            None: as they are.

    Of a large vector every second part is summed the other way, as in live runs; see
    `routes.goes_down`.
    """
    group, calls = complete.group, complete.calls
    refused = tuple(node for node, call in zip(group, calls, strict=True) if call.refused)
    given = [call.vector for call in calls if not call.refused]
    for call in calls:
        call.left = None  # of a mean that was under way and is void
    if not given:
        mean = torch.zeros_like(calls[0].vector)
    elif coders[0].codes_sums(group, difference=calls[0].difference):
        parts = dict(zip(group, zip(calls, coders, strict=True), strict=True))
        mean = _chain([parts[node] for node in chain or group], len(given))
    else:
        mean = outer.mean(given)
        for part, down in _parts(len(mean)) if len(given) > 2 else ():
            if down:
                mean[part] = outer.mean([vector[part] for vector in reversed(given)])
    return Reduced(mean, group, calls[0].round, refused)


def _parts(numel: int) -> Iterator[tuple[slice, bool]]:
    """The parts of a vector that are summed one by one, and whether their sums go down the
    chain.
    """
    size = routes.chunk_size(numel)
    chunks = max(1, -(-numel // size))
    for number in range(chunks):
        yield slice(number * size, (number + 1) * size), routes.goes_down(number, chunks)


def _chain(members: Sequence[tuple[Contribution, Coder]], given: int) -> Vector:
    """The mean of those vectors that are not refused, rounded at each hop as it is where members
    pass it on to each other (`live/all_reduce.py`).
    """
    numel = len(members[0][0].vector)
    passed = [
        _pass_along(members[::-1] if down else members, given, part) for part, down in _parts(numel)
    ]
    for call, coder in members:
        left = [kept.get(call) for _, kept in passed]
        call.left = coder.left_of_parts(numel, routes.chunk_size(numel), left)
    return torch.cat([mean for mean, _ in passed])


def _pass_along(
    members: Sequence[tuple[Contribution, Coder]], given: int, part: slice
) -> tuple[Vector, dict[Contribution, Vector]]:
    """A part of the mean of the members' vectors, summed in their order, and what each of them
    keeps of it.
    """
    total: Coded | None = None
    kept: dict[Contribution, Vector] = {}
    for place, (call, coder) in enumerate(members):
        last = place == len(members) - 1
        if call.refused and not last:
            continue  # it passes on what has come
        mine, before = call.vector[part], coder.left_of_sums(len(call.vector))
        count = max(0, min(coder.parameters - part.start, len(mine)))
        total, over = coder.pass_on(
            total,
            None if call.refused else mine,
            None if before is None else before[part.start : part.start + count],
            count,
            given if last else 1,
        )
        if over is not None:
            kept[call] = over
    assert total is not None
    return total.decode(), kept
