"""What an actor may ask for under the real clock: `actor.Context`.

What belongs here: the verbs, and what they need: who is there, which messages come next, and the
all-reduces under way. What does not: what a host does with what comes to it (`host.py`), the thread
that computes (`compute.py`), and who carries messages (`ray_host.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from archipel.actor import Group, Message, NodeId, Reduced, Sent, Vector
from archipel.live.all_reduce import AllReduces
from archipel.live.compute import Compute
from archipel.live.mail import Envelope, Inbox, contents
from archipel.live.protocol import HostSetup, Membership
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
    ) -> None:
        self.node, self.me, self.post, self.put = node, node.actor.me, post, put
        self.epoch = setup.epoch
        self.topology, self.vector_bytes = setup.topology, BYTES_PER_ENTRY * setup.parameters
        self.chains: dict[Group, Group] = {}
        self.rng = np.random.default_rng((setup.run.seed, setup.seed_rank))
        self.recorder = Recorder()
        self.started_s = time.perf_counter()
        self.compute: Compute
        self.begin_life(setup.membership)

    def begin_life(self, membership: Membership) -> None:
        """Forget all mail and all-reduces: those of an earlier life are lost."""
        gone = set(membership.gone)
        self.inbox = Inbox(self.epoch, membership.life, dict(membership.lives), gone)
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

    def lose(self, node: NodeId) -> None:
        """Nothing comes from `node` any more, and nothing is sent to it."""
        self.inbox.lost(node)
        self.reduces.lost(node)

    def rejoin(self, node: NodeId, life: int) -> list[Envelope]:
        """`node` is there again; its messages that have come before this was known."""
        early = self.inbox.joined(node, life)
        self.sent.pop(node, None)
        self.reduces.joined(node)
        return early

    # The verbs

    @property
    def now(self) -> float:
        return time.perf_counter() - self.started_s

    def send(self, to: NodeId, message: Sent) -> Sent:
        arrives = self.node.coder.arrived(message)
        if to in self.inbox.gone:
            return arrives
        number = self.sent.get(to, 0)
        self.sent[to] = number + 1
        lives, kind = (self.inbox.life, self.inbox.lives.get(to, 0)), type(message)
        inside = contents(message, self.node.coder.pack(message).codes)
        self.post(to, Envelope(self.me, self.epoch, lives, number, self.now, kind, inside))
        return arrives

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
