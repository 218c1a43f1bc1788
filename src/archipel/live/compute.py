"""The thread in which a host computes: inner steps, and the losses of its part of the model at
marks.

What belongs here: jobs for that thread, their pace, and their results. What does not: who asks for
a job and is told of its end (`host.py`), how an inner step is taken (`train/`).

There is one thread, not one for steps and one for evaluations, for two reasons: a worker evaluates
with the replica that it trains with, and both draw from the random numbers of their process, which
must not depend on which of two threads was faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from archipel.actor import Gradient, Message, NodeId, Trained, Vector
from archipel.errors import TrainingError, UserError
from archipel.live.marks import Copy, Marks
from archipel.live.meeting import Meeting, meet
from archipel.live.protocol import HostSetup
from archipel.pyfile import place_of
from archipel.train.inner_steps import InnerSteps, NoSteps, Solo
from archipel.train.replica import NonFiniteLoss, Replica
from archipel.train.sharded import Leader, ShardedReplica
from archipel.train.stage import Stage
from archipel.train.task import make_task


@dataclass(frozen=True, eq=False, slots=True)
class JobEnded:
    """Inner steps have ended.

    Attributes:
        message: for the actor.
        start_s, end_s: when they began and ended, on the host's clock.
        progress: what the actor gave as the common progress.
    """

    message: Message
    start_s: float
    end_s: float
    progress: int


@dataclass(frozen=True, eq=False, slots=True)
class JobFailed:
    """Inner steps have ended with a loss that is not finite; `text` says which."""

    text: str


JobOutcome = JobEnded | JobFailed | UserError | TrainingError
"""What comes of a job: a result, or an error that ends the run."""

AfterStep = Callable[[], None]
Job = Callable[[AfterStep], Message]


class Stopped(Exception):
    """The host was stopped in the middle of its inner steps."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Compute:
    """A host's thread for inner steps and evaluations.

    Args:
        me: the host's node.
        setup: what it trains.
        marks: told of each loss that has been computed.
        tell: gets the result of each job.
        now: the host's clock.

    Attributes:
        inner: takes the inner steps.
        integers: integer buffers of the model after the last inner steps that have ended, by name.
        batch: number of the next batch.
        ticks: inner steps taken so far.
        last_tick_s: when the last of them ended.
        training_since_s: when the job under way began; None: there is none.
        stopped: inner steps under way are to be given up.
    """

    def __init__(
        self,
        me: NodeId,
        setup: HostSetup,
        marks: Marks,
        tell: Callable[[JobOutcome], None],
        now: Callable[[], float],
    ) -> None:
        self.me, self.setup, self.marks = me, setup, marks
        self.tell, self.now = tell, now
        self.inner: InnerSteps = NoSteps()
        self.integers: dict[str, Tensor] = {}
        self.batch = 0
        self.ticks = 0
        self.last_tick_s = 0.0
        self.training_since_s: float | None = None
        self.stopped = False
        self.replica: Replica | None = None  # for evaluations
        self.thread = ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(1,)
        )
        if setup.trains and setup.pipeline is None and setup.processes == 1:
            assert setup.shard is not None
            self.replica = self._make_replica()
            self._train_with(Solo(self.replica, setup.shard))

    def meet(self, meeting: Meeting, tell: Callable[[str, tuple[int, ...]], None]) -> None:
        """Find those with whom this worker takes its inner steps: other stages, or the other
        processes of its replica. `tell` has those processes follow; see `sharded.Leader`.
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

    def _make_replica(self) -> Replica:
        return Replica(make_task(self.setup.task), self.setup.run, device())

    # Inner steps: what the actor's verbs ask for

    def train(self, theta: Vector, steps: int, progress: int) -> None:
        theta, batch = theta.clone(), self.batch

        def job(after_step: AfterStep) -> Message:
            losses = self.inner.train(theta, steps, progress, batch, after_step)
            return Trained(theta, steps, tuple(losses))

        self._begin(job, progress)
        self.batch += steps

    def gradient(self, theta: Vector, progress: int) -> None:
        theta, batch = theta.clone(), self.batch

        def job(after_step: AfterStep) -> Message:
            [loss] = self.inner.gradient(theta, batch)
            after_step()
            return Gradient(theta, loss)

        self._begin(job, progress)
        self.batch += 1

    def apply(self, theta: Vector, gradient: Vector, progress: int) -> None:
        theta, gradient = theta.clone(), gradient.clone()

        def job(after_step: AfterStep) -> Message:
            self.inner.apply(theta, gradient, progress)
            return Trained(theta, 1, ())

        self._begin(job, progress)

    def end_job(self) -> None:
        """The host has been told how its job ended, and may begin another one."""
        self.training_since_s = None
        self.integers = self.inner.integers()

    def reset_optimizer(self) -> None:
        """The inner optimizer begins anew: what it keeps may not be finite."""
        self.inner.reset_optimizer()

    @property
    def state(self) -> list[Tensor]:
        """What the worker keeps between its inner steps, and is saved."""
        return list(self.inner.state)

    def load(self, batch: int, state: list[Tensor]) -> None:
        """Go on from a save: the number of the next batch, and what the inner optimizer kept."""
        self.batch = batch
        for mine, saved in zip(self.state, state, strict=True):
            mine.copy_(saved)
        self.integers = self.inner.integers()

    def _begin(self, job: Job, progress: int) -> None:
        if self.setup.shard is None:
            raise TrainingError(f"{self.me} asked to train and is no worker of the topology")
        self.training_since_s = self.now()
        self.thread.submit(self._work, job, progress)

    def _work(self, job: Job, progress: int) -> None:
        """In the thread: do the job, keep the pace, tell what came of it."""
        start_s, due_s = self.now(), self.now()

        def after_step() -> None:
            nonlocal due_s
            due_s += self.setup.step_time_s
            if (ahead_s := due_s - self.now()) > 0:
                time.sleep(ahead_s)
            self.ticks += 1
            self.last_tick_s = self.now()
            if self.stopped:
                raise Stopped

        try:
            message = job(after_step)
        except Stopped:
            return
        except NonFiniteLoss as error:
            self.tell(JobFailed(f"worker {self.me}: {error}"))
        except (UserError, TrainingError) as error:
            self.tell(error)
        except Exception as error:
            self.tell(TrainingError(f"worker {self.me}: {self._failure(error)}"))
        else:
            self.tell(JobEnded(message, start_s, self.now(), progress))

    def _failure(self, error: Exception) -> str:
        return f"the task failed at {place_of(error)}: {type(error).__name__}: {error}"

    # Evaluations

    def evaluate(self, copy: Copy, integers: Mapping[str, Tensor]) -> None:
        """Compute the loss of the model at a mark, behind the job under way. A stage has none
        alone.

        `integers`: the model's integer buffers at the mark, by name; empty where none are known.
        """
        if not self.setup.learns or self.setup.pipeline is not None:
            self.marks.evaluated(copy, None)
            return
        self.thread.submit(self._evaluate, copy, integers)

    def _evaluate(self, copy: Copy, integers: Mapping[str, Tensor]) -> None:
        try:
            if self.replica is None:
                self.replica = self._make_replica()
            names = self.replica.layout.integers if integers else ()
            [loss] = self.replica.evaluate(copy.vector, [integers[name] for name in names] or None)
        except (UserError, TrainingError) as error:
            self.marks.evaluated(copy, None, str(error))
        except Exception as error:
            self.marks.evaluated(copy, None, f"{self.me}: {self._failure(error)}")
        else:
            self.marks.evaluated(copy, loss)
