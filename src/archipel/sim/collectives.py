"""All-reduces: who has called, whether all have whom they name, and what the mean is.

What belongs here: the members that wait, and the collectives that are under way. What does not:
what a collective costs (`network.py`), when it ends (`clock.py`), and who is lost (`outages.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from archipel import outer
from archipel.actor import Group, NodeId, Reduced, Vector
from archipel.errors import TrainingError


@dataclass(eq=False, slots=True)  # frozen ones are three times as slow to make
class Contribution:
    """What a member of a collective has called with.

    Attributes:
        group: whom the member names, itself among them.
        vector: what it gives.
        round: the number of this mean.
        share: the part of a model that the vector is; 1 is a whole model.
        refused: its vector is not finite or absurdly large, and is left out of the mean.
    """

    group: Group
    vector: Vector
    round: int
    share: float = 1.0
    refused: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Complete:
    """A collective that can start.

    Attributes:
        group: its members, in rank order. Where all have named one and the same object, it is that
            object: then each of them can see at a glance that nobody is missing.
        calls: what each of them gives, in the same order.
    """

    group: Group
    calls: list[Contribution]


@dataclass
class Collectives:
    """All collectives of a run.

    Attributes:
        rank: of every node.
        waiting: members whose collective waits for others.
        under_way: for each member that waits for a mean which is being computed, what it gave, and
            the number of the event that will bring the mean.
    """

    rank: Mapping[NodeId, int]
    waiting: dict[NodeId, Contribution] = field(default_factory=dict)
    under_way: dict[NodeId, tuple[Contribution, int]] = field(default_factory=dict)

    def call(
        self, member: NodeId, contribution: Contribution, lost: Collection[NodeId], *, again: bool
    ) -> Complete | None:
        """A member has called; its collective, if that can start.

        Args:
            lost: those who are lost and whom nobody waits for.
            again: somebody has been lost in this run. Then a member may be told of a later round
                while it waits, and its last call counts.

        Raises:
            TrainingError: it waits for another mean already.
        """
        if member in self.waiting and not again:
            raise TrainingError(
                f"{member} called all_reduce while it waits in one: a member is in one all-reduce "
                "at a "
                "time"
            )
        self.waiting[member] = contribution
        if len(self.waiting) < len(contribution.group) - len(lost):
            return None  # without a search: somebody has not called
        return self.complete(member, lost)

    def complete(self, member: NodeId, lost: Collection[NodeId]) -> Complete | None:
        """The collective that `member` waits in, if all have called whom any of its members
        names.
        """
        if member not in self.waiting:
            return None
        group, number = self.waiting[member].group, self.waiting[member].round
        if not self._are_alone(group, number):
            named = self._named_with(member, number, lost)
            if any(
                node not in self.waiting or self.waiting[node].round != number for node in named
            ):
                return None
            group = tuple(sorted(named, key=lambda node: self.rank[node]))
        return Complete(group, [self.waiting.pop(node) for node in group])

    def _are_alone(self, group: Group, number: int) -> bool:
        """Just the members of one group wait, all for one round and with the same group: the
        usual case.
        """
        return len(self.waiting) == len(group) and all(
            call.group is group and call.round == number for call in self.waiting.values()
        )

    def _named_with(self, member: NodeId, number: int, lost: Collection[NodeId]) -> set[NodeId]:
        """Who is in one collective with `member`.

        A member may name somebody whom others have not heard of: a newcomer. And who calls for the
        same round and is named by one of them, or names one of them, belongs to it too. So the set
        grows until nothing is added.
        """
        named, seen = {member}, set[NodeId]()
        while named != seen:
            seen = set(named)
            for caller, call in self.waiting.items():
                if call.round == number and (caller in named or not named.isdisjoint(call.group)):
                    named |= {caller, *(node for node in call.group if node not in lost)}
        return named

    def starts(self, complete: Complete, first_number: int) -> None:
        """A collective has started; its means arrive as events that are numbered from
        `first_number`.
        """
        calls = zip(complete.group, complete.calls, strict=True)
        for number, (node, call) in enumerate(calls, first_number):
            call.group = complete.group
            self.under_way[node] = call, number

    def ends(self, member: NodeId) -> None:
        """A member has got its mean."""
        self.under_way.pop(member, None)

    def leave(self, node: NodeId) -> list[int]:
        """A node is gone. If a mean was being computed with it, the others wait again, for one
        without it; the numbers of the events that are void by that.
        """
        self.waiting.pop(node, None)
        if node not in self.under_way:
            return []
        del self.under_way[node]
        void = []
        for member, (call, number) in list(self.under_way.items()):
            if node in call.group:
                del self.under_way[member]
                self.waiting[member] = call
                void.append(number)
        return void

    def forget(self, node: NodeId) -> None:
        """Nobody waits for a node any longer."""
        without: dict[int, Group] = {}  # members that name one group object go on naming one
        for member, call in self.waiting.items():
            if id(call.group) not in without:
                without[id(call.group)] = tuple(other for other in call.group if other != node)
            self.waiting[member] = replace(call, group=without[id(call.group)])


def reduced(complete: Complete) -> Reduced:
    """What a collective comes to."""
    group, calls = complete.group, complete.calls
    refused = tuple(node for node, call in zip(group, calls, strict=True) if call.refused)
    given = [call.vector for call in calls if not call.refused]
    mean = outer.mean(given) if given else torch.zeros_like(calls[0].vector)
    return Reduced(mean, group, calls[0].round, refused)
