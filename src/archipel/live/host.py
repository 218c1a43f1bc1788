"""One actor under the real clock: its mailbox, its verbs, and its inner steps in a thread beside
the handlers.

What belongs here: all that one node of a live run does. What does not: who carries its mail and who
watches over it (`ray_host.py`, `watch.py`; nothing here knows Ray), what a method does, how an
inner step is taken (`replica.py`).

A host handles one message at a time, in the order of arrival; `mail.Inbox` sees to that order,
whatever carries them. Inner steps run in a thread of their own, so that a server's answer or a
peer's vector is taken in while a worker trains.

Nothing ends on its own: a host serves its peers until it is told to stop. What it would take home
is kept at its *marks*, counts of trained inner steps that it is told beforehand, in the very
handler that reaches them.

A host saves its own part of the run: its actor, its place in the data, and its inner optimizer as
the last inner steps left it. A host that is started again goes on from there: its actor is told
that it has `Joined`, and what was under way is lost.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from archipel import checkpoint
from archipel.actor import (
    Actor,
    Gradient,
    Group,
    Joined,
    Lost,
    Message,
    NodeId,
    Reduced,
    Refused,
    Start,
    Trained,
    Update,
    Vector,
)
from archipel.checkpoint import Surroundings
from archipel.errors import Diverged, TrainingError, UserError
from archipel.live.all_reduce import AllReduceMessage, AllReduces
from archipel.live.mail import Envelope, Inbox, contents
from archipel.pyfile import place_of
from archipel.run import wire
from archipel.run.metrics import Recorder, Training
from archipel.run.screening import Screen, ScreeningConfig
from archipel.train.data import Shard
from archipel.train.inner_steps import InnerSteps, NoSteps, Solo
from archipel.train.pipeline import Pipeline
from archipel.train.replica import NonFiniteLoss, Replica, Run
from archipel.train.sharded import Leader, ShardedReplica
from archipel.train.stage import Stage
from archipel.train.task import NoTask, TaskConfig, make_task

# What a host is told and what it tells


@dataclass(frozen=True)
class Saves:
    """Where a host saves its part, and the text of its run's recipe, by which saves of other runs
    are told from it.
    """

    folder: Path
    recipe: str


class NotFinite(Diverged):
    """A worker's loss is not a finite number; `batch` is the number of the first one behind those
    of its inner steps.
    """

    def __init__(self, text: str, batch: int) -> None:
        super().__init__(text, batch)  # so that it can be pickled
        self.text, self.batch = text, batch

    def __str__(self) -> str:
        return self.text


Beginning = Literal["start", "restart", "reset", "resume"]
"""How a host begins: with the run; again, from its last save if there is one; the same, with a new
inner optimizer; with a whole run that goes on, in which a server must have a save.
"""


@dataclass(frozen=True)
class Setup:
    """What a host is told when it is made.

    Attributes:
        actor: pickled, for its class may lie in a file of the user's that the host has to import
            first.
        seed_rank: of the actor among all actors; with the run's seed it seeds `Context.rng`.
        task, run: what is trained, by those who train.
        shard: this worker's data; None: this actor is no worker.
        marks: counts of trained inner steps at which the model is kept, rising; () where there is
            no model.
        step_time_s: the least time of an inner step, to act out a slower machine; 0: as fast as it
            goes.
        epoch: of this run, on all its mail.
        rank: among the workers.
        pipeline, shards: how workers share the replicas' stages, and the data of all replicas;
            None: each has a whole one.
        processes: that share this worker's replica.
        deadline_s: longest wait for those with whom inner steps are taken.
        parameters: leading entries of this node's vectors that are parameters.
        screening: which updates it does without; None: none.
        saves: None: it saves nothing.
        begins: see `Beginning`.
        batch: number of the first batch to draw, at least; behind those whose loss was not finite.
        life: how often this node has been started before.
        lives: of those others who have been started again.
        gone: who is lost now.
        losses: how often anybody has been lost so far.
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
    parameters: int = 0
    screening: ScreeningConfig | None = None
    saves: Saves | None = None
    begins: Beginning = "start"
    batch: int = 0
    life: int = 0
    lives: Mapping[NodeId, int] = field(default_factory=dict)
    gone: Group = ()
    losses: int = 0

    @property
    def trains(self) -> bool:
        """This is a worker, and there is something to train."""
        return self.shard is not None and not isinstance(self.task, NoTask)


