"""One actor under the real clock: its mailbox, its verbs, and its inner steps in a thread beside the handlers.

What belongs here: all that one node of a live run does. What does not: who carries its mail and who watches over it
(`live.py`; nothing here knows Ray), what a method does, how an inner step is taken (`replica.py`).

A host handles one message at a time, in the order of arrival. Each sender's messages arrive in the order of sending, once
each, and only those of this run do: `Inbox` sees to that, whatever carries them. Inner steps run in a thread of their own, so
that a server's answer or a peer's vector is taken in while a worker trains.

Nothing ends on its own: a host serves its peers until it is told to stop. What it would take home is kept at its *marks*, counts
of absorbed inner steps that it is told beforehand, in the very handler that reaches them.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from archipel.actor import Actor, Gradient, Group, Message, NodeId, Reduced, Start, Trained, Vector
from archipel.data import Shard
from archipel.errors import Diverged, TrainingError, UserError
from archipel.metrics import Recorder, Training
from archipel.pipeline import Pipeline
from archipel.pool import place_of
from archipel.replica import NonFiniteLoss, Replica, Run, Solo
from archipel.sharded import Leader, ShardedReplica
from archipel.stage import Stage
from archipel.task import NoTask, TaskConfig, make_task

CHUNK = 1 << 20
"""Entries of a vector that travel in one message of an all-reduce."""


# Mail


@dataclass(frozen=True, eq=False, slots=True)
class Envelope:
    """A message on its way. The vectors in it are NumPy views of their tensors; whoever carries it copies them, once.

    Attributes:
        sender: who sent it.
        epoch: of the run that it belongs to.
        number: how many messages the sender had sent to this receiver before.
        sent_s: on the sender's clock.
        kind, contents: the message's class, and its fields.
    """

    sender: NodeId
    epoch: int
    number: int
    sent_s: float
    kind: type[Message]
    contents: tuple[Any, ...]

    @property
    def size_bytes(self) -> int:
        """Of the vectors inside."""
        return sum(value.nbytes for value in self.contents if isinstance(value, np.ndarray))

    def open(self) -> Message:
        """The message; its vectors are those that came, and are not to be written to."""
        return self.kind(*(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in self.contents))


def contents(message: Message) -> tuple[Any, ...]:
    """The fields of a message, ready to travel."""
    values = (getattr(message, part.name) for part in fields(message))
    return tuple(value.detach().numpy() if isinstance(value, Tensor) else value for value in values)


@dataclass
class Inbox:
    """Lets through the mail of one epoch, each sender's in the order of sending and once each.

    Attributes:
        epoch: of this run; mail of any other is dropped.
        expected: the number that each sender's next message has.
        early: what came before its turn.
    """

    epoch: int
    expected: dict[NodeId, int] = field(default_factory=dict)
    early: dict[tuple[NodeId, int], Envelope] = field(default_factory=dict)

    def accept(self, envelope: Envelope) -> list[Envelope]:
        """What can be handled now that `envelope` has come, in order; nothing if it is a stranger, a duplicate, or early."""
        sender = envelope.sender
        number = self.expected.get(sender, 0)
        if envelope.epoch != self.epoch or envelope.number < number:
            return []
        self.early[sender, envelope.number] = envelope
        ready = []
        while (sender, number) in self.early:
            ready.append(self.early.pop((sender, number)))
            number += 1
        self.expected[sender] = number
        return ready


# An all-reduce is a chain of messages: sums travel up the group in rank order, means travel back down. Summed so, every node gets
# the bits of `outer.mean`. A vector is cut into chunks that follow each other, so that both directions of all links are busy.


@dataclass(frozen=True, eq=False, slots=True)
class Sum(Message):
    """Up the chain: the sum of one chunk over all members before the receiver."""

    group: Group
    chunk: int
    total: Vector


@dataclass(frozen=True, eq=False, slots=True)
class Mean(Message):
    """Down the chain: the mean of one chunk over all members."""

    group: Group
    chunk: int
    mean: Vector


@dataclass
class Chain:
    """One all-reduce under way.

    Attributes:
        mine: the chunks of my vector; empty until I have called.
        early: sums that came before I called.
        passed: how many of my chunks have gone up the chain.
        means: the chunks of the mean that have come back.
        since_s: when I called.
        round: what I called with.
    """

    mine: tuple[Tensor, ...] = ()
    early: list[Sum] = field(default_factory=list)
    passed: int = 0
    means: dict[int, Tensor] = field(default_factory=dict)
    since_s: float = 0.0
    round: int = 0


# What a host is told and what it tells


@dataclass(frozen=True)
class Setup:
    """What a host is told when it is made.

    Attributes:
        actor: pickled, for its class may lie in a file of the user's that the host has to import first.
        seed_rank: of the actor among all actors; with the run's seed it seeds `Context.rng`.
        task, run: what is trained, by those who train.
        shard: this worker's data; None: this actor is no worker.
        marks: counts of absorbed inner steps at which the model is kept, rising; () where there is no model.
        step_time_s: the least time of an inner step, to act out a slower machine; 0: as fast as it goes.
        epoch: of this run, on all its mail.
        rank: among the workers.
        pipeline, shards: how workers share the replicas' stages, and the data of all replicas; None: each has a whole one.
        processes: that share this worker's replica.
        deadline_s: longest wait for those with whom inner steps are taken.
    """

    actor: bytes
    seed_rank: int
    task: TaskConfig
    run: Run
    shard: Shard | None
    marks: tuple[int, ...]
    step_time_s: float
    epoch: int
    rank: int = 0
    pipeline: Pipeline | None = None
    shards: tuple[Shard, ...] = ()
    processes: int = 1
    deadline_s: float = 60.0

    @property
    def trains(self) -> bool:
        """This is a worker, and there is something to train."""
        return self.shard is not None and not isinstance(self.task, NoTask)


@dataclass(frozen=True)
class Meeting:
    """Where the processes that take inner steps together find each other: a process group of torch.distributed (gloo).

    Attributes:
        where: `file://…` for processes on one machine, which then open no port to others; else `tcp://…`, of rank 0.
        rank, size: of this process, and how many there are.
    """

    where: str
    rank: int
    size: int


@dataclass(frozen=True)
class Snapshot:
    """A part of the model to take home, kept in the handler that reached a mark. `model`: whatever `keep` made of the vector."""

    time_s: float
    absorbed: int
    outer_steps: int
    model: Any


@dataclass(frozen=True)
class Status:
    """What a host says about itself when it is asked.

    Attributes:
        time_s: on its clock.
        events: messages handled and inner steps taken: if they stand still, it stands still.
        quiet_s: seconds since the last of them.
        absorbed: see `actor.Actor`.
        compute_s: seconds spent on inner steps that have ended.
        loss: of the last inner steps; None before.
        doing: what it does or waits for.
        waits: it is not training.
        messages, sent_bytes, slow_link_bytes: that have arrived here so far.
        snapshots: those of the marks reached so far.
    """

    time_s: float
    events: int
    quiet_s: float
    absorbed: int
    compute_s: float
    loss: float | None
    doing: str
    waits: bool
    messages: int
    sent_bytes: float
    slow_link_bytes: float
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Record:
    """What a host leaves: what happened at it, and its model's integer buffers when its last inner steps had ended."""

    recorder: Recorder
    local_updates: int
    integers: dict[str, Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """Inner steps have ended: the message for the actor, when they began and ended, and the progress that it gave them."""

    message: Message
    start_s: float
    end_s: float
    progress: int


@dataclass(frozen=True, eq=False, slots=True)
class Arrival:
    """An envelope has come at `time_s`."""

    envelope: Envelope
    time_s: float


class NoSteps:
    """Inner steps where nothing is trained."""

    def train(self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]) -> list[float]:
        for _ in range(steps):
            after_step()
        return []

    def differentiate(self, theta: Tensor, cursor: int) -> list[float]:
        return [0.0]

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        return []

    def integers(self) -> dict[str, Tensor]:
        return {}


