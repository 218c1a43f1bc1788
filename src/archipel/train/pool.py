"""The pool: it runs the inner steps of many workers on this machine's cores or GPUs.

What belongs here: the processes and their memory, and which job runs next. What does not: how a job
is computed (`pool_process.py`), or when its result is due on anybody's clock (the engines).

On a CPU each process computes with one thread: on the machines measured, two such processes beat
one process of two threads by 1.15 to 1.4 times. With GPUs there is one process for each. Weights
and the workers' states lie in memory that all processes share; only small tuples go through pipes.
Any process can take any worker's next job, so no core waits for a particular one.

Results do not depend on the number of processes: a job is a function of its worker's state, its
vector and its arguments.
"""

from __future__ import annotations

import heapq
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
from torch import Tensor

from archipel import pyfile
from archipel.actor import Gradient, NodeId, Trained, Vector
from archipel.errors import Diverged, TrainingError, UserError
from archipel.train.configs import TaskConfig
from archipel.train.cut import parts_of
from archipel.train.data import shards_of
from archipel.train.pipeline import Pipeline
from archipel.train.pool_process import Setup, specs_of, split_memory
from archipel.train.replica import NonFiniteLoss, Replica, Run
from archipel.train.shared_memory import anonymous_file, shared_tensors
from archipel.train.task import make_task
from archipel.train.trainer import Promise
from archipel.vector import largest


@dataclass
class Job:
    """One job and, once it is computed, its losses or the reason why it failed. Plain data, so that
    it can be saved.
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

    @property
    def done(self) -> bool:
        return self.job.done

    def result(self) -> Any:
        pool = self.job.pool
        pool.compute(self.job)
        return pool.answer_of_node(self.job, self.rank)


@dataclass(frozen=True)
class WorkerState:
    """A worker between two jobs: the tensors of its state (see `replica.py`), and the number of its
    next batch.
    """

    tensors: list[Tensor]
    cursor: int


@dataclass
class Process:
    """A pool process, and the job that it computes; None: it waits for one."""

    popen: subprocess.Popen[bytes]
    connection: Connection
    job: Job | None = None

    @staticmethod
    def start(memory: int) -> Process:
        """Start one that shares the memory with this descriptor."""
        here, there = Pipe()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # The folder of a user's file comes first only once that file is imported: not before torch.
        path = [folder for folder in sys.path if folder and folder not in pyfile.folders]
        program = "from archipel.train.pool_process import main; main()"
        popen = subprocess.Popen(
            [sys.executable, "-c", program, str(there.fileno()), str(memory)],
            pass_fds=(there.fileno(), memory),
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches every process of a terminal's group, even one that is still importing;
            # who started this one decides, and closes the connection.
            process_group=0,
        )
        there.close()
        return Process(popen, here)

    def send(self, what: Setup | tuple[str, tuple[Any, ...]]) -> None:
        """Send a set-up or a job.

        Raises:
            TrainingError: the process has died.
        """
        try:
            self.connection.send(what)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None

    def receive(self) -> tuple[Any, tuple[str, str] | None]:
        """What its job has come to: losses, or why it failed.

        Raises:
            TrainingError: the process has died.
        """
        try:
            losses, failure = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        return losses, failure

    def _death(self) -> TrainingError:
        code = self.popen.wait()
        hint = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return TrainingError(f"a pool process died (exit code {code}){hint}")


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
        replica: a copy of the model in this process, for its layout and initial weights. It belongs
            to the run that `begin` was told of.
        stages: the same model in parts; [replica] where there is no pipeline.
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
        self.specs = specs_of([self._stage_of(worker) for worker in workers], self.replica)
        self.memory = anonymous_file()
        tensors = shared_tensors(self.memory, self.specs, create=True)
        states = [len(self._stage_of(worker).state_specs) for worker in workers]
        self.workers, self.evaluations = split_memory(
            tensors, states, len(self.replica.first_integers)
        )
        self.tried = False
        self.free = list(range(len(self.evaluations)))
        self.cursors: list[int] = []
        self.taken: list[list[Tensor]] = []
        self.waiting: list[tuple[float, int, Job]] = []
        self.submitted = 0
        gpus = torch.cuda.device_count()
        self.devices = [
            f"cuda:{i % gpus}" if gpus else "cpu" for i in range(processes or usual_processes())
        ]
        self.processes = [Process.start(self.memory) for _ in self.devices]

    def begin(self, run: Run) -> None:
        """Make everything ready for a run: fresh workers, and initial weights from its seed.

        Raises:
            UserError: the task cannot be trained; see `try_out`.
        """
        self.waiting = []
        while any(process.job for process in self.processes):
            self._step(block=True)
        self.free = list(range(len(self.evaluations)))
        readers = self.pipeline.nodes[0] if self.pipeline else self.rank
        shards = shards_of([worker.region for worker in readers], run.seed)
        for process, device in zip(self.processes, self.devices, strict=True):
            setup = Setup(self.config, run, shards, self.pipeline, self.specs, device)
            process.send(setup)
        self._make_replicas(run)  # while the processes make theirs
        for worker, rank in self.rank.items():
            self._stage_of(worker).reset(self.workers[rank].state)
        self.cursors = [0] * len(self.workers)
        self.taken = [self._stage_of(worker).first_integers for worker in self.rank]
        if not self.tried:  # the task is the same in all runs
            self._submit(0.0, "try", ()).result()
            self.tried = True

    def _make_replicas(self, run: Run) -> None:
        cpu = torch.device("cpu")
        self.replica = Replica(self.task, run, cpu)
        self.stages = [self.replica]
        if self.pipeline:
            stages, micro_batches = self.pipeline.stages, self.pipeline.micro_batches
            parts = parts_of(self.task, run.seed, stages, micro_batches)
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
        self.workers[rank].theta.copy_(theta)
        arguments = (rank, steps, progress, self.cursors[rank])
        self.cursors[rank] += steps
        return self._submit(due_s, "train", arguments)

    def gradient(self, worker: NodeId, theta: Vector, due_s: float) -> Promise:
        rank = self.rank[worker]
        self.workers[rank].theta.copy_(theta)
        arguments = (rank, self.cursors[rank])
        self.cursors[rank] += 1
        return self._submit(due_s, "gradient", arguments)

    def apply(
        self, worker: NodeId, theta: Vector, gradient: Vector, progress: int, due_s: float
    ) -> Promise:
        rank = self.rank[worker]
        self.workers[rank].theta.copy_(theta)
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
        model, integers = self.evaluations[slot], self.integers()
        model.theta.copy_(theta)
        for name, tensor in zip(self.replica.layout.integers, model.integers, strict=True):
            tensor.copy_(integers[name])
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
            case "try", _:
                return None
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
            if kind == NonFiniteLoss.__name__:
                raise Diverged(message)
            # Once a run has begun, a user's mistake is no reason to throw away what it has saved.
            raise UserError(message) if job.what == "try" else TrainingError(message)

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
                process.send((process.job.what, process.job.arguments))

    def _take_in(self, process: Process) -> None:
        job = process.job
        assert job is not None
        losses, failure = process.receive()
        if failure is not None and job.what in ("train", "gradient", "apply"):
            kind, message = failure
            failure = kind, f"worker {list(self.rank)[job.arguments[0]]}: {message}"
        job.losses, job.failure, process.job = losses, failure, None
        if job.what == "evaluate":
            self.free.append(job.arguments[0])


def usual_processes() -> int:
    """How many processes a pool has: one for each GPU or, without any, for each core."""
    return torch.cuda.device_count() or _cores()


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS
