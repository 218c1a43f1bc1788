"""What an actor may ask for under the real clock: `actor.Context`.

What belongs here: the verbs, and what they need: who is there, which messages come next, and the
all-reduces under way. What does not: what a host does with what comes to it (`host.py`), the thread
that computes (`compute.py`), and who carries messages (`ray_host.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from archipel.actor import Group, Joined, Lost, Message, NodeId, Reduced, Sent, Vector
from archipel.live.all_reduce import AllReduces
from archipel.live.compute import Compute
from archipel.live.mail import Envelope, Inbox, contents
from archipel.live.protocol import HostSetup, Membership, News
from archipel.live.reach import Beat, CutOff, Hail
from archipel.run.metrics import Recorder
from archipel.run.node import Node
from archipel.run.wire import BYTES_PER_ENTRY
from archipel.sim import routes


@dataclass(frozen=True, eq=False, slots=True)
class Own:
    """A message from the actor to itself, or an answer to one of its requests, with the number of
    the life in which it was asked for.
    """

    message: Message
    life: int


class HostContext:
    """One actor's view of the world.

    Args:
        node: the actor, and what is kept beside it.
        setup: which node this is, and what it does.
        post: carries an envelope to a node; copies the vectors in it before it returns.
        put: puts something into the host's queue.
        forget: gives up all that is on its way to a node.

    Attributes:
        rng: random numbers of this node.
        recorder: what has happened here.
        started_s: when the run's clock stood at 0, on this process' clock.
        inbox, sent, reduces: mail and all-reduces of this life; see `begin_life`.
    """

    def __init__(
        self,
        node: Node,
        setup: HostSetup,
        post: Callable[[NodeId, Envelope], None],
        put: Callable[[Own], None],
        forget: Callable[[NodeId], None],
    ) -> None:
        self.node, self.me = node, node.actor.me
        self.post, self.put, self.forget = post, put, forget
        self.epoch = setup.epoch
        self.topology, self.vector_bytes = setup.topology, BYTES_PER_ENTRY * setup.parameters
        self.chains: dict[Group, Group] = {}
        self.rng = np.random.default_rng((setup.run.seed, setup.seed_rank))
        self.recorder = Recorder()
        self.started_s = time.perf_counter()
        self.compute: Compute
        self.inbox = Inbox(self.epoch)
        self.begin_life(setup.membership)

    def begin_life(self, membership: Membership) -> None:
        """Forget all mail and all-reduces: those of an earlier life are lost."""
        gone, reach = set(membership.gone), self.inbox.reach.begin_all()
        self.inbox = Inbox(self.epoch, membership.life, dict(membership.lives), gone, reach=reach)
        self.sent: dict[NodeId, int] = {}  # messages to each node in its life
        self.reduces = AllReduces(
            self.me,
            self.send,
            self._reduced,
            self._chain,
            self.node.coder,
            membership.losses,
            set(gone),
        )

    def _chain(self, group: Group) -> Group:
        if self.topology is None:
            return group
        if group not in self.chains:
            self.chains = {group: routes.chain(self.topology, group, self.vector_bytes)}
        return self.chains[group]

    # Who is there, and who can be reached

    @property
    def cut_off(self) -> Group:
        """The peers that are there and cannot be reached."""
        return tuple(node for node in self.inbox.reach.off if node not in self.inbox.gone)

    def hear(self, what: News | CutOff | Beat | Envelope) -> Iterator[Message | Envelope]:
        """Take in news, or an envelope with a `Hail`: what the actor is to be told, and mail that
        had come before the news. Each is to be handled before the next one is asked for.
        """
        reach = self.inbox.reach
        match what:
            case News(node=node, life=None):
                self.inbox.lost(node)
                self.reduces.lost(node)
                yield Lost(node)
            case News(node=node, life=int(life)):
                early = self.inbox.joined(node, life)
                self.sent.pop(node, None)
                self.reduces.joined(node)
                yield Lost(node, unreachable=True) if node in reach.off else Joined(node)
                yield from early
            case CutOff(node=node) if node not in reach.off and node not in self.inbox.gone:
                yield from self._cut(node)
                self.hail([node])
            case Beat():
                self.hail(self.node.actor.peers())
            case Envelope(sender=sender, contents=(int(cuts),)) if self.inbox.is_of_now(what):
                if not reach.is_news(sender, cuts):
                    return
                if sender not in reach.off:  # it has noticed a cut that I have not
                    yield from self._cut(sender)
                reach.mend(sender, cuts)
                self.inbox.begin_anew(sender)
                self.sent.pop(sender, None)
                self.hail([sender])  # before any mail
                self.reduces.mended(sender)
                yield Joined(sender)

    def _cut(self, node: NodeId) -> Iterator[Message]:
        self.forget(node)  # nobody would let it in any more
        self.inbox.reach.cut(node)
        self.inbox.begin_anew(node)
        yield Lost(node, unreachable=True)

    def hail(self, peers: Iterable[NodeId]) -> None:
        """Hail those of some peers that are there."""
        for node in peers:
            if node != self.me and node not in self.inbox.gone:
                self.post(node, self._envelope(node, 0, Hail(self.inbox.reach.cuts.get(node, 0))))

    # The verbs

    @property
    def now(self) -> float:
        return time.perf_counter() - self.started_s

    def send(self, to: NodeId, message: Sent) -> Sent:
        arrives = self.node.coder.arrived(message)
        if to in self.inbox.gone or to in self.inbox.reach.off:
            return arrives
        number = self.sent.get(to, 0)
        self.sent[to] = number + 1
        self.post(to, self._envelope(to, number, message))
        return arrives

    def _envelope(self, to: NodeId, number: int, message: Message) -> Envelope:
        inbox, kind = self.inbox, type(message)
        inside = contents(message, self.node.coder.pack(message).codes)
        lives, cuts = (inbox.life, inbox.lives.get(to, 0)), inbox.reach.cuts.get(to, 0)
        return Envelope(self.me, self.epoch, lives, number, self.now, kind, inside, cuts)

    def after(self, seconds: float, message: Message) -> None:
        own = Own(message, self.inbox.life)
        if not seconds:
            self.put(own)
            return
        timer = threading.Timer(seconds, self.put, (own,))
        timer.daemon = True
        timer.start()

    def train(self, theta: Vector, steps: int, progress: int) -> None:
        self.node.check_steps(steps)
        self.node.begin_job()
        self.compute.train(theta, steps, progress)

    def gradient(self, theta: Vector, progress: int) -> None:
        self.node.begin_job()
        self.compute.gradient(theta, progress)

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        self.node.begin_job()
        self.compute.apply(theta, gradient, progress)

    def all_reduce(
        self,
        group: Group,
        vector: Vector,
        round: int = 0,
        share: float | None = None,
        *,
        difference: bool = False,
    ) -> None:
        # `share` is for clocks that are modelled: here the bytes that travel are counted.
        refused = self.node.refuses([vector], self.me, self.now, self.recorder)
        self.reduces.call(group, vector, round, self.now, refused=refused, difference=difference)

    def _reduced(self, reduced: Reduced, since_s: float) -> None:
        self.recorder.reduces((self.me,), since_s, self.now)
        self.put(Own(reduced, self.inbox.life))