InnerSteps = NoSteps | Solo | Stage | Leader
"""Who takes a worker's inner steps: nobody, this process alone, this process as one stage, or as the first of several."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def meet(meeting: Meeting, deadline_s: float) -> None:
    """Join the process group of a meeting."""
    if meeting.where.startswith("file:"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    timeout = timedelta(seconds=deadline_s)
    dist.init_process_group("gloo", init_method=meeting.where, rank=meeting.rank, world_size=meeting.size, timeout=timeout)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Host:
    """Runs one actor; it is the actor's `Context`.

    Args:
        setup: who it is and what it does.
        post: carries an envelope to a node; copies the vectors in it before it returns.
        keep: makes of a vector what a `Snapshot` holds, a copy or where a copy lies.

    Attributes:
        reached: set when the last mark has been reached.
    """

    def __init__(self, setup: Setup, post: Callable[[NodeId, Envelope], None], keep: Callable[[Vector], Any]) -> None:
        # The vectors that come are read-only, and nobody writes to a message's vectors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(1)
        self.actor: Actor = pickle.loads(setup.actor)
        self.setup, self.post, self.keep = setup, post, keep
        self.me = self.actor.me
        self.rng = np.random.default_rng((setup.run.seed, setup.seed_rank))
        self.inbox = Inbox(setup.epoch)
        self.sent: dict[NodeId, int] = {}
        self.chains: dict[Group, Chain] = {}
        self.mailbox: queue.SimpleQueue[Arrival | Answer | Message | BaseException | None] = queue.SimpleQueue()
        self.lock = threading.Lock()  # held while a message is handled
        self.recorder = Recorder()
        self.snapshots: list[Snapshot] = []
        self.reached = threading.Event()
        self.training_since_s: float | None = None
        self.events, self.last_event_s = 0, 0.0
        self.loss: float | None = None
        self.inner: InnerSteps = NoSteps()
        self.integers: dict[str, Tensor] = {}
        if setup.shard is not None:
            self.thread = ThreadPoolExecutor(1, "inner steps", initializer=torch.set_num_threads, initargs=(1,))
            if setup.trains and setup.pipeline is None and setup.processes == 1:
                self._train_with(Solo(Replica(make_task(setup.task), setup.run, device()), setup.shard))
        self.batch = 0  # number of the next one
        self.started_s = time.perf_counter()

    def meet(self, meeting: Meeting, tell: Callable[[str, tuple[int, ...]], None]) -> None:
        """Find those with whom this worker takes its inner steps: other stages, or the other processes of its replica.

        `tell` has those processes follow; see `sharded.Leader`.
        """
        meet(meeting, self.setup.deadline_s)
        setup, task = self.setup, make_task(self.setup.task)
        assert setup.shard is not None
        if setup.pipeline:
            self._train_with(Stage(task, setup.run, device(), setup.pipeline, setup.rank, setup.shards, setup.deadline_s))
        else:
            self._train_with(Leader(ShardedReplica(task, setup.run, device(), setup.shard), tell))

    def _train_with(self, inner: InnerSteps) -> None:
        self.inner, self.integers = inner, inner.integers()

    # What others ask of a host, from other threads

    def run(self) -> Record:
        """Start the actor and handle what comes until `stop`; what happened.

        Raises:
            Diverged: a loss is not finite.
            TrainingError: the user's task failed, or the method did.
        """
        self.started_s = time.perf_counter()
        with self.lock:
            self._keep_at_marks()
        item: Arrival | Answer | Message | BaseException | None = Start()
        while item is not None:
            if isinstance(item, BaseException):
                raise item
            with self.lock:
                try:
                    self._take_in(item)
                except (UserError, TrainingError):
                    raise
                except Exception as error:
                    raise TrainingError(f"{self.me} failed at {place_of(error)}: {type(error).__name__}: {error}") from error
            del item  # so that the memory of its vectors is free for the next ones
            item = self.mailbox.get()
        if self.setup.shard is not None:
            self.thread.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            return Record(self.recorder, self.actor.local_updates, self.integers)

    def deliver(self, envelope: Envelope) -> None:
        """Mail has come."""
        self.mailbox.put(Arrival(envelope, self.now))

    def stop(self) -> None:
        """Handle nothing more."""
        self.mailbox.put(None)

    def status(self, evaluated: int = 0) -> Status:
        """How things stand, between two handlers. The first `evaluated` snapshots are needed no more."""
        with self.lock:
            self.snapshots[:evaluated] = [replace(snapshot, model=None) for snapshot in self.snapshots[:evaluated]]
            recorder = self.recorder
            return Status(
                self.now,
                self.events,
                self.now - self.last_event_s,
                self.actor.absorbed,
                sum(recorder.compute_s.values()),
                self.loss,
                self._doing(),
                self.training_since_s is None,
                recorder.messages,
                recorder.sent_bytes,
                recorder.slow_link_bytes,
                tuple(self.snapshots),
            )

    def snapshot(self) -> Snapshot:
        """The part of the model to take home as it is now, between two handlers."""
        with self.lock:
            return self._snapshot()

    # The actor's verbs: `actor.Context`

    @property
    def now(self) -> float:
        return time.perf_counter() - self.started_s

    def send(self, to: NodeId, message: Message) -> None:
        number = self.sent.get(to, 0)
        self.sent[to] = number + 1
        self.post(to, Envelope(self.me, self.setup.epoch, number, self.now, type(message), contents(message)))

    def after(self, seconds: float, message: Message) -> None:
        timer = threading.Timer(seconds, self.mailbox.put, (message,))
        timer.daemon = True
        timer.start()

    def train(self, theta: Vector, steps: int, progress: int) -> None:
        theta, batch = theta.clone(), self.batch
        self.batch += steps

        def job(after_step: Callable[[], None]) -> Message:
            return Trained(theta, steps, tuple(self.inner.train(theta, steps, progress, batch, after_step)))

        self._compute(job, progress)

    def gradient(self, theta: Vector, progress: int) -> None:
        theta, batch, inner = theta.clone(), self.batch, self.inner
        self.batch += 1
        if isinstance(inner, Stage):
            raise UserError("pipeline: this method asks for single gradients, which a model in stages does not give")

        def job(after_step: Callable[[], None]) -> Message:
            [loss] = inner.differentiate(theta, batch)
            after_step()
            return Gradient(theta, loss)

        self._compute(job, progress)

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        theta, gradient, inner = theta.clone(), gradient.clone(), self.inner
        assert not isinstance(inner, Stage)  # which gave no gradient

        def job(after_step: Callable[[], None]) -> Message:
            inner.apply(theta, gradient, progress)
            return Trained(theta, 1, ())

        self._compute(job, progress)

    def all_reduce(self, group: Group, vector: Vector, round: int = 0) -> None:
        chain = self.chains.setdefault(group, Chain())
        chain.mine, chain.since_s, chain.round = torch.split(vector, CHUNK), self.now, round
        if self.me == group[0]:
            for chunk, mine in enumerate(chain.mine):
                self._pass_up(group, chunk, mine)
        for early in chain.early:
            self._pass_up(group, early.chunk, early.total + chain.mine[early.chunk])

    # One event

    def _take_in(self, item: Arrival | Answer | Message) -> None:
        match item:
            case Arrival(envelope=envelope, time_s=time_s):
                for ready in self.inbox.accept(envelope):
                    self._open(ready, time_s)
            case Answer():
                self._note(item)
                self._handle(item.message, self.me)
            case _:
                self._handle(item, self.me)

    def _open(self, envelope: Envelope, time_s: float) -> None:
        sender, size_bytes, message = envelope.sender, envelope.size_bytes, envelope.open()
        slow = sender.region != self.me.region
        match message:
            case Sum() | Mean():
                self.recorder.counts(1, size_bytes, size_bytes if slow else 0)
                self._happened()
                self._reduce(message)
            case _:
                # The two clocks started at one message's distance from each other.
                self.recorder.sends(sender, min(envelope.sent_s, time_s), time_s, size_bytes, slow=slow)
                self._handle(message, sender)

    def _handle(self, message: Message, sender: NodeId) -> None:
        self._happened()
        self.actor.upon(message, sender, self)
        self._keep_at_marks()

    def _happened(self) -> None:
        self.events += 1
        self.last_event_s = self.now

    def _keep_at_marks(self) -> None:
        marks, reached = self.setup.marks, len(self.snapshots)
        if reached < len(marks) and self.actor.absorbed >= marks[reached]:
            snapshot = self._snapshot()
            while len(self.snapshots) < len(marks) and self.actor.absorbed >= marks[len(self.snapshots)]:
                self.snapshots.append(snapshot)
            if len(self.snapshots) == len(marks):
                self.reached.set()

    def _snapshot(self) -> Snapshot:
        model = self.actor.model()
        return Snapshot(self.now, self.actor.absorbed, self.actor.outer_steps, None if model is None else self.keep(model))

    def _doing(self) -> str:
        if self.training_since_s is not None:
            return f"trains since {self.now - self.training_since_s:.1f} s"
        for group, chain in self.chains.items():
            if chain.mine:
                step = 1 if chain.passed == len(chain.mine) else -1
                return f"waits in an all-reduce of {len(group)} for {group[group.index(self.me) + step]}"
        return f"waits for {self.actor.waits_for()}"

    # Inner steps

    def _compute(self, job: Callable[[Callable[[], None]], Message], progress: int) -> None:
        if self.setup.shard is None:
            raise TrainingError(f"{self.me} asked to train and is no worker of the topology")
        if self.training_since_s is not None:
            raise TrainingError(f"{self.me} asked to train while it is training: a method's worker has one job at a time")
        self.training_since_s = self.now
        self.thread.submit(self._work, job, progress)

    def _work(self, job: Callable[[Callable[[], None]], Message], progress: int) -> None:
        """In the thread of the inner steps: do the job, keep the pace, answer."""
        start_s, due_s = self.now, self.now

        def after_step() -> None:
            nonlocal due_s
            due_s += self.setup.step_time_s
            if (ahead_s := due_s - self.now) > 0:
                time.sleep(ahead_s)
            self._happened()

        try:
            message = job(after_step)
        except NonFiniteLoss as error:
            self.mailbox.put(Diverged(f"worker {self.me}: {error}, after {self.now:.1f} s; try a lower learning rate"))
        except (UserError, TrainingError) as error:
            self.mailbox.put(error)
        except Exception as error:
            self.mailbox.put(
                TrainingError(f"worker {self.me}: the task failed at {place_of(error)}: {type(error).__name__}: {error}")
            )
        else:
            self.mailbox.put(Answer(message, start_s, self.now, progress))

    def _note(self, answer: Answer) -> None:
        """Put down what the inner steps were, and what the replica's integer buffers are after them."""
        self.training_since_s = None
        self.recorder.computes(self.me, answer.start_s, answer.end_s)
        match answer.message:
            case Trained(losses=losses, steps=steps) if losses:
                self._note_loss(answer, steps, sum(losses) / len(losses))
            case Gradient(loss=loss) if self.setup.trains:
                self._note_loss(answer, 1, loss)
        self.integers = self.inner.integers()
        if isinstance(self.inner, Stage):
            self.recorder.counts(*self.inner.take_counts())

    def _note_loss(self, answer: Answer, steps: int, loss: float) -> None:
        self.loss = loss
        self.recorder.trainings.append(Training(answer.end_s, self.me, steps, loss, answer.progress))

    # The chain of an all-reduce

    def _reduce(self, message: Sum | Mean) -> None:
        match message:
            case Sum(group=group, chunk=chunk, total=total):
                chain = self.chains.setdefault(group, Chain())
                if chain.mine:
                    self._pass_up(group, chunk, total + chain.mine[chunk])
                else:
                    chain.early.append(message)
            case Mean(group=group, chunk=chunk, mean=mean):
                self._pass_down(group, chunk, mean)

    def _pass_up(self, group: Group, chunk: int, total: Tensor) -> None:
        place = group.index(self.me)
        self.chains[group].passed += 1
        if place + 1 < len(group):
            self.send(group[place + 1], Sum(group, chunk, total))
        else:
            self._pass_down(group, chunk, total / len(group))

    def _pass_down(self, group: Group, chunk: int, mean: Tensor) -> None:
        place, chain = group.index(self.me), self.chains[group]
        if place:
            self.send(group[place - 1], Mean(group, chunk, mean))
        chain.means[chunk] = mean
        if len(chain.means) == len(chain.mine):
            del self.chains[group]
            self.recorder.reduces((self.me,), chain.since_s, self.now)
            self.mailbox.put(Reduced(torch.cat([chain.means[i] for i in range(len(chain.mine))]), group, chain.round))
