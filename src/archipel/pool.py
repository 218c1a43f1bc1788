"""Runs the inner steps of many workers on this machine's cores or GPUs.

What belongs here: processes, the memory that they share, and which job runs next. What does not: what a job computes
(`replica.py`), or when its result is due on anybody's clock (the engines).

On a CPU each process computes with one thread: on the machines measured, two such processes beat one process of two
threads by 1.15 to 1.4 times. With GPUs there is one process for each. Weights and the workers' states lie in memory
that all processes share; only small tuples go through pipes. Any process can take any worker's next job, so no core
waits for a particular one.

Results do not depend on the number of processes: a job is a function of its worker's state, its vector and its arguments.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from archipel.actor import Gradient, NodeId, Trained, Vector
from archipel.data import Shard
from archipel.errors import Diverged, TrainingError, UserError
from archipel.replica import NonFiniteLoss, Replica, Run, TensorSpec
from archipel.task import TaskConfig, make_task

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
    """What an engine needs to have inner steps taken. `due_s` is when the engine will want the result, on its own clock."""

    def train(self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float) -> Promise: ...

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise: ...

    def apply(self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float) -> Promise: ...

    def evaluate(self, theta: Vector, due_s: float) -> Promise: ...


class NoTraining:
    """For `task: none`: every vector is empty, and every result is there at once."""

    empty = torch.empty(0)
    differentiated = Done(Gradient(empty, 0.0))
    applied = Done(Trained(empty, 1, ()))

    def train(self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float) -> Promise:
        return Done(Trained(self.empty, steps, ()))

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise:
        return self.differentiated

    def apply(self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float) -> Promise:
        return self.applied

    def evaluate(self, theta: Vector, due_s: float) -> Promise:
        return Done(None)


@dataclass
class Job:
    """One job and, once it has been computed, its result."""

    pool: Pool
    what: str
    arguments: tuple[Any, ...]
    finish: Callable[[list[float]], Any]
    losses: list[float] | None = None
    failure: tuple[str, str] | None = None

    def result(self) -> Any:
        self.pool.compute(self)
        assert self.losses is not None
        return self.finish(self.losses)

    @property
    def done(self) -> bool:
        return self.losses is not None or self.failure is not None


@dataclass(frozen=True)
class Setup:
    """What a pool process is told when it starts."""

    task: TaskConfig
    run: Run
    shards: tuple[Shard, ...]
    specs: tuple[TensorSpec, ...]
    device: str


@dataclass
class Process:
    popen: subprocess.Popen[bytes]
    connection: Connection
    job: Job | None = None


class Pool:
    """Processes that take the inner steps of `workers` on `task`, in one run after another. A context manager:
    leaving it ends them.

    Args:
        task: what is trained.
        workers: all workers, in rank order.
        processes: how many; None: one for each GPU or, without any, each core that this process may use.

    Attributes:
        replica: a copy of the model in this process, for its layout and initial weights; of the run that `begin` was told.
    """

    def __init__(self, task: TaskConfig, workers: Sequence[NodeId], processes: int | None = None) -> None:
        if processes is not None and processes < 1:
            raise UserError(f"processes = {processes}: at least 1 is needed")
        self.config, self.task = task, make_task(task)
        self.rank = {worker: i for i, worker in enumerate(workers)}
        self.replica = self._replica(Run(1, len(workers), 0))
        vector = TensorSpec((self.replica.layout.numel,), torch.float32)
        worker_specs = [vector, vector, *self.replica.state_specs] * len(workers)
        self.specs = (*worker_specs, *[vector] * (len(workers) + 1))
        self.memory = _anonymous_file()
        tensors = shared_tensors(self.memory, self.specs, create=True)
        self.workers, self.evaluations = split(tensors, len(workers), len(self.replica.state_specs))
        self.free = list(range(len(self.evaluations)))
        self.cursors: list[int] = []
        self.taken: list[list[Tensor]] = []
        self.waiting: list[tuple[float, int, Job]] = []
        self.submitted = 0
        gpus = torch.cuda.device_count()
        self.devices = [f"cuda:{i % gpus}" if gpus else "cpu" for i in range(processes or gpus or _cores())]
        self.processes = [self._start() for _ in self.devices]

    def begin(self, run: Run) -> None:
        """Make everything ready for a run: fresh workers, and initial weights from its seed."""
        self.waiting = []
        while any(process.job for process in self.processes):
            self._step(block=True)
        self.free = list(range(len(self.evaluations)))
        regions = list(dict.fromkeys(worker.region for worker in self.rank))
        shards = tuple(
            Shard(i, len(self.rank), regions.index(worker.region), len(regions), run.seed) for worker, i in self.rank.items()
        )
        for process, device in zip(self.processes, self.devices, strict=True):
            setup = Setup(self.config, run, shards, self.specs, device)
            self._send(process, setup)
        self.replica = self._replica(run)  # while the processes make theirs
        for worker in self.workers:
            self.replica.reset(worker.state)
        self.cursors = [0] * len(self.workers)
        self.taken = [self.replica.first_integers] * len(self.workers)

    def _replica(self, run: Run) -> Replica:
        return Replica(self.task, run, torch.device("cpu"))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Jobs

    def train(self, worker: NodeId, theta: Vector, steps: int, progress: int, due_s: float) -> Promise:
        rank = self.rank[worker]
        slot = self.workers[rank].theta
        slot.copy_(theta)
        arguments = (rank, steps, progress, self.cursors[rank])
        self.cursors[rank] += steps
        return self._submit(due_s, "train", arguments, lambda losses: Trained(self._taken(rank), steps, tuple(losses)))

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise:
        rank = self.rank[worker]
        slot = self.workers[rank].theta
        slot.copy_(theta)
        arguments = (rank, self.cursors[rank])
        self.cursors[rank] += 1
        return self._submit(due_s, "gradient", arguments, lambda losses: Gradient(self._taken(rank), losses[0]))

    def apply(self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float) -> Promise:
        rank = self.rank[worker]
        slot = self.workers[rank].theta
        slot.copy_(theta)
        self.workers[rank].gradient.copy_(gradient)
        return self._submit(due_s, "apply", (rank, progress), lambda losses: Trained(self._taken(rank), 1, ()))

    def evaluate(self, theta: Vector, due_s: float) -> Promise:
        while not self.free:
            self._step(block=True)
        slot = self.free.pop()
        self.evaluations[slot].copy_(theta)
        return self._submit(due_s, "evaluate", (slot,), lambda losses: losses[0])

    def measure_step_time_s(self) -> float:
        """Seconds of one inner step in one process while the others are idle: the median of 20, after 5."""
        return float(self._submit(0.0, "measure", (), lambda losses: losses[0]).result())

    def integers(self) -> dict[str, Tensor]:
        """The integer buffers of the model: of each, the largest value that any worker had when its last result was taken."""
        columns = zip(*self.taken, strict=True)
        return {name: torch.stack(column).amax(dim=0) for name, column in zip(self.replica.layout.integers, columns, strict=True)}

    def _taken(self, rank: int) -> Vector:
        """A worker's result. Its integer buffers are noted now, in the engine's order: its next job may change them at any time."""
        memory = self.workers[rank]
        self.taken[rank] = [tensor.clone() for tensor in memory.state[1 : 1 + len(self.replica.layout.integers)]]
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

    def _submit(self, due_s: float, what: str, arguments: tuple[Any, ...], finish: Callable[[list[float]], Any]) -> Job:
        job = Job(self, what, arguments, finish)
        heapq.heappush(self.waiting, (due_s, self.submitted, job))
        self.submitted += 1
        self._step(block=False)
        return job

    def _step(self, *, block: bool) -> None:
        """Take in finished jobs and hand out waiting ones, those due soonest first."""
        busy = {process.connection: process for process in self.processes if process.job is not None}
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
            [sys.executable, "-c", "from archipel.pool import main; main()", str(there.fileno()), str(self.memory)],
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
    """One worker's part: its vector (numel,), in and out; an averaged gradient (numel,), in; its state."""

    theta: Tensor
    gradient: Tensor
    state: list[Tensor]


