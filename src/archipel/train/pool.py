"""Runs the inner steps of many workers on this machine's cores or GPUs.

What belongs here: processes, the memory that they share, and which job runs next. What does not:
what a job computes (`replica.py`), or when its result is due on anybody's clock (the engines).

On a CPU each process computes with one thread: on the machines measured, two such processes beat
one process of two threads by 1.15 to 1.4 times. With GPUs there is one process for each. Weights
and the workers' states lie in memory that all processes share; only small tuples go through pipes.
Any process can take any worker's next job, so no core waits for a particular one.

Results do not depend on the number of processes: a job is a function of its worker's state, its
vector and its arguments.
"""

from __future__ import annotations

import heapq
import math
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Protocol

import torch
from torch import Tensor

import archipel
from archipel.actor import Gradient, NodeId, Trained, Vector
from archipel.errors import Diverged, TrainingError, UserError
from archipel.train.data import Shard, shards_of
from archipel.train.pipeline import Pipeline, Stages, check_micro_batches, cut
from archipel.train.replica import NonFiniteLoss, Replica, Run, TensorSpec
from archipel.train.task import TaskConfig, make_task
from archipel.vector import largest

ALIGNMENT_BYTES = 64


class Promise(Protocol):
    """A result that is being computed."""

    def result(self) -> Any:
        """Wait for it."""


@dataclass(frozen=True)
class Done:
    """A result that is there already."""

    value: Any

    def result(self) -> Any:
        return self.value


class Trainer(Protocol):
    """What an engine needs to have inner steps taken. `due_s` is when the engine will want the
    result, on its own clock.
    """

    def train(
        self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float
    ) -> Promise: ...

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise: ...

    def apply(
        self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float
    ) -> Promise: ...

    def train_stages(
        self,
        team: Sequence[int],
        thetas: Sequence[Vector],
        steps: int,
        progress: Sequence[int],
        due_s: float,
    ) -> Sequence[Promise]:
        """Inner steps of a pipeline's replicas `team` together; the rest, and the promises of
        `Trained`, by stage, then replica.
        """

    def evaluate(self, theta: Vector, due_s: float) -> Promise: ...

    def reset_optimizer(self, worker: NodeId) -> None:
        """Have a worker's inner optimizer begin anew. Here and below, the worker has no inner steps
        under way.
        """

    def state_of(self, worker: NodeId) -> Any:
        """What makes a worker the one it is, as a copy: its inner optimizer, its integer buffers,
        its place in the data.
        """

    def put(self, worker: NodeId, state: Any) -> None:
        """Make a worker again what `state_of` has seen."""

    def state(self) -> Any:
        """What `restore` needs to go on from here, when all that was asked for so far has been
        computed.
        """

    def restore(self, state: Any) -> None: ...


class NoTraining:
    """For `task: none`: every vector is empty, and every result is there at once."""

    empty = torch.empty(0)
    differentiated = Done(Gradient(empty, 0.0))
    applied = Done(Trained(empty, 1, ()))

    def train(
        self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float
    ) -> Promise:
        return Done(Trained(self.empty, steps, ()))

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise:
        return self.differentiated

    def apply(
        self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float
    ) -> Promise:
        return self.applied

    def train_stages(
        self,
        team: Sequence[int],
        thetas: Sequence[Vector],
        steps: int,
        progress: Sequence[int],
        due_s: float,
    ) -> Sequence[Promise]:
        return [Done(Trained(self.empty, steps, ()))] * len(thetas)

    def evaluate(self, theta: Vector, due_s: float) -> Promise:
        return Done(None)

    def reset_optimizer(self, worker: NodeId) -> None:
        pass

    def state_of(self, worker: NodeId) -> None:
        return None

    def put(self, worker: NodeId, state: None) -> None:
        pass

    def state(self) -> None:
        return None

    def restore(self, state: None) -> None:
        pass


@dataclass
class Job:
    """One job and, once it has been computed, its losses or why it failed: plain data, so that it
    can be saved.
    """

    pool: Pool
    what: str
    arguments: tuple[Any, ...]
    losses: Any = None  # a list; of a pipeline's inner steps, a list for each replica
    failure: tuple[str, str] | None = None

    def result(self) -> Any:
        self.pool.compute(self)
        return self.pool.answer(self)

    @property
    def done(self) -> bool:
        return self.losses is not None or self.failure is not None


