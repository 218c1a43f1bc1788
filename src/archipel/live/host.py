"""One actor under the real clock, and its mailbox.

What belongs here: what one node of a live run does with what comes to it. What does not: what its
actor may ask for (`verbs.py`), the thread in which it computes (`compute.py`), what it keeps for an
evaluation (`marks.py`) or for a restart (`saves.py`), who carries its mail (`ray_host.py`), who
watches over it (`watch.py`). Nothing here knows Ray.

A host handles one thing at a time, in the order in which they come; `mail.Inbox` puts each sender's
messages in order first. It trains and evaluates in a second thread, so that a server's answer or a
peer's vector is taken in meanwhile.

A host does not end on its own: it serves its peers until it is told to stop.

A worker whose loss is not finite keeps its actor and loses everything that it had under way. It
handles nothing until it is told who is there. Then it begins a new life, like a node that was
started again.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from archipel.actor import (
    Actor,
    Group,
    Joined,
    Lost,
    Message,
    NodeId,
    Start,
    Vector,
)
from archipel.disk import checkpoint
from archipel.errors import TrainingError, UserError
from archipel.live import saves
from archipel.live.compute import Compute, JobEnded, JobFailed
from archipel.live.initial import OtherWeights, digest, initial_weights, unpack
from archipel.live.mail import Envelope
from archipel.live.marks import Marks
from archipel.live.protocol import BadLoss, HostSetup, Mark, Membership, News, Record, Status
from archipel.live.reach import Beat, CutOff, Hail
from archipel.live.sums import AllReduceMessage
from archipel.live.verbs import HostContext, Own
from archipel.pyfile import place_of
from archipel.run.node import Node
from archipel.run.screening import Screen
from archipel.run.wire import Coder

UPDATES = 1000
"""A host knows of so many of its last local updates when they were."""
LOCK_S = 0.1
"""A host that is asked how it is waits so long for its handler to end."""


@dataclass(frozen=True, eq=False, slots=True)
class Arrival:
    """An envelope has come at `time_s`, on the host's clock."""

    envelope: Envelope
    time_s: float


Item = Arrival | Own | JobEnded | JobFailed | News | Membership | CutOff | Beat
"""What a host takes in, one at a time."""