def split(tensors: list[Tensor], workers: int, state: int) -> tuple[list[WorkerMemory], list[Tensor]]:
    """The parts of all workers, and the vectors for evaluations; `state` is the number of tensors in a worker's state."""
    stride = 2 + state
    parts = [tensors[i * stride : (i + 1) * stride] for i in range(workers)]
    return [WorkerMemory(part[0], part[1], part[2:]) for part in parts], tensors[workers * stride :]


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
        torch.frombuffer(memory, dtype=spec.dtype, count=max(math.prod(spec.shape), 1), offset=offset)[
            : math.prod(spec.shape)
        ].view(spec.shape)
        for spec, offset in zip(specs, offsets, strict=True)
    ]


# The other side: a pool process


def serve(connection: Connection, descriptor: int) -> None:
    """Compute jobs until the other end closes the connection; a `Setup` comes before the first one of a run."""
    torch.set_num_threads(1)
    while True:
        match connection.recv():
            case Setup() as setup:
                replica = Replica(make_task(setup.task), setup.run, torch.device(setup.device))
                tensors = shared_tensors(descriptor, setup.specs, create=False)
                workers, evaluations = split(tensors, len(setup.shards), len(replica.state_specs))
            case what, arguments:
                answer: tuple[list[float] | None, tuple[str, str] | None]
                try:
                    answer = compute(replica, workers, evaluations, setup.shards, what, arguments), None
                except NonFiniteLoss as error:
                    answer = None, (NonFiniteLoss.__name__, str(error))
                except Exception as error:
                    answer = None, (type(error).__name__, f"the task failed at {place_of(error)}: {type(error).__name__}: {error}")
                connection.send(answer)


def place_of(error: Exception) -> str:
    """File and line where `error` was raised: the deepest one that is neither a library's nor this package's, if there is any."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = ("site-packages", os.path.dirname(__file__))
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def compute(
    replica: Replica, workers: list[WorkerMemory], evaluations: list[Tensor], shards: tuple[Shard, ...], what: str, arguments: Any
) -> list[float]:
    """One job's losses; its vectors change in place."""
    match what, arguments:
        case "train", (rank, steps, progress, cursor):
            return replica.train(workers[rank].state, workers[rank].theta, shards[rank], steps, progress, cursor)
        case "gradient", (rank, cursor):
            return replica.differentiate(workers[rank].state, workers[rank].theta, shards[rank], cursor)
        case "apply", (rank, progress):
            return replica.apply(workers[rank].state, workers[rank].theta, workers[rank].gradient, progress)
        case "evaluate", (slot,):
            return replica.evaluate(evaluations[slot])
        case "measure", ():
            return [median_step_time_s(replica, shards[0])]
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
    # Ctrl-C reaches every process of a terminal; the one that started us decides, and closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