@dataclass(frozen=True)
class Part:
    """One node's answer from a pipeline's job; `rank` is the node's."""

    job: Job
    rank: int

    def result(self) -> Any:
        pool = self.job.pool
        pool.compute(self.job)
        return pool.answer_of_node(self.job, self.rank)


@dataclass(frozen=True)
class Setup:
    """What a pool process is told when it starts. `shards`: one a replica; that is, one a worker
    where there are no stages.
    """

    task: TaskConfig
    run: Run
    shards: tuple[Shard, ...]
    pipeline: Pipeline | None
    specs: tuple[TensorSpec, ...]
    device: str


@dataclass(frozen=True)
class WorkerState:
    """A worker between two jobs: the tensors of its state (see `replica.py`), and the number of its
    next batch.
    """

    tensors: list[Tensor]
    cursor: int


@dataclass
class Process:
    popen: subprocess.Popen[bytes]
    connection: Connection
    job: Job | None = None


class Pool:
    """Processes that take the inner steps of `workers` on `task`, in one run after another. A
    context manager: leaving it ends them.

    Args:
        task: what is trained.
        workers: all workers, in rank order.
        processes: how many; None: one for each GPU or, without any, each core that this process may
            use.
        pipeline: how the workers share the replicas' stages; None: each has a whole replica.

    Attributes:
        replica: a copy of the model in this process, for its layout and initial weights; of the run
            that `begin` was told.
        stages: the same in parts; [replica] where there is no pipeline.
    """

    def __init__(
        self,
        task: TaskConfig,
        workers: Sequence[NodeId],
        processes: int | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        if processes is not None and processes < 1:
            raise UserError(f"processes = {processes}: at least 1 is needed")
        self.config, self.task, self.pipeline = task, make_task(task), pipeline
        self.rank = {worker: i for i, worker in enumerate(workers)}
        self._make_replicas(Run(1, len(workers), 0))
        self.specs = _specs([self._stage_of(worker) for worker in workers], self.replica)
        self.memory = _anonymous_file()
        tensors = shared_tensors(self.memory, self.specs, create=True)
        states = [len(self._stage_of(worker).state_specs) for worker in workers]
        self.workers, self.evaluations = split_memory(tensors, states)
        self.free = list(range(len(self.evaluations)))
        self.cursors: list[int] = []
        self.taken: list[list[Tensor]] = []
        self.waiting: list[tuple[float, int, Job]] = []
        self.submitted = 0
        gpus = torch.cuda.device_count()
        self.devices = [
            f"cuda:{i % gpus}" if gpus else "cpu" for i in range(processes or gpus or _cores())
        ]
        self.processes = [self._start() for _ in self.devices]

    def begin(self, run: Run) -> None:
        """Make everything ready for a run: fresh workers, and initial weights from its seed."""
        self.waiting = []
        while any(process.job for process in self.processes):
            self._step(block=True)
        self.free = list(range(len(self.evaluations)))
        readers = self.pipeline.nodes[0] if self.pipeline else self.rank
        shards = shards_of([worker.region for worker in readers], run.seed)
        if self.pipeline:
            check_micro_batches(self.task, shards[0], self.pipeline.micro_batches)
        for process, device in zip(self.processes, self.devices, strict=True):
            setup = Setup(self.config, run, shards, self.pipeline, self.specs, device)
            self._send(process, setup)
        self._make_replicas(run)  # while the processes make theirs
        for worker, rank in self.rank.items():
            self._stage_of(worker).reset(self.workers[rank].state)
        self.cursors = [0] * len(self.workers)
        self.taken = [self._stage_of(worker).first_integers for worker in self.rank]

    def _make_replicas(self, run: Run) -> None:
        cpu = torch.device("cpu")
        self.replica = Replica(self.task, run, cpu)
        self.stages = [self.replica]
        if self.pipeline:
            parts = cut(self.task.seeded_model(run.seed), self.pipeline.stages)
            self.stages = [Replica(self.task, run, cpu, part) for part in parts]

    def _stage_of(self, worker: NodeId) -> Replica:
        return self.stages[self.pipeline.places[worker][0] if self.pipeline else 0]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Jobs

    def train(
        self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float
    ) -> Promise:
        rank = self.rank[worker]
        slot = self.workers[rank].theta
        slot.copy_(theta)
        arguments = (rank, steps, progress, self.cursors[rank])
        self.cursors[rank] += steps
        return self._submit(due_s, "train", arguments)

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise:
        rank = self.rank[worker]
        slot = self.workers[rank].theta
        slot.copy_(theta)
        arguments = (rank, self.cursors[rank])
        self.cursors[rank] += 1
        return self._submit(due_s, "gradient", arguments)

    def apply(
        self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float
    ) -> Promise:
        rank = self.rank[worker]
        slot = self.workers[rank].theta
        slot.copy_(theta)
        self.workers[rank].gradient.copy_(gradient)
        return self._submit(due_s, "apply", (rank, progress))

    def train_stages(
        self,
        team: Sequence[int],
        thetas: Sequence[Vector],
        steps: int,
        progress: Sequence[int],
        due_s: float,
    ) -> Sequence[Promise]:
        assert self.pipeline is not None
        ranks = self.pipeline.ranks(team)
        cursor = self.cursors[ranks[0]]
        for rank, theta in zip(ranks, thetas, strict=True):
            self.workers[rank].theta.copy_(theta)
            self.cursors[rank] += steps
        job = self._submit(due_s, "train_stages", (tuple(team), steps, tuple(progress), cursor))
        return [Part(job, rank) for rank in ranks]

    def evaluate(self, theta: Vector, due_s: float) -> Promise:
        while not self.free:
            self._step(block=True)
        slot = self.free.pop()
        self.evaluations[slot].copy_(theta)
        return self._submit(due_s, "evaluate", (slot,))

    def measure_step_time_s(self) -> float:
        """Seconds of one inner step in one process while the others are idle: the median of 20,
        after 5.
        """
        return float(self._submit(0.0, "measure", ()).result())

    def integers(self) -> dict[str, Tensor]:
        """The integer buffers of the model: of each, the largest value that any worker had when its
        last result was taken.
        """
        names = (self._stage_of(worker).layout.integers for worker in self.rank)
        return largest(
            dict(zip(pair[0], pair[1], strict=True)) for pair in zip(names, self.taken, strict=True)
        )

    def answer(self, job: Job) -> Any:
        """What a job that has been computed is for the engine: a message of its worker's vector, or
        a loss.
        """
        losses = job.losses
        match job.what, job.arguments:
            case "train", (rank, steps, *_):
                return Trained(self._taken(rank), steps, tuple(losses))
            case "gradient", (rank, _):
                return Gradient(self._taken(rank), losses[0])
            case "apply", (rank, _):
                return Trained(self._taken(rank), 1, ())
            case (("evaluate" | "measure"), _):
                return losses[0]
            case _:
                raise AssertionError(job.what)

    def answer_of_node(self, job: Job, rank: int) -> Trained:
        """What a pipeline's job that has been computed is for the node `rank`; the last stage has
        the losses.
        """
        assert self.pipeline is not None
        replica, stage = divmod(rank, self.pipeline.stages)
        last = stage == self.pipeline.stages - 1
        return Trained(
            self._taken(rank), job.arguments[1], tuple(job.losses[replica]) if last else ()
        )

    def _taken(self, rank: int) -> Vector:
        """A worker's result. Its integer buffers are noted now, in the engine's order: its next job
        may change them at any time.
        """
        memory = self.workers[rank]
        self.taken[rank] = [
            tensor.clone() for tensor in memory.state[1 : 1 + len(self.taken[rank])]
        ]
        return memory.theta.clone()

    def compute(self, job: Job) -> None:
        """Return once `job` has been computed.

        Raises:
            Diverged: its loss is not finite.
            TrainingError: the task failed in it, or a process died.
        """
        while not job.done:
            self._step(block=True)
        if job.failure is not None:
            kind, message = job.failure
            raise Diverged(message) if kind == NonFiniteLoss.__name__ else TrainingError(message)

    # Workers that restart

    def reset_optimizer(self, worker: NodeId) -> None:
        self._stage_of(worker).reset_optimizer(self.workers[self.rank[worker]].state)

    def state_of(self, worker: NodeId) -> WorkerState:
        rank = self.rank[worker]
        return WorkerState(
            [tensor.clone() for tensor in self.workers[rank].state], self.cursors[rank]
        )

    def put(self, worker: NodeId, state: WorkerState) -> None:
        rank = self.rank[worker]
        for tensor, saved in zip(self.workers[rank].state, state.tensors, strict=True):
            tensor.copy_(saved)
        self.cursors[rank] = state.cursor

    # Saving

    def state(self) -> dict[str, Any]:
        """All that a run has changed here, once every job has been computed; jobs themselves are
        with those who wait for them.

        The tensors are those of the shared memory: read them before the next job.

        Raises:
            TrainingError: a process died.
        """
        while self.waiting or any(process.job for process in self.processes):
            self._step(block=True)
        return {"workers": self.workers, "cursors": self.cursors, "taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state()` gave, right after `begin`."""
        for memory, saved in zip(self.workers, state["workers"], strict=True):
            memory.theta.copy_(saved.theta)
            memory.gradient.copy_(saved.gradient)
            for tensor, kept in zip(memory.state, saved.state, strict=True):
                tensor.copy_(kept)
        self.cursors, self.taken = state["cursors"], state["taken"]

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for process in self.processes:
            process.connection.close()
            process.popen.terminate()
        for process in self.processes:
            process.popen.wait()
        self.processes = []
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1

    def _submit(self, due_s: float, what: str, arguments: tuple[Any, ...]) -> Job:
        job = Job(self, what, arguments)
        heapq.heappush(self.waiting, (due_s, self.submitted, job))
        self.submitted += 1
        self._step(block=False)
        return job

    def _step(self, *, block: bool) -> None:
        """Take in finished jobs and hand out waiting ones, those due soonest first."""
        busy = {
            process.connection: process for process in self.processes if process.job is not None
        }
        # Only wait if there is nothing to hand out.
        timeout = None if block and (len(busy) == len(self.processes) or not self.waiting) else 0
        for connection in wait(list(busy), timeout):
            self._take_in(busy[connection])  # type: ignore[index]
        for process in self.processes:
            if process.job is None and self.waiting:
                process.job = heapq.heappop(self.waiting)[2]
                self._send(process, (process.job.what, process.job.arguments))

    def _take_in(self, process: Process) -> None:
        job = process.job
        assert job is not None
        try:
            losses, failure = process.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death(process) from None
        if failure is not None and job.what in ("train", "gradient", "apply"):
            kind, message = failure
            failure = kind, f"worker {list(self.rank)[job.arguments[0]]}: {message}"
        job.losses, job.failure, process.job = losses, failure, None
        if job.what == "evaluate":
            self.free.append(job.arguments[0])

    def _send(self, process: Process, what: Setup | tuple[str, tuple[Any, ...]]) -> None:
        try:
            process.connection.send(what)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death(process) from None

    def _death(self, process: Process) -> TrainingError:
        code = process.popen.wait()
        hint = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return TrainingError(f"a pool process died (exit code {code}){hint}")

    def _start(self) -> Process:
        here, there = Pipe()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        popen = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from archipel.train.pool import main; main()",
                str(there.fileno()),
                str(self.memory),
            ],
            pass_fds=(there.fileno(), self.memory),
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
        )
        there.close()
        return Process(popen, here)