@dataclass(frozen=True)
class Meeting:
    """Where the processes that take inner steps together find each other: a process group of
    torch.distributed (gloo).

    Attributes:
        where: `file://…` for processes on one machine, which then open no port to others; else
            `tcp://…`, of rank 0.
        rank, size: of this process, and how many there are.
    """

    where: str
    rank: int
    size: int


@dataclass(frozen=True)
class Snapshot:
    """A part of the model to take home, kept in the handler that reached a mark. `model`: whatever
    `keep` made of the vector.
    """

    time_s: float
    trained: int
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
        trained: see `actor.Actor`.
        compute_s: seconds spent on inner steps that have ended.
        loss: of the last inner steps; None before.
        doing: what it does or waits for.
        waits: it is not training.
        holds: it holds a part of the model to take home.
        refused: updates that it has done without, by sender.
        messages, sent_bytes, slow_link_bytes: that have arrived here so far.
        snapshots: those of the marks reached so far.
    """

    time_s: float
    events: int
    quiet_s: float
    trained: int
    compute_s: float
    loss: float | None
    doing: str
    waits: bool
    holds: bool
    refused: dict[NodeId, int]
    messages: int
    sent_bytes: float
    slow_link_bytes: float
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Record:
    """What a host leaves: what happened at it, and its model's integer buffers when its last inner
    steps had ended.
    """

    recorder: Recorder
    local_updates: int
    integers: dict[str, Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """Inner steps have ended: the message for the actor, when they began and ended, and the
    progress that it gave them.
    """

    message: Message
    start_s: float
    end_s: float
    progress: int


@dataclass(frozen=True, eq=False, slots=True)
class Arrival:
    """An envelope has come at `time_s`."""

    envelope: Envelope
    time_s: float


@dataclass(frozen=True)
class News:
    """From who watches over all hosts: `node` is lost, or, with its new `life`, there again."""

    node: NodeId
    life: int | None = None


Item = Arrival | Answer | News | Message
"""What a host takes in, one at a time."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def meet(meeting: Meeting, deadline_s: float) -> None:
    """Join the process group of a meeting."""
    if meeting.where.startswith("file:"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    timeout = timedelta(seconds=deadline_s)
    dist.init_process_group(
        "gloo",
        init_method=meeting.where,
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timeout,
    )


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

    def __init__(
        self, setup: Setup, post: Callable[[NodeId, Envelope], None], keep: Callable[[Vector], Any]
    ) -> None:
        # The vectors that come are read-only, and nobody writes to a message's vectors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.set_num_threads(1)
        self.actor: Actor = pickle.loads(setup.actor)
        self.setup, self.post, self.keep = setup, post, keep
        self.me = self.actor.me
        self.rng = np.random.default_rng((setup.run.seed, setup.seed_rank))
        self.inbox = Inbox(setup.epoch, setup.life, dict(setup.lives), set(setup.gone))
        self.sent: dict[NodeId, int] = {}
        self.reduces = AllReduces(self.me, self.send, self._reduced, setup.losses, set(setup.gone))
        self.mailbox: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self.lock = threading.Lock()  # held while a message is handled
        self.recorder = Recorder()
        self.screen = Screen(setup.screening) if setup.screening else None
        self.save_due = False
        self.saved = threading.Event()
        self.snapshots: list[Snapshot] = []
        self.reached = threading.Event()
        self.training_since_s: float | None = None
        self.events, self.last_event_s = 0, 0.0
        self.loss: float | None = None
        self.inner: InnerSteps = NoSteps()
        self.integers: dict[str, Tensor] = {}
        if setup.shard is not None:
            self.thread = ThreadPoolExecutor(
                1, "inner steps", initializer=torch.set_num_threads, initargs=(1,)
            )
            if setup.trains and setup.pipeline is None and setup.processes == 1:
                self._train_with(
                    Solo(Replica(make_task(setup.task), setup.run, device()), setup.shard)
                )
        self.batch = 0  # number of the next one
        self.started_s = time.perf_counter()

    def meet(self, meeting: Meeting, tell: Callable[[str, tuple[int, ...]], None]) -> None:
        """Find those with whom this worker takes its inner steps: other stages, or the other
        processes of its replica.

        `tell` has those processes follow; see `sharded.Leader`.
        """
        meet(meeting, self.setup.deadline_s)
        setup, task = self.setup, make_task(self.setup.task)
        assert setup.shard is not None
        if setup.pipeline:
            self._train_with(
                Stage(
                    task,
                    setup.run,
                    device(),
                    setup.pipeline,
                    setup.rank,
                    setup.shards,
                    setup.deadline_s,
                )
            )
        else:
            self._train_with(Leader(ShardedReplica(task, setup.run, device(), setup.shard), tell))

    def _train_with(self, inner: InnerSteps) -> None:
        self.inner, self.integers = inner, inner.integers()

    # What others ask of a host, from other threads

    def run(self, clock_s: float = 0.0) -> Record:
        """Start the actor when the run's clock is at `clock_s`, and handle what comes until `stop`;
        what happened.

        Raises:
            Diverged: a loss is not finite.
            TrainingError: the user's task failed, or the method did; or a save cannot be written.
        """
        self.begin(clock_s)
        while (item := self.mailbox.get()) is not None:
            self.handle(item)
            del item  # so that the memory of its vectors is free for the next ones
        if self.setup.shard is not None:
            self.thread.shutdown(wait=False, cancel_futures=True)
        with self.lock:
            return Record(self.recorder, self.actor.local_updates, self.integers)

    def begin(self, clock_s: float = 0.0) -> None:
        """Start the actor, or tell it that it is there again and who is not."""
        self.started_s = time.perf_counter() - clock_s
        with self.lock:
            self._keep_at_marks()
        if self.setup.begins == "start":
            self.handle(Start())
        else:
            self.handle(Joined(self.me))
            peers = set(self.actor.peers())
            for node in self.setup.gone:
                if node in peers:
                    self.handle(Lost(node))

    def handle(self, item: Item | BaseException) -> None:
        """Take in one of the things that have come."""
        if isinstance(item, BaseException):
            raise item
        with self.lock:
            try:
                self._take_in(item)
            except (UserError, TrainingError):
                raise
            except Exception as error:
                raise TrainingError(
                    f"{self.me} failed at {place_of(error)}: {type(error).__name__}: {error}"
                ) from error

    def deliver(self, envelope: Envelope) -> None:
        """Mail has come."""
        self.mailbox.put(Arrival(envelope, self.now))

    def tell(self, news: News) -> None:
        """Somebody is lost, or there again."""
        self.mailbox.put(news)

    def stop(self) -> None:
        """Handle nothing more."""
        self.mailbox.put(None)

    def save(self) -> None:
        """Save my part now, or, while inner steps are taken, when they have ended. Returns when
        that is done.
        """
        with self.lock:
            if self.training_since_s is None:
                self._save()
                return
            self.save_due = True
            self.saved.clear()
        self.saved.wait()

    def status(self, evaluated: int = 0) -> Status:
        """How things stand, between two handlers. The first `evaluated` snapshots are needed no
        more.
        """
        with self.lock:
            self.snapshots[:evaluated] = [
                replace(snapshot, model=None) for snapshot in self.snapshots[:evaluated]
            ]
            recorder = self.recorder
            return Status(
                self.now,
                self.events,
                self.now - self.last_event_s,
                self.actor.trained,
                sum(recorder.compute_s.values()),
                self.loss,
                self._doing(),
                self.training_since_s is None,
                self.actor.model() is not None,
                dict(recorder.refused),
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
        if to in self.inbox.gone:
            return
        number = self.sent.get(to, 0)
        self.sent[to] = number + 1
        lives = self.setup.life, self.inbox.lives.get(to, 0)
        self.post(
            to,
            Envelope(
                self.me, self.setup.epoch, lives, number, self.now, type(message), contents(message)
            ),
        )

    def after(self, seconds: float, message: Message) -> None:
        if not seconds:
            self.mailbox.put(message)
            return
        timer = threading.Timer(seconds, self.mailbox.put, (message,))
        timer.daemon = True
        timer.start()

    def train(self, theta: Vector, steps: int, progress: int) -> None:
        theta, batch = theta.clone(), self.batch
        self.batch += steps

        def job(after_step: Callable[[], None]) -> Message:
            return Trained(
                theta, steps, tuple(self.inner.train(theta, steps, progress, batch, after_step))
            )

        self._compute(job, progress)

    def gradient(self, theta: Vector, progress: int) -> None:
        theta, batch = theta.clone(), self.batch
        self.batch += 1

        def job(after_step: Callable[[], None]) -> Message:
            [loss] = self.inner.gradient(theta, batch)
            after_step()
            return Gradient(theta, loss)

        self._compute(job, progress)

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        theta, gradient = theta.clone(), gradient.clone()

        def job(after_step: Callable[[], None]) -> Message:
            self.inner.apply(theta, gradient, progress)
            return Trained(theta, 1, ())

        self._compute(job, progress)

    def all_reduce(
        self, group: Group, vector: Vector, round: int = 0, share: float | None = None
    ) -> None:
        # In a collective nobody sees what another one gives, so each judges its own.
        self.reduces.call(group, vector, round, self.now, refused=self._refuses(self.me, [vector]))

    # One event

    def _take_in(self, item: Item) -> None:
        match item:
            case Arrival(envelope=envelope, time_s=time_s):
                for ready in self.inbox.accept(envelope):
                    self._open(ready, time_s)
            case Answer():
                self._note(item)
                if self.save_due:  # before the actor asks for more
                    self._save()
                self._handle(item.message, self.me)
            case News():
                self._hear(item)
            case _:
                self._handle(item, self.me)

    def _hear(self, news: News) -> None:
        node, known = news.node, news.node in self.actor.peers()
        if news.life is None:
            self.inbox.lost(node)
            self.reduces.lost(node)
            if known:
                self._handle(Lost(node), self.me)
            return
        early = self.inbox.joined(node, news.life)
        self.sent.pop(node, None)
        self.reduces.joined(node)
        if known:
            self._handle(Joined(node), self.me)
        for envelope in early:
            self._open(envelope, self.now)

    def _open(self, envelope: Envelope, time_s: float) -> None:
        sender, size_bytes, message = envelope.sender, envelope.size_bytes, envelope.open()
        slow = sender.region != self.me.region
        if isinstance(message, AllReduceMessage):
            self.recorder.counts(1, size_bytes, size_bytes if slow else 0)
            self._happened()
            self.reduces.receive(message, sender)
        else:
            # The two clocks started at one message's distance from each other.
            self.recorder.sends(sender, min(envelope.sent_s, time_s), time_s, size_bytes, slow=slow)
            self._handle(message, sender)

    def _handle(self, message: Message, sender: NodeId) -> None:
        self._happened()
        if isinstance(message, Update) and self._refuses(sender, wire.vectors(message)):
            message = Refused(message)
        self.actor.upon(message, sender, self)
        self._keep_at_marks()

    def _refuses(self, sender: NodeId, vectors: Sequence[Vector]) -> bool:
        """Whether to do without an update; the sender is counted."""
        why = self.screen.refuses(vectors, self.setup.parameters) if self.screen else None
        if why is not None:
            self.recorder.refuses(sender, why, self.now)
        return why is not None

    def _happened(self) -> None:
        self.events += 1
        self.last_event_s = self.now

    def _keep_at_marks(self) -> None:
        marks, reached = self.setup.marks, len(self.snapshots)
        if reached < len(marks) and self.actor.trained >= marks[reached]:
            snapshot = self._snapshot()
            while (
                len(self.snapshots) < len(marks)
                and self.actor.trained >= marks[len(self.snapshots)]
            ):
                self.snapshots.append(snapshot)
            if len(self.snapshots) == len(marks):
                self.reached.set()

    def _snapshot(self) -> Snapshot:
        model = self.actor.model()
        return Snapshot(
            self.now,
            self.actor.trained,
            self.actor.absorbed,
            self.actor.outer_steps,
            None if model is None else self.keep(model),
        )

    def _doing(self) -> str:
        if self.training_since_s is not None:
            return f"trains since {self.now - self.training_since_s:.1f} s"
        if waits := self.reduces.waits_for():
            return waits
        return f"waits for {self.actor.waits_for()}"

    # Inner steps

    def _compute(self, job: Callable[[Callable[[], None]], Message], progress: int) -> None:
        if self.setup.shard is None:
            raise TrainingError(f"{self.me} asked to train and is no worker of the topology")
        if self.training_since_s is not None:
            raise TrainingError(
                f"{self.me} asked to train while it is training: a method's worker has one job at "
                "a time"
            )
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
            self.mailbox.put(
                NotFinite(f"worker {self.me}: {error}, after {self.now:.1f} s", self.batch)
            )
        except (UserError, TrainingError) as error:
            self.mailbox.put(error)
        except Exception as error:
            self.mailbox.put(
                TrainingError(
                    f"worker {self.me}: the task failed at {place_of(error)}: "
                    f"{type(error).__name__}: {error}"
                )
            )
        else:
            self.mailbox.put(Answer(message, start_s, self.now, progress))

    def _note(self, answer: Answer) -> None:
        """Put down what the inner steps were, and what the replica's integer buffers are after
        them.
        """
        self.training_since_s = None
        self.recorder.computes(self.me, answer.start_s, answer.end_s)
        match answer.message:
            case Trained(losses=losses, steps=steps) if losses:
                self._note_loss(answer, steps, sum(losses) / len(losses))
            case Gradient(loss=loss) if self.setup.trains:
                self._note_loss(answer, 1, loss)
        self.integers = self.inner.integers()
        self.recorder.counts(*self.inner.take_counts())

    def _note_loss(self, answer: Answer, steps: int, loss: float) -> None:
        self.loss = loss
        self.recorder.trainings.append(
            Training(answer.end_s, self.me, steps, loss, answer.progress)
        )

    def _reduced(self, reduced: Reduced, since_s: float) -> None:
        self.recorder.reduces((self.me,), since_s, self.now)
        self.mailbox.put(reduced)

    # My part of the run, on disk

    def _save(self) -> None:
        saves = self.setup.saves
        assert saves is not None
        state = {
            "actor": self.actor,
            "rng": self.rng,
            "batch": self.batch,
            "inner": list(self.inner.state),
            "screen": self.screen,
            "recorder": self.recorder,
            "events": self.events,
        }
        checkpoint.save(saves.folder, self.events, state, self._surroundings(), saves.recipe)
        self.save_due = False
        self.saved.set()

    def load(self) -> list[str]:
        """Go on from the last save, unless it is the run that begins; what the user should know of
        that.

        Raises:
            UserError: there is none that is sound.
        """
        setup, saves = self.setup, self.setup.saves
        self.batch = setup.batch
        if setup.begins == "start" or saves is None:
            return []
        if not checkpoint.checkpoints(saves.folder) and (
            setup.begins != "resume" or setup.shard is not None
        ):
            return [f"{self.me} has no save to go on from, and begins anew"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = checkpoint.load(saves.folder, self._surroundings(), saves.recipe)
        self.actor, self.rng, self.batch = (
            state["actor"],
            state["rng"],
            max(state["batch"], setup.batch),
        )
        self.screen, self.recorder, self.events = (
            state["screen"],
            state["recorder"],
            state["events"],
        )
        if setup.begins != "reset":
            for mine, saved in zip(self.inner.state, state["inner"], strict=True):
                mine.copy_(saved)
            self.integers = self.inner.integers()
        return [str(warning.message) for warning in caught]

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            {"on_progress": self.recorder.on_progress}, [sys.modules[type(self.actor).__module__]]
        )