class Host:
    """Runs one actor.

    Args:
        setup: which node this is, and what it does.
        post: carries an envelope to a node; copies the vectors in it before it returns.
        weights: initial weights of each stage; None: made here from the seed, or `OtherWeights`.
        forget: gives up all that is on its way to a node.

    Attributes:
        events: news for the watch: a loss that is not finite, or None when all marks have been
            reached.
    """

    def __init__(
        self,
        setup: HostSetup,
        post: Callable[[NodeId, Envelope], None],
        weights: Sequence[Vector] | None = None,
        forget: Callable[[NodeId], None] = lambda node: None,
    ) -> None:
        # The vectors that come are read-only, and nobody writes to a message's vectors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(1)
        self.node = _node_of(setup, weights)
        self.setup, self.me = setup, self.actor.me
        self.mailbox: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[BadLoss | None] = queue.SimpleQueue()
        self.lock = threading.Lock()  # held while something is handled
        self.ctx = HostContext(self.node, setup, post, self.mailbox.put, forget)
        self.marks = Marks(setup.marks, waits_for_release=setup.waits_for_release)
        self.compute = Compute(self.me, setup, self.marks, self.mailbox.put, lambda: self.ctx.now)
        self.ctx.compute = self.compute
        self.handled, self.last_handled_s = 0, 0.0
        self.local_updates = deque([(0.0, 0)], UPDATES)
        self.loss: float | None = None
        self.finished = True  # inner steps, since the last loss that was not finite
        self.waits_for_life = False
        self.saves = saves.SaveRequests()
        self.last_status = snapshot_of(self)

    @property
    def actor(self) -> Actor:
        return self.node.actor

    # What others ask of a host, from other threads

    def run(self, clock_s: float = 0.0) -> Record:
        """Start the actor when the run's clock is at `clock_s`, and handle what comes until `stop`;
        what happened.

        Raises:
            UserError, TrainingError: the user's task failed, or the method did.
        """
        self.begin(clock_s)
        while (item := self.mailbox.get()) is not None:
            self.handle(item)
            del item  # so that the memory of its vectors is free for the next ones
        with self.lock:
            return Record(self.ctx.recorder, tuple(self.local_updates), self.compute.integers)

    def begin(self, clock_s: float = 0.0) -> None:
        """Start the actor, or tell it that it is there again and who is not."""
        self.ctx.started_s = time.perf_counter() - clock_s
        with self.lock, naming(self.me):
            self._keep_at_marks()
            if self.setup.begins == "start":
                self._handle(Start(), self.me)
            else:
                self._join(self.setup.membership.gone)

    def handle(self, item: Item | BaseException) -> None:
        """Take in one of the things that have come."""
        if isinstance(item, BaseException):
            raise item
        with self.lock, naming(self.me):
            self._take_in(item)

    def deliver(self, envelope: Envelope) -> None:
        """Mail has come."""
        self.mailbox.put(Arrival(envelope, self.ctx.now))

    def tell(self, news: News) -> None:
        """Another host is lost, or there again."""
        self.mailbox.put(news)

    def begin_again(self, membership: Membership) -> None:
        """Begin a new life after a loss that was not finite."""
        self.mailbox.put(membership)

    def stop(self) -> None:
        """Handle nothing more, and give up the inner steps under way. Evaluations go on."""
        self.compute.stopped = True
        self.marks.close()
        self.mailbox.put(None)

    def save(self) -> None:
        """Save my part of the run as it is now, or, while inner steps are taken, as it is when they
        have ended. Returns when that is on disk.

        The state is copied between two handlers, and written in the thread that asks: no handler
        waits for the disk.

        Raises:
            UserError: the actor has something that a save cannot hold.
            TrainingError: it cannot be written.
        """
        assert self.setup.save_folder is not None
        with self.lock:
            copy = self.saves.wanted = Future()
            if not self.node.busy:
                self.saves.serve(state_of(self))
        self.saves.write(self.setup.save_folder, copy)

    def load(self) -> list[str]:
        """Go on from the last save, unless the run begins; what the user should know of that.

        Raises:
            UserError: there is none that is sound.
        """
        folder, begins = self.setup.save_folder, self.setup.begins
        if folder is None or begins == "start":
            return []
        needed = begins == "resume" and self.setup.shard is None
        if not needed and not checkpoint.checkpoints(folder.path):
            return [f"{self.me} has no save to go on from, and begins anew"]
        state, said = saves.load(folder, self.actor, self.ctx.recorder)
        self.node.actor, self.node.screen = state.actor, state.screen
        self.node.coder.left = state.left
        self.ctx.rng, self.ctx.recorder = state.rng, state.recorder
        self.handled = state.events
        self.compute.load(state.batch, state.inner)
        return said

    def status(self, released: int = 0) -> Status:
        """How things stand. The copies of the first `released` marks are not needed any more.

        This answers while a handler or a save takes long: silence means that the process is gone.
        """
        self.marks.release(released)
        if self.lock.acquire(timeout=LOCK_S):
            try:
                self.last_status = snapshot_of(self)
            finally:
                self.lock.release()
        now, compute = self.ctx.now, self.compute
        quiet_s = now - max(self.last_handled_s, compute.last_tick_s)
        return replace(
            self.last_status,
            time_s=now,
            events=self.handled + compute.ticks,
            quiet_s=0.0 if self.marks.evaluating else quiet_s,
            saving=self.saves.writing,
            first_mark=released,
            marks=tuple(self.marks.reached[released:]),
        )

    def mark(self) -> tuple[int, Mark] | None:
        """Keep my part of the model to take home as it is now, between two handlers, and have it
        evaluated. Its number, and what it is; None: I hold no part.

        From then on no mark is reached on its own.
        """
        self.marks.close()
        with self.lock:
            number = self._mark(1)
            return None if number is None else (number, self.marks.reached[number])

    def part(self, number: int, start: int, stop: int) -> np.ndarray:
        """Entries `start` to `stop` of my part of the model at a mark, shape (stop − start,) or
        less at the end of the vector.

        Raises:
            LookupError: it is not kept any more.
        """
        return self.marks.vector(number)[start:stop].numpy()

    # One thing at a time

    def _take_in(self, item: Item) -> None:
        match item:
            case Membership():
                self._begin_again(item)
            case _ if self.waits_for_life:
                pass  # whatever it was, it has been lost with the earlier life
            case Arrival(envelope=envelope) if envelope.kind is Hail:
                self._hear(envelope)
            case Arrival(envelope=envelope, time_s=time_s):
                for ready in self.ctx.inbox.accept(envelope):
                    self._open(ready, time_s)
            case Own(message=message, life=life) if life == self.ctx.inbox.life:
                self._handle(message, self.me)
            case JobEnded(message=message):
                self._note(item)
                self.saves.serve(state_of(self))  # before the actor asks for more
                self._handle(message, self.me)
            case JobFailed(text=text):
                self._fail(text)
            case CutOff(node=node) if self.setup.pipeline is not None:
                raise TrainingError(f"{self.me} cannot reach {node}, and stages need each other")
            case News() | CutOff() | Beat():
                self._hear(item)

    def _hear(self, what: News | CutOff | Beat | Envelope) -> None:
        for told in self.ctx.hear(what):
            match told:
                case Envelope():
                    self._open(told, self.ctx.now)
                case Lost(node=node) | Joined(node=node) if node in self.actor.peers():
                    self._handle(told, self.me)

    def _open(self, envelope: Envelope, time_s: float) -> None:
        sender, size_bytes, message = envelope.sender, envelope.size_bytes, envelope.open()
        slow = sender.region != self.me.region
        if isinstance(message, AllReduceMessage):
            self.ctx.recorder.counts(1, size_bytes, size_bytes if slow else 0)
            self._happened()
            self.ctx.reduces.receive(message, sender)
        else:
            # The two clocks started at one message's distance from each other.
            self.ctx.recorder.sends(
                sender, min(envelope.sent_s, time_s), time_s, size_bytes, slow=slow
            )
            self._handle(message, sender)

    def _handle(self, message: Message, sender: NodeId) -> None:
        self._happened()
        self.node.handle(message, sender, self.ctx, self.ctx.recorder)
        if self.actor.local_updates != self.local_updates[-1][1]:
            self.local_updates.append((self.ctx.now, self.actor.local_updates))
        self._keep_at_marks()

    def _happened(self) -> None:
        self.handled += 1
        self.last_handled_s = self.ctx.now

    # Inner steps have ended

    def _note(self, ended: JobEnded) -> None:
        """Put down what the inner steps were."""
        self.compute.end_job()
        self.ctx.recorder.computes(self.me, ended.start_s, ended.end_s)
        loss = self.node.end_job(
            ended.message,
            ended.end_s,
            ended.progress,
            self.ctx.recorder,
            losses_count=self.setup.trains,
        )
        self.finished = True
        self.loss = self.loss if loss is None else loss
        self.ctx.recorder.counts(*self.compute.inner.take_counts())

    def _fail(self, text: str) -> None:
        """A loss is not finite: what was under way is lost, and the inner optimizer begins anew."""
        self._happened()
        self.compute.end_job()
        self.node.busy = False
        self.compute.reset_optimizer()
        self.waits_for_life = True
        self.events.put(BadLoss(text, self.finished))
        self.finished = False

    def _begin_again(self, membership: Membership) -> None:
        self.waits_for_life = False
        self.ctx.begin_life(membership)
        self.saves.serve(state_of(self))
        self._join(membership.gone)

    def _join(self, gone: Group) -> None:
        """The actor is there again: tell it, and who is not."""
        self._handle(Joined(self.me), self.me)
        peers = set(self.actor.peers())
        for node in gone:
            if node in peers:
                self._handle(Lost(node), self.me)
        for node in self.ctx.cut_off:
            self._handle(Lost(node, unreachable=True), self.me)

    # Marks

    def _keep_at_marks(self) -> None:
        if count := self.marks.due(self.actor.trained):
            self.marks.wait_for_room()
            self._mark(count)
            if self.marks.complete.is_set():
                self.events.put(None)

    def _mark(self, count: int) -> int | None:
        """Keep my part of the model at so many marks, if I hold one; the number of the last
        mark.
        """
        actor, model = self.actor, self.actor.model()
        if model is None:
            self.marks.close()
            return None
        mark = Mark(self.ctx.now, actor.trained, actor.absorbed, actor.outer_steps)
        copy = self.marks.add(mark, model.clone(), count)
        self.compute.evaluate(copy, self.compute.integers)
        return copy.numbers[-1]