# Memory that all processes share


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def _anonymous_file() -> int:
    """A descriptor of a file in memory that has no name and goes with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("archipel")
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


@dataclass(frozen=True)
class WorkerMemory:
    """One worker's part: its vector (numel,), in and out; an averaged gradient (numel,), in; its
    state.
    """

    theta: Tensor
    gradient: Tensor
    state: list[Tensor]


def _specs(workers: Sequence[Replica], whole: Replica) -> tuple[TensorSpec, ...]:
    """All shared tensors: each worker's vector, gradient and state; then whole vectors, one more
    than there are workers.
    """
    specs = []
    for replica in workers:
        vector = TensorSpec((replica.layout.numel,), torch.float32)
        specs += [vector, vector, *replica.state_specs]
    return (*specs, *[TensorSpec((whole.layout.numel,), torch.float32)] * (len(workers) + 1))


def split_memory(
    tensors: list[Tensor], states: Sequence[int]
) -> tuple[list[WorkerMemory], list[Tensor]]:
    """The parts of all workers, and the vectors for evaluations; `states` has the number of tensors
    in each worker's state.
    """
    rest = iter(tensors)
    parts = [
        WorkerMemory(next(rest), next(rest), [next(rest) for _ in range(state)]) for state in states
    ]
    return parts, list(rest)


def shared_tensors(descriptor: int, specs: Sequence[TensorSpec], *, create: bool) -> list[Tensor]:
    """Tensors inside the file `descriptor`, one after the other."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-max(spec.size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if create:
        os.ftruncate(descriptor, end)
    memory = mmap.mmap(descriptor, end)
    return [
        torch.frombuffer(
            memory, dtype=spec.dtype, count=max(math.prod(spec.shape), 1), offset=offset
        )[: math.prod(spec.shape)].view(spec.shape)
        for spec, offset in zip(specs, offsets, strict=True)
    ]


