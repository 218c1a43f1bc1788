"""How the members of a collective go on together when one of them is lost or comes back.

What belongs here: the part that all methods with an all-reduce share. What does not: what is
reduced, and what is done with the mean.

All members hold the same model and take the same rounds. Each `Reduced` says whose mean it is, so
that all agree on who took part. The one of them who has been there longest, the first of `group`,
holds the model that a user takes home, and has one more duty:

- A **newcomer** (it joins late, or has crashed and restarted) has no model. It says `Hello` to all
  and waits.
- At the start of the next round the **holder** sends it the `State` of that round and names it in
  its own all-reduce. The holder is the first of its group, and an all-reduce is of those whom the
  first one names, so that nobody else has to know beforehand.
- If the holder is lost right then, the others may not know of the newcomer. So until a mean has had
  it in it, it takes the loss of whoever invited it as its own: it is a newcomer again.
- If nobody is left who has a model, the newcomer with the most rounds in its save becomes the
  holder, and starts a new *term*.

A newcomer goes by what it has been told, which may be old: one of the others may have got a model
since, or may be back from a crash and have started a term too. So two may hold a model at once. The
later term wins, and what is done in the other one is lost:

- Whoever holds the model of a term that somebody has started says so (`Holding`) to each one that
  is there again. If that one has a later term, it says so in turn.
- Whoever hears of a later term, or gets its `State`, leaves its group, tells that group, and is a
  newcomer of the later term.

A member that cannot be reached is still a member: nobody can tell it from one that goes on by
itself, and two groups that go on apart would be two models. So a collective waits until the link is
up again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from archipel.actor import Actor, Context, Group, Joined, Lost, Message, NodeId, Reduced, Vector

Term = tuple[int, int]
"""How often somebody has had to start again with all others, and the rank of the last one who has.
"""
FIRST: Term = (0, 0)
"""The term in which all begin. Nobody has started it, so there is one model of it at most."""


@dataclass(frozen=True, eq=False, slots=True)
class Hello(Message):
    """To everybody: I have no model; my last save is of this term and round. A newcomer answers
    with its own, for whoever has had a model meanwhile has forgotten it.
    """

    term: Term
    round: int
    is_answer: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class State(Message):
    """To a newcomer: all that it needs to take part in a round, and who does."""

    theta: Vector
    momentum: Vector | None
    term: Term
    round: int
    progress: int
    group: Group


@dataclass(frozen=True, eq=False, slots=True)
class Holding(Message):
    """I have a model of this term, or know of one. Whoever has one of an earlier term gives it
    up.
    """

    term: Term


@dataclass(kw_only=True)
class Member(Actor):
    """One member; a method says what it does in a round.

    Attributes:
        theta: the model at the start of the round, equal on all members.
        everybody: all who may ever be members, in rank order.
        group: those who take part in this round, as far as I know; those who have been there
            longest first, then by rank.
        term: in which I take part.
        round: the number of this round.
        progress: inner steps that the model has absorbed, of all members together.
        computing: I have asked for inner steps, and they are not done.
        outdated: the inner steps under way are of a round that is over.
        waiting: I am a newcomer, who has no model yet.
        lost_lately: those who were lost in this round; a State that names them may be older than
            that.
        newcomers: those others who wait, and the terms and rounds of their saves; until it is
            agreed that they take part.
        gone: those who have crashed or left.
        invited_by: whose word is all that I have for taking part; None: a mean has had me in it.
    """

    theta: Vector
    everybody: Group
    group: Group
    term: Term = FIRST
    round: int = 0
    progress: int = 0
    computing: bool = False
    outdated: bool = False
    waiting: bool = False
    lost_lately: dict[NodeId, None] = field(default_factory=dict)
    newcomers: dict[NodeId, tuple[Term, int]] = field(default_factory=dict)
    gone: dict[NodeId, None] = field(default_factory=dict)
    invited_by: NodeId | None = None

    @abstractmethod
    def compute(self, ctx: Context) -> None:
        """Ask for what this round reduces."""

    def momentum(self) -> Vector | None:
        """What a newcomer needs to know besides the model."""
        return None

    def take_over(self, momentum: Vector | None) -> None:
        """I am a newcomer, and this is the others' momentum."""

    def begin(self, ctx: Context) -> None:
        """Begin a round; what is still being computed is of another one."""
        self.absorbed, self.lost_lately = self.progress if self.holds else 0, {}
        self.outdated = self.computing
        if not self.computing:
            self.computing = True
            self.compute(ctx)

    def computed(self, ctx: Context) -> bool:
        """Inner steps are done. If they are of a round that is over, ask for those of this one, and
        say no.
        """
        self.computing = False
        if self.outdated and not self.waiting:
            self.begin(ctx)
        return not self.computing and not self.waiting

    def is_current(self, reduced: Reduced) -> bool:
        """Whether a mean that I have called for is of this round, and still counts.

        Not if I have become a newcomer since, and all who are in it are newcomers or gone too: they
        have been told that I have no model, and may begin without me.
        """
        return reduced.round == self.number and (
            not self.waiting
            or any(
                node != self.me and node not in self.newcomers and node not in self.gone
                for node in reduced.group
            )
        )

    def agree(self, group: Group) -> None:
        """These, and nobody else, have taken part in the round; so everybody knows, in the same
        order.

        Who was lost after it had given its part, and before I knew the mean, takes part no longer.
        """
        if self.me in group:
            self.invited_by, self.waiting = None, False
        self.group = group if not self.lost_lately else self.but_lost(group)

    def but_lost(self, group: Group) -> Group:
        """Those of a group who have not been lost in this round, in the same order."""
        return tuple(node for node in group if node not in self.lost_lately)

    def next_round(self, ctx: Context) -> None:
        """All of `group` have taken their step, and `progress` is up to date: go on together.

        If I am not one of them, they do not know that I take part: whoever invited me was lost
        before it could tell them. Then I am a newcomer again.
        """
        self.round += 1
        if self.me not in self.group:
            self.wait_for_model(ctx)
            return
        self.newcomers = {
            node: number for node, number in self.newcomers.items() if node not in self.group
        }
        if self.holds:
            self.invite(ctx)
        self.begin(ctx)

    def upon_membership(self, message: Message, sender: NodeId, ctx: Context) -> None:
        """What a method's `upon` does not handle itself."""
        match message:
            case Lost(node=node, unreachable=False):
                self.gone[node] = self.lost_lately[node] = None
                self.newcomers.pop(node, None)
                self.group = self.but_lost(self.group)
                self.absorbed = self.progress if self.holds else 0
                if node == self.invited_by:
                    # Nobody else may know that I take part. If I went on by myself, there could be
                    # two models of one term.
                    self.wait_for_model(ctx)
                else:
                    self.start_if_nobody_else_can(ctx)
            case Lost(node=node, unreachable=True):
                self.gone.pop(node, None)  # it is there again, where I cannot reach it
            case Joined(node=self.me):
                self.computing = False
                self.newcomers, self.gone, self.lost_lately = {}, {}, {}
                self.wait_for_model(ctx)
            case Joined(node=node):
                self.gone.pop(node, None)
                if self.waiting:  # what I said to it, or what it answered, may have been lost
                    self.say_hello((node,), ctx)
                elif self.holds and node in self.newcomers and node in self.group:
                    self.send_state(node, ctx)  # how I invited it may have been lost
                elif self.holds and self.term != FIRST:
                    ctx.send(node, Holding(self.term))
            case Holding() if self.waiting:
                self.newcomers.pop(sender, None)
            case Holding(term=term) if term > self.term:
                self.tell_group(message, ctx)
                self.wait_for_model(ctx)
            case Holding(term=term) if term < self.term:
                ctx.send(sender, Holding(self.term))
            case Hello() if self.holds and sender in self.group:
                self.send_state(sender, ctx)
            case Hello(term=term, round=number, is_answer=is_answer):
                self.newcomers[sender] = term, number
                if self.waiting and not is_answer:
                    ctx.send(sender, Hello(*self.reached, is_answer=True))
                self.start_if_nobody_else_can(ctx)
            case State(term=term, round=number) if self.waiting or (term, number) > self.reached:
                self.take(message, sender, ctx)

    def take(self, state: State, sender: NodeId, ctx: Context) -> None:
        """Go on from another member's model, in its round."""
        if not self.waiting and state.term != self.term:
            self.tell_group(Holding(state.term), ctx)
        self.theta = state.theta.clone()
        self.term = state.term
        self.round = state.round
        self.progress = state.progress
        # It may have been sent before its sender knew who is lost. The sender itself is there.
        self.lost_lately.pop(sender, None)
        self.group = self.but_lost(state.group)
        self.newcomers = {
            node: number for node, number in self.newcomers.items() if node not in state.group
        }
        for node in self.newcomers:  # they may still take me for one of them
            ctx.send(node, Holding(self.term))
        self.take_over(state.momentum)
        self.waiting = False
        self.invited_by = sender
        self.begin(ctx)

    def tell_group(self, later: Holding, ctx: Context) -> None:
        """I leave my group for a later term; it would wait for me in vain."""
        for node in self.group:
            if node != self.me:
                ctx.send(node, later)

    def wait_for_model(self, ctx: Context) -> None:
        """I am a newcomer."""
        self.waiting, self.absorbed, self.invited_by = True, 0, None
        self.outdated = self.computing
        self.say_hello(self.everybody, ctx)
        self.start_if_nobody_else_can(ctx)

    def say_hello(self, to: Iterable[NodeId], ctx: Context) -> None:
        for node in to:
            if node != self.me:
                ctx.send(node, Hello(*self.reached))

    def start_if_nobody_else_can(self, ctx: Context) -> None:
        """If I am a newcomer, and all others are gone or newcomers too: the one with the most
        rounds starts.
        """
        known = {**self.newcomers, self.me: self.reached}
        if self.waiting and all(node in known or node in self.gone for node in self.everybody):
            most = max(known.values(), key=lambda reached: (reached[1], reached[0]))
            if self.me == next(node for node in self.everybody if known.get(node) == most):
                self.waiting = False
                (times, _), _ = max(known.values())
                self.term = times + 1, self.everybody.index(self.me)
                self.group = (self.me,)
                self.invite(ctx)
                self.begin(ctx)

    def invite(self, ctx: Context) -> None:
        """As the holder: have all newcomers take part in this round."""
        new = [node for node in self.everybody if node in self.newcomers and node not in self.group]
        if new:  # else it stays one object, where nobody is ever lost
            self.group = (*self.group, *new)
        for node in self.newcomers:
            self.send_state(node, ctx)

    def send_state(self, to: NodeId, ctx: Context) -> None:
        momentum = self.momentum()
        ctx.send(
            to,
            State(
                self.theta.clone(),
                None if momentum is None else momentum.clone(),
                self.term,
                self.round,
                self.progress,
                self.group,
            ),
        )

    @property
    def number(self) -> int:
        """Of this round among those of all terms: what members reduce together has one number."""
        times, rank = self.term
        return ((times * len(self.everybody) + rank) << 32) + self.round

    @property
    def reached(self) -> tuple[Term, int]:
        """How far I am: of two models the later one is kept."""
        return self.term, self.round

    @property
    def holds(self) -> bool:
        """I hold the model that a user takes home."""
        return not self.waiting and self.group[:1] == (self.me,)

    def model(self) -> Vector | None:
        """All members hold the same model: the holder's is taken."""
        return self.theta if self.holds else None

    def peers(self) -> Iterable[NodeId]:
        return self.everybody

    def waits_for(self) -> str:
        return "the model from any other member" if self.waiting else "a message"