def _node_of(setup: HostSetup, weights: Sequence[Vector] | None) -> Node:
    """The actor as it is at first, and what goes with it."""
    actor = unpack(setup.actor, lambda: _weights(setup) if weights is None else weights)
    screen = Screen(setup.screening) if setup.screening else None
    coder = Coder(setup.wire, setup.parameters)
    return Node(actor, parameters=setup.parameters, screen=screen, coder=coder)


def _weights(setup: HostSetup) -> Sequence[Vector]:
    """The initial weights of the model, made from the seed.

    Raises:
        OtherWeights: they are not those of the command.
    """
    weights = initial_weights(setup.task, setup.run.seed, setup.pipeline)
    if digest(weights) != setup.weights:
        raise OtherWeights(f"task.model: seed {setup.run.seed} makes other weights here")
    return weights


def snapshot_of(host: Host) -> Status:
    """How things stand with a host, as far as that only holds between two handlers; `Host.status`
    adds the rest.
    """
    recorder = host.ctx.recorder
    return Status(
        time_s=host.ctx.now,
        events=0,
        quiet_s=0.0,
        trained=host.actor.trained,
        compute_s=sum(recorder.compute_s.values()),
        loss=host.loss,
        doing=doing(host),
        holds=host.actor.model() is not None,
        saving=False,
        refused=dict(recorder.refused),
        messages=recorder.messages,
        sent_bytes=recorder.sent_bytes,
        slow_link_bytes=recorder.slow_link_bytes,
        first_mark=0,
        marks=(),
        cut_off=host.ctx.cut_off,
    )


def state_of(host: Host) -> saves.HostState:
    """What a host would go on from, between two handlers; not a copy."""
    return saves.HostState(
        host.actor,
        host.ctx.rng,
        host.compute.batch,
        host.compute.state,
        host.node.screen,
        host.node.coder.left,
        host.ctx.recorder,
        host.handled + host.compute.ticks,
    )


def doing(host: Host) -> str:
    """What a host does or waits for, in words."""
    since_s = host.compute.training_since_s
    if since_s is not None:
        return f"trains since {host.ctx.now - since_s:.1f} s"
    if host.waits_for_life:
        return "waits until it can begin again after a loss that is not finite"
    waits = host.ctx.reduces.waits_for() or f"waits for {host.actor.waits_for()}"
    off = host.ctx.cut_off
    more = f" and {len(off) - 1} more" if off[1:] else ""
    return f"{waits}; it cannot reach {off[0]}{more}" if off else waits


@contextmanager
def naming(me: NodeId) -> Iterator[None]:
    """Turn an exception of the method's into one line that names the node and the place."""
    try:
        yield
    except (UserError, TrainingError):
        raise
    except Exception as error:
        raise TrainingError(
            f"{me} failed at {place_of(error)}: {type(error).__name__}: {error}"
        ) from error