# The other side: a pool process


def serve(connection: Connection, descriptor: int) -> None:
    """Compute jobs until the other end closes the connection; a `Setup` comes before the first one
    of a run.
    """
    torch.set_num_threads(1)
    while True:
        match connection.recv():
            case Setup() as setup:
                process = Computer(setup, shared_tensors(descriptor, setup.specs, create=False))
            case what, arguments:
                answer: tuple[Any, tuple[str, str] | None]
                try:
                    answer = process.compute(what, arguments), None
                except NonFiniteLoss as error:
                    answer = None, (NonFiniteLoss.__name__, str(error))
                except Exception as error:
                    answer = (
                        None,
                        (
                            type(error).__name__,
                            f"the task failed at {place_of(error)}: {type(error).__name__}: "
                            f"{error}",
                        ),
                    )
                connection.send(answer)


def place_of(error: Exception) -> str:
    """File and line where `error` was raised: the deepest one that is neither a library's nor this
    package's, if there is any.
    """
    frames = traceback.extract_tb(error.__traceback__)
    foreign = ("site-packages", os.path.dirname(archipel.__file__))
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


class Computer:
    """What a pool process has for one run: the replicas, and the memory that it shares."""

    def __init__(self, setup: Setup, tensors: list[Tensor]) -> None:
        task, device = make_task(setup.task), torch.device(setup.device)
        self.shards = setup.shards
        self.replica = Replica(task, setup.run, device)
        self.stages = Stages(task, setup.run, device, setup.pipeline) if setup.pipeline else None
        if self.stages:
            states = [
                len(stage.state_specs)
                for column in zip(*self.stages.replicas, strict=True)
                for stage in column
            ]
        else:
            states = [len(self.replica.state_specs)] * len(self.shards)
        self.workers, self.evaluations = split_memory(tensors, states)

    def compute(self, what: str, arguments: Any) -> Any:
        """One job's losses; its vectors change in place."""
        replica, workers = self.replica, self.workers
        match what, arguments:
            case "train", (rank, steps, progress, cursor):
                return replica.train(
                    workers[rank].state,
                    workers[rank].theta,
                    self.shards[rank],
                    steps,
                    progress,
                    cursor,
                )
            case "train_stages", (team, steps, progress, cursor):
                assert self.stages is not None
                ranks = self.stages.pipeline.ranks(team)
                states, thetas = (
                    [workers[rank].state for rank in ranks],
                    [workers[rank].theta for rank in ranks],
                )
                return self.stages.train(team, states, thetas, self.shards, steps, progress, cursor)
            case "gradient", (rank, cursor):
                return replica.differentiate(
                    workers[rank].state, workers[rank].theta, self.shards[rank], cursor
                )
            case "apply", (rank, progress):
                return replica.apply(
                    workers[rank].state, workers[rank].theta, workers[rank].gradient, progress
                )
            case "evaluate", (slot,):
                return replica.evaluate(self.evaluations[slot])
            case "measure", ():
                return [median_step_time_s(replica, self.shards[0])]
            case _:
                raise AssertionError(what)


def median_step_time_s(replica: Replica, shard: Shard, warm_up: int = 5, steps: int = 20) -> float:
    """Seconds of one inner step on this device, measured on a throw-away worker."""
    state = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in replica.state_specs]
    theta = replica.layout.read(replica.module)
    times = []
    for step in range(warm_up + steps):
        start = time.perf_counter()
        replica.train(state, theta, shard, 1, 0, step)
        times.append(time.perf_counter() - start)
    return statistics.median(times[warm_up:])


def main() -> None:
    """A pool process, started with the descriptors of its connection and of the shared memory."""
    # Ctrl-C reaches every process of a terminal; the one that started us decides, and closes the
    # connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
