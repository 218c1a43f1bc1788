"""The real clock: the simulator's actors, each in a Ray actor of its own, and the one who watches over them.

What belongs here: all that knows Ray: where hosts run, how mail gets from one to another, whether they are alive, and the run
directory of a live run. What does not: what a host does with its mail (`host.py`), what a method does.

A live run starts with a rehearsal: the simulator runs the same recipe without gradients, in milliseconds. It shows that the method
comes to its end, and at which of its own inner steps each holder of the model passes each mark. Holders keep their part of the
model at just these counts, however long they really take: so a live run evaluates, and takes home, what the simulator would.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import pickle
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archipel import experiment, methods, outer
from archipel.actor import Actor, NodeId, Vector
from archipel.data import Shard, shards_of
from archipel.errors import Diverged, TrainingError, UserError
from archipel.experiment import Ended
from archipel.faults import FaultsConfig
from archipel.host import Host, Meeting, Record, Setup, Snapshot, Status, device, free_port, meet
from archipel.mail import Envelope
from archipel.metrics import Evaluation, Recorder, merged
from archipel.network import Network
from archipel.pipeline import Pipeline, check_micro_batches, cut, join
from archipel.pool import Done, NoTraining, Promise, median_step_time_s
from archipel.recipe import Recipe
from archipel.replica import Replica, Run
from archipel.sharded import ShardedReplica
from archipel.simulator import Simulator, Stop
from archipel.task import NoTask, Task, make_task
from archipel.topology import Profile
from archipel.vector import Layout, largest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise UserError("live runs need Ray, which is not installed; install it with: pip install 'archipel[live]'") from None

REGION = "region"
"""The label of a Ray node that says which region of the topology it belongs to."""
TICK_S = 1.0
"""How often hosts are asked how things stand."""
START_S = 300.0
"""Longest time until the next host is up: a process, torch, the data."""


@dataclass(frozen=True)
class Now:
    """How a live run stands, for whoever shows it.

    Attributes:
        inner_steps, planned: absorbed by the model to take home, and the plan.
        time_s: since the start.
        loss: mean of the workers' last training losses; None before the first.
        tokens_per_s: absorbed, since the start; None where nothing is trained.
        idle: the part of their time that workers have not computed so far.
        late: who has been silent longest and what it does; None if nobody for more than a few ticks.
    """

    inner_steps: int
    planned: int
    time_s: float
    loss: float | None
    tokens_per_s: float | None
    idle: dict[NodeId, float]
    late: str | None


# Rehearsal


@dataclass
class Marks(NoTraining):
    """A trainer for rehearsals: where the simulator would evaluate the model, it notes what each holder has absorbed."""

    actors: Sequence[Actor]
    marks: list[dict[NodeId, int]] = field(default_factory=list)

    def evaluate(self, theta: Vector, due_s: float) -> Promise:
        self.marks.append({actor.me: actor.absorbed for actor in self.actors if actor.model() is not None})
        return Done(None)


def rehearse(recipe: Recipe, profile: Profile, steps: int) -> list[dict[NodeId, int]]:
    """For each mark, the first one at 0 and the last one at the end, what every holder of the model will have absorbed.

    Raises:
        UserError, TrainingError: the method would not come to its end; see `Simulator.run`.
    """
    workers, seed, pipeline = recipe.topology.workers, recipe.run.seed, experiment.pipeline_of(recipe)
    actors = experiment.build_actors(recipe, pipeline, torch.empty(0), ())
    rehearsal = Marks(actors)
    Simulator(
        actors,
        workers,
        Network(recipe.topology, np.random.default_rng((seed, 0x2E7))),
        profile,
        rehearsal,
        Recorder(),
        Stop(steps),
        evaluate_every=max(1, steps // recipe.run.evaluations),
        tokens_per_step=None,
        parameters=0,
        seed=seed,
        pipeline=pipeline,
    ).run()
    *marks, last = rehearsal.marks
    if len(last) == 1:  # asynchronous methods overshoot by other amounts on another clock
        last = dict.fromkeys(last, steps)
    return [*marks, last]


# Places


@dataclass(frozen=True)
class Machine:
    """A Ray node: its id and address, the region that its label names, and its GPUs."""

    id: str
    address: str
    region: str | None
    gpus: float


def machines() -> list[Machine]:
    """Those of the cluster that are alive."""
    return [
        Machine(node["NodeID"], node["NodeManagerAddress"], node["Labels"].get(REGION), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def place(
    nodes: Sequence[NodeId], workers: Sequence[NodeId], found: Sequence[Machine], gpu_fraction: float, head: str | None
) -> dict[NodeId, Machine]:
    """The machine of each node: its workers spread evenly over a region's machines, everything else on the region's first.

    Where machines have GPUs, only those take workers, each as many as `gpu_fraction` allows.

    Args:
        head: the cluster's address, for the advice; None: one private machine acts all regions.

    Raises:
        UserError: a region has no machine, or too few GPUs; it names who is left without.
    """
    places: dict[NodeId, Machine] = {}
    load: dict[str, int] = dict.fromkeys((machine.id for machine in found), 0)
    for region in dict.fromkeys(node.region for node in nodes):
        here = [machine for machine in found if head is None or machine.region == region]
        members = [node for node in nodes if node.region == region]
        if not here:
            seen = ", ".join(sorted({repr(machine.region) for machine in found if machine.region})) or "none"
            raise UserError(
                f"region {region!r} has no machine for {_names(members)}: no Ray node has the label {REGION}={region} (labels "
                f"found: {seen}); on a machine of that region: ray start --address={head} --labels={REGION}={region}"
            )
        slots = {machine.id: int(machine.gpus / gpu_fraction + 1e-9) for machine in here}
        with_gpus = any(slots.values())
        for node in members:
            if node not in workers:
                places[node] = here[0]
                continue
            free = [machine for machine in here if not with_gpus or load[machine.id] < slots[machine.id]]
            if not free:
                missing = [worker for worker in members if worker in workers and worker not in places]
                raise UserError(
                    f"region {region!r} has GPUs for {sum(slots.values())} workers, and none for {_names(missing)}: "
                    f"live.gpu_fraction = {gpu_fraction:g} of a GPU each; lower it, or add a machine"
                )
            places[node] = min(free, key=lambda machine: load[machine.id])
            load[places[node].id] += 1
    return places


def _names(nodes: Sequence[NodeId]) -> str:
    more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
    return ", ".join(map(str, nodes[:4])) + more


# Ray


TOKEN = secrets.token_hex(32)
"""Of private clusters: Ray listens on all interfaces even so, and without it anybody who can reach this machine could join."""


@contextmanager
def session(address: str | None) -> Iterator[None]:
    """A connection to the Ray cluster at `address`, or to a private one that ends with this; not if there is one already.

    Raises:
        UserError: there is no cluster at `address`, or it does not let us in.
        TrainingError: a private one did not start.
    """
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    before = {key: os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE")}
    try:
        if address is None:
            if before["RAY_AUTH_MODE"] is None:
                os.environ["RAY_AUTH_TOKEN"] = TOKEN  # Ray then asks for it, and leaves no token in the user's home
            # Ray makes its workers nice to others, by 15, unless it is told not to.
            try:
                ray.init(address="local", include_dashboard=False, _system_config={"worker_niceness": 0}, **quiet)
            except Exception as error:  # Ray raises all kinds, and gives up after 30 s on a machine that is very busy
                raise TrainingError(f"Ray did not start: {' '.join(str(error).split())[:400]}") from None
        else:
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                reason = " ".join(str(error).split())[:400]
                raise UserError(
                    f"--address {address}: cannot join a Ray cluster there, with the RAY_AUTH_… and RAY_TLS_… settings of this "
                    f"environment: {reason}"
                ) from None
        yield
    finally:
        ray.shutdown()
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def check_protected(found: Sequence[Machine]) -> None:
    """Raise a `UserError` if a machine of the cluster, unless all are on loopback, lets strangers in or sends in the clear.

    Each machine is asked itself: what counts is the environment that its Ray was started in.
    """
    if all(ipaddress.ip_address(machine.address).is_loopback for machine in found):
        return
    asked = [protection.options(scheduling_strategy=on(machine)).remote() for machine in found]
    for machine, (token, tls) in zip(found, ray.get(asked, timeout=60), strict=True):
        lacks = [text for text, there in (("token (RAY_AUTH_MODE=token)", token), ("encryption (RAY_USE_TLS=1)", tls)) if not there]
        if lacks:
            raise UserError(
                f"the Ray node on {machine.address} runs without {' and without '.join(lacks)}: whoever can reach it could read, "
                "change or run anything; see docs/security.md, or give --insecure if nobody else can reach it"
            )


@ray.remote(num_cpus=0, max_retries=0)
def protection() -> tuple[bool, bool]:
    """Whether the Ray node that runs this asks for a token, and whether it encrypts."""
    environment = {key: os.environ.get(key, "").lower() for key in ("RAY_AUTH_MODE", "RAY_USE_TLS")}
    return environment["RAY_AUTH_MODE"] == "token", environment["RAY_USE_TLS"] in ("1", "true")


def on(machine: Machine) -> Any:
    """Ray's word for: there and nowhere else."""
    return NodeAffinitySchedulingStrategy(machine.id, soft=False)


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"mail": 1, "watch": 1, "wait": 1})
class RayHost:
    """A `Host` as a Ray actor. Mail and questions come in threads of their own, beside the one that runs it."""

    def __init__(self, method: str, setup: bytes) -> None:
        methods.load(method)  # so that what it defines can be unpickled
        self.host = Host(pickle.loads(setup), self._post, lambda vector: ray.put(vector.numpy()))
        self.peers: dict[NodeId, Any] = {}

    def free_port(self) -> int:
        return free_port()

    def connect(self, peers: dict[NodeId, Any], meeting: Meeting | None, followers: list[Any]) -> None:
        self.peers = peers
        if meeting:
            self.host.meet(meeting, lambda what, arguments: _tell(followers, what, arguments))

    def run(self) -> Record:
        return self.host.run()

    @ray.method(concurrency_group="mail")
    def deliver(self, envelope: Envelope) -> None:
        self.host.deliver(envelope)

    @ray.method(concurrency_group="watch")
    def status(self, evaluated: int) -> Status:
        return self.host.status(evaluated)

    @ray.method(concurrency_group="watch")
    def snapshot(self) -> Snapshot:
        return self.host.snapshot()

    @ray.method(concurrency_group="watch")
    def stop(self) -> None:
        self.host.stop()

    @ray.method(concurrency_group="wait")
    def reached(self) -> None:
        self.host.reached.wait()

    def _post(self, to: NodeId, envelope: Envelope) -> None:
        if to not in self.peers:
            raise TrainingError(f"{self.host.me} sent {envelope.kind.__name__} to {to}, which is none of its peers")
        self.peers[to].deliver.remote(envelope)  # copies the vectors now


@ray.remote(num_cpus=0, max_restarts=0)
class RayFollower:
    """One of the other processes of a worker that has several."""

    def __init__(self, setup: bytes, meeting: Meeting) -> None:
        torch.set_num_threads(1)
        told: Setup = pickle.loads(setup)
        assert told.shard is not None
        meet(meeting, told.deadline_s)
        self.replica = ShardedReplica(make_task(told.task), told.run, device(), told.shard)

    def follow(self, what: str, arguments: tuple[int, ...]) -> None:
        self.replica.follow(what, arguments)


def _tell(followers: Sequence[Any], what: str, arguments: tuple[int, ...]) -> None:
    for follower in followers:
        follower.follow.remote(what, arguments)


# Evaluation


@dataclass
class Evaluator:
    """Evaluates models in a thread of this process, one after the other.

    Attributes:
        replica: computes losses; None where nothing is trained.
        recorder: gets an `Evaluation` when its loss is there.
        deadline_s: longest wait for a part of a model.
        whole: makes whole models of the holders' parts.
    """

    replica: Replica | None
    recorder: Recorder
    deadline_s: float
    whole: Callable[[Sequence[Vector]], list[Vector]]
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "evaluations"))
    waiting: list[Future[Evaluation]] = field(default_factory=list)

    def submit(self, evaluation: Evaluation, snapshots: Sequence[Snapshot]) -> None:
        """Evaluate the mean of the parts in `snapshots`."""
        self.waiting.append(self.thread.submit(self._evaluate, evaluation, snapshots))

    def collect(self, *, wait: bool) -> Evaluation | None:
        """Put down the evaluations that are done, or `wait` for all; the last one so far.

        Raises:
            Diverged: a loss is not finite.
        """
        while self.waiting and (wait or self.waiting[0].done()):
            evaluation = self.waiting.pop(0).result()
            if evaluation.loss is not None and not np.isfinite(evaluation.loss):
                raise Diverged(
                    f"the validation loss is {evaluation.loss} at {evaluation.time_s:.1f} s, after {evaluation.inner_steps:,} "
                    "inner steps; try a lower learning rate, inner or outer"
                )
            self.recorder.evaluations.append(evaluation)
        return self.recorder.evaluations[-1] if self.recorder.evaluations else None

    def _evaluate(self, evaluation: Evaluation, snapshots: Sequence[Snapshot]) -> Evaluation:
        if self.replica is None:
            return evaluation
        torch.set_num_threads(1)
        parts = self.whole(vectors(snapshots, self.deadline_s))
        model = outer.mean(parts)
        if len(parts) > 1:
            deviations = [(part - model)[: self.replica.layout.parameters].square().mean() for part in parts]
            evaluation.replica_std = float(torch.stack(deviations).mean().sqrt())
            evaluation.replica_loss = float(np.mean([self.replica.evaluate(part)[0] for part in parts]))
        [evaluation.loss] = self.replica.evaluate(model)
        return evaluation


def vectors(snapshots: Sequence[Snapshot], deadline_s: float) -> list[Vector]:
    """The parts of the model in `snapshots`; they must be here within `deadline_s`."""
    return [torch.from_numpy(np.array(ray.get(snapshot.model, timeout=deadline_s))) for snapshot in snapshots]


# The one who watches


@dataclass
class Watch:
    """Hosts that run, and what is known of them.

    Attributes:
        hosts, places: the Ray actor of each node, and the machine that it is on.
        marks: see `rehearse`.
        setups: what each host was told, pickled.
        followers: the other processes of workers that have several.
        files: where those meet that take inner steps together on one machine.
        deadline_s: longest time without a sign of life or of progress.
    """

    recipe: Recipe
    hosts: dict[NodeId, Any]
    places: dict[NodeId, Machine]
    marks: list[dict[NodeId, int]]
    evaluator: Evaluator
    planned: int
    tokens_per_step: int | None
    progress: Callable[[Now], None]
    started_s: float = 0.0
    statuses: dict[NodeId, Status] = field(default_factory=dict)
    answered_s: dict[NodeId, float] = field(default_factory=dict)
    asked: dict[Any, NodeId] = field(default_factory=dict)
    runs: dict[Any, NodeId] = field(default_factory=dict)
    evaluated: int = 0
    final: list[Snapshot] = field(default_factory=list)
    setups: dict[NodeId, bytes] = field(default_factory=dict)
    followers: list[Any] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def deadline_s(self) -> float:
        return self.recipe.live.deadline_s

    @property
    def holders(self) -> list[NodeId]:
        """Those who hold a part of the model to take home."""
        return list(self.marks[-1])

    @property
    def inner_steps(self) -> int:
        """Absorbed by the model to take home; one that a replica takes in stages is one."""
        return sum(snapshot.absorbed for snapshot in self.final) // self.recipe.pipeline.stages

    def introduce(self, actors: Sequence[Actor], meetings: dict[NodeId, Meeting], followers: dict[NodeId, list[Any]]) -> None:
        """Tell each host where its peers are, and those with whom it takes its inner steps; wait until all are up.

        Raises:
            UserError, TrainingError: one has failed, or is not up in time.
        """
        for actor in actors:
            peers = {peer: self.hosts[peer] for peer in actor.peers() if peer in self.hosts}
            connect = self.hosts[actor.me].connect
            self.runs[connect.remote(peers, meetings.get(actor.me), followers.get(actor.me, []))] = actor.me
        while self.runs:
            ready, late = ray.wait(list(self.runs), timeout=START_S)
            if not ready:
                raise TrainingError(f"{_names([self.runs[ref] for ref in late])} did not start within {START_S:g} s")
            for ref in ready:
                self._fail(ref)
                del self.runs[ref]

    def run(self) -> str:
        """Start all hosts and watch them until a stop rule holds; its name. `final` then has the model to take home.

        Raises:
            Diverged: a loss is not finite.
            TrainingError: a host has failed or died, or has shown no life for longer than the deadline.
        """
        self.started_s = time.perf_counter()
        self.runs = {host.run.remote(): node for node, host in self.hosts.items()}
        self.answered_s = dict.fromkeys(self.hosts, self.now)
        reached = [self.hosts[node].reached.remote() for node in self.holders]
        stop = self.recipe.run
        while True:
            rest_s = TICK_S if stop.seconds is None else max(0.0, min(TICK_S, stop.seconds - self.now))
            ended, _ = ray.wait([*self.runs, *reached], timeout=rest_s)
            for ref in ended:
                if ref in self.runs:
                    self._fail(ref)
                reached.remove(ref)
            self.ask()
            self.progress(self._report())
            self._evaluate_marks()
            last = self.evaluator.collect(wait=stop.target_loss is not None and not reached)
            if stop.target_loss is not None and last and last.loss is not None and last.loss <= stop.target_loss:
                return "target_loss"
            if self.evaluated == len(self.marks):
                return "steps"
            if stop.seconds is not None and self.now >= stop.seconds:
                self.take_home_now()
                return "seconds"
            self._check_deadline()

    def ask(self) -> None:
        """Ask all hosts how things stand, but those that still owe an answer, and note what is said within a tick."""
        silent = set(self.asked.values())
        self.asked |= {host.status.remote(self.evaluated): node for node, host in self.hosts.items() if node not in silent}
        answers, _ = ray.wait(list(self.asked), num_returns=len(self.asked), timeout=TICK_S)
        for ref in answers:
            node = self.asked.pop(ref)
            with suppress(ray.exceptions.RayActorError):  # its run says so too
                self.statuses[node] = ray.get(ref)
                self.answered_s[node] = self.now

    def take_home_now(self) -> None:
        """Have the model evaluated, and taken home, as it is at this moment."""
        refs = [self.hosts[node].snapshot.remote() for node in self.holders]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=self.deadline_s)
        if late:
            raise TrainingError(f"{_names([self.holders[refs.index(ref)] for ref in late])} did not give its model in time")
        self._evaluate(ray.get(refs))

    def stop(self) -> list[Record]:
        """Stop all hosts; what each leaves."""
        for host in self.hosts.values():
            host.stop.remote()
        ready, late = ray.wait(list(self.runs), num_returns=len(self.runs), timeout=self.deadline_s)
        if late:
            raise TrainingError(f"{_names([self.runs[ref] for ref in late])} did not stop within {self.deadline_s:g} s")
        return [record for ref in ready if (record := ray.get(ref))]

    def end(self) -> None:
        """End all hosts, whatever they are doing. They know each other, so Ray would keep them for as long as the cluster runs."""
        self.evaluator.thread.shutdown(wait=False, cancel_futures=True)
        for host in [*self.hosts.values(), *self.followers]:
            ray.kill(host)
        for path in self.files:
            path.unlink(missing_ok=True)

    def meeting_file(self) -> str:
        """A place where processes of one machine can meet, and nobody else can guess."""
        self.files.append(Path(tempfile.gettempdir()) / f"archipel-{secrets.token_hex(16)}")
        return f"file://{self.files[-1]}"

    def _evaluate_marks(self) -> None:
        """Have the marks evaluated that all holders have passed."""
        kept = [self.statuses[node].snapshots for node in self.holders if node in self.statuses]
        while len(kept) == len(self.holders) and self.evaluated < min(map(len, kept)):
            self._evaluate([snapshots[self.evaluated] for snapshots in kept])
            self.evaluated += 1

    def _evaluate(self, snapshots: list[Snapshot]) -> None:
        self.final = snapshots
        inner_steps = self.inner_steps
        first = not inner_steps
        evaluation = Evaluation(
            time_s=max(snapshot.time_s for snapshot in snapshots),
            inner_steps=inner_steps,
            tokens=None if self.tokens_per_step is None else inner_steps * self.tokens_per_step,
            outer_steps=snapshots[0].outer_steps,
            sent_bytes=0 if first else round(sum(status.sent_bytes for status in self.statuses.values())),
            slow_link_bytes=0 if first else round(sum(status.slow_link_bytes for status in self.statuses.values())),
        )
        self.evaluator.submit(evaluation, snapshots)

    # When something is wrong

    def _fail(self, run: Any) -> None:
        """Raise what a host's call has raised, if it has, with its name."""
        node = self.runs[run]
        try:
            ray.get(run)
        except ray.exceptions.RayActorError as error:
            reason = " ".join(str(error).split())[:400]
            raise TrainingError(f"{self._who(node)} died; {self._last_words(node)}; Ray says: {reason}") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (UserError, TrainingError)):
                raise error.cause from None
            raise TrainingError(f"{self._who(node)} failed: {type(error.cause).__name__}: {error.cause}") from None

    def _check_deadline(self) -> None:
        for node, answered_s in self.answered_s.items():
            if self.now - answered_s > self.deadline_s:
                silent = f"has not answered for {self.now - answered_s:.0f} s (live.deadline_s = {self.deadline_s:g})"
                raise TrainingError(f"{self._who(node)} {silent}; {self._last_words(node)}")
        if len(self.statuses) == len(self.hosts) and min(status.quiet_s for status in self.statuses.values()) > self.deadline_s:
            waits = "; ".join(f"{node} {status.doing}" for node, status in list(self.statuses.items())[:8])
            more = f" and {len(self.statuses) - 8} more" if len(self.statuses) > 8 else ""
            raise TrainingError(f"nothing has happened for {self.deadline_s:g} s (live.deadline_s): {waits}{more}")

    def _who(self, node: NodeId) -> str:
        return f"{node} in region {node.region!r} on {self.places[node].address}"

    def _last_words(self, node: NodeId) -> str:
        if node not in self.statuses:
            return "it had not said anything yet"
        status = self.statuses[node]
        return f"last words, at {status.time_s:.1f} s: {status.doing}, {status.events:,} events so far"

    # For the terminal

    def _report(self) -> Now:
        workers = [worker.id for worker in self.recipe.topology.workers if worker.id in self.statuses]
        losses = [loss for worker in workers if (loss := self.statuses[worker].loss) is not None]
        absorbed = sum(status.absorbed for status in self.statuses.values()) // self.recipe.pipeline.stages
        absorbed = min(absorbed, self.planned)
        quiet_s, slowest = max(((status.quiet_s, node) for node, status in self.statuses.items()), default=(0.0, None))
        late = None if slowest is None or quiet_s < 5 * TICK_S else f"{slowest} {self.statuses[slowest].doing}"
        return Now(
            absorbed,
            self.planned,
            self.now,
            float(np.mean(losses)) if losses else None,
            self.tokens_per_step and absorbed * self.tokens_per_step / self.now,
            {worker: max(0.0, 1 - self.statuses[worker].compute_s / self.statuses[worker].time_s) for worker in workers},
            late,
        )


# From a recipe to a run directory


def launch(
    recipe: Recipe,
    directory: Path,
    *,
    address: str | None = None,
    insecure: bool = False,
    progress: Callable[[Now], None] = lambda _: None,
) -> dict[str, Any]:
    """Run `recipe` for real and leave a run directory like the simulator's, with measured times and bytes; its summary.

    After Ctrl-C the directory holds what happened until then, and `KeyboardInterrupt` goes on.

    Args:
        address: of a running Ray cluster; None: a private one on this machine, for the time of the run.
        insecure: join a cluster without token or encryption.
        progress: is told about once a second how things stand.

    Raises:
        UserError: the recipe cannot run, a region has no machine, or the cluster is not protected.
        TrainingError: a node failed, died or fell silent.
    """
    wall_s, threads = time.perf_counter(), torch.get_num_threads()
    if recipe.live.processes > 1 and recipe.pipeline.stages > 1:
        raise UserError(
            f"live.processes = {recipe.live.processes}: a stage of a pipeline is one process; give processes = 1 or stages = 1"
        )
    if recipe.faults is not None and recipe.faults != FaultsConfig():
        raise UserError("faults: `archipel launch` makes none on purpose; `archipel run` does, on the virtual clock")
    torch.set_num_threads(1)  # the workers need the cores
    try:
        experiment.check_reachable(recipe)
        task = None if isinstance(recipe.task, NoTask) else make_task(recipe.task)
        steps = experiment.planned_steps(recipe, task.tokens_per_step if task else None)
        workers, seed = recipe.topology.workers, recipe.run.seed
        run = Run(steps, recipe.replicas, seed)
        replica = None
        if task is not None:
            replica = Replica(task, run, device())
        profile = recipe.profile or measure_profile(replica, shards(recipe)[workers[0].id])
        recipe = replace(recipe, profile=profile)
        marks = rehearse(recipe, profile, steps)
        theta = replica.layout.read(replica.module) if replica else torch.empty(0)
        pipeline, layouts = experiment.pipeline_of(recipe), [replica.layout] if replica else []
        if task and pipeline:
            check_micro_batches(task, shards(recipe)[workers[0].id], pipeline.micro_batches)
            layouts = [Layout.of(part) for part in cut(task.seeded_model(seed), pipeline.stages)]
            pipeline = replace(pipeline, parameters=tuple(layout.parameters for layout in layouts))
        actors = experiment.build_actors(recipe, pipeline, theta, layouts)
        with session(address):
            if address is not None and not insecure:
                check_protected(machines())
            watch = board(recipe, actors, run, marks, task, replica, pipeline, address, progress)
            try:
                meetings, followers = meetings_of(watch, pipeline, insecure=insecure) if task else ({}, {})
                watch.introduce(actors, meetings, followers)
                stopped = watch.run()
                return _leave(directory, recipe, watch, task, replica, stopped, wall_s)
            except Diverged as error:
                raise Diverged(f"{recipe.label}: {error}") from None
            except KeyboardInterrupt:
                watch.take_home_now()
                _leave(directory, recipe, watch, task, replica, "interrupted", wall_s)
                raise
            finally:
                watch.end()
    finally:
        torch.set_num_threads(threads)


def measure_profile(replica: Replica | None, shard: Shard) -> Profile:
    """The profile `measured`: the weights of this task, and the time of one of its inner steps on this machine.

    Raises:
        UserError: nothing is trained, so there is nothing to measure.
    """
    if replica is None:
        raise UserError("profile = 'measured': task none trains nothing that could be measured")
    return Profile(name="measured", model_bytes=4 * replica.layout.numel, step_time_s=median_step_time_s(replica, shard))


def shards(recipe: Recipe) -> dict[NodeId, Shard]:
    """Each worker's data; all stages of a replica have those of the first one."""
    workers, pipeline = [worker.id for worker in recipe.topology.workers], experiment.pipeline_of(recipe)
    readers = pipeline.nodes[0] if pipeline else workers
    data = shards_of([reader.region for reader in readers], recipe.run.seed)
    return {worker: data[i // recipe.pipeline.stages] for i, worker in enumerate(workers)}


def board(
    recipe: Recipe,
    actors: Sequence[Actor],
    run: Run,
    marks: list[dict[NodeId, int]],
    task: Task | None,
    replica: Replica | None,
    pipeline: Pipeline | None,
    address: str | None,
    progress: Callable[[Now], None],
) -> Watch:
    """Make a host for each actor, on the machine where it belongs."""
    profile, workers, data = recipe.profile, recipe.topology.workers, shards(recipe)
    assert profile is not None
    fastest = max(worker.speed for worker in workers)
    speed = {worker.id: worker.speed / fastest for worker in workers}
    paced = recipe.live.pace == "profile"
    nodes, epoch = [actor.me for actor in actors], secrets.randbits(62)
    live, stages = recipe.live, recipe.pipeline.stages
    places = place(nodes, list(data), machines(), live.gpu_fraction * live.processes, address)
    hosts: dict[NodeId, Any] = {}
    setups: dict[NodeId, bytes] = {}
    ranks = {worker: i for i, worker in enumerate(data)}
    by_replica = tuple(list(data.values())[::stages])
    for rank, actor in enumerate(actors):
        me = actor.me
        setup = Setup(
            actor=pickle.dumps(actor),
            seed_rank=rank,
            task=recipe.task,
            run=run,
            shard=data.get(me),
            marks=tuple(mark[me] for mark in marks) if me in marks[-1] else (),
            step_time_s=profile.step_time_s / speed[me] / stages if paced and me in speed else 0.0,
            epoch=epoch,
            rank=ranks.get(me, 0),
            pipeline=pipeline,
            shards=by_replica,
            processes=live.processes,
            deadline_s=live.deadline_s,
        )
        options = RayHost.options(  # type: ignore[attr-defined]
            scheduling_strategy=on(places[me]),
            num_gpus=live.gpu_fraction if places[me].gpus and me in data else 0,
        )
        setups[me] = pickle.dumps(setup)
        hosts[me] = options.remote(recipe.method, setups[me])
    return Watch(
        recipe,
        hosts,
        places,
        marks,
        Evaluator(replica, Recorder(), live.deadline_s, lambda parts: whole(parts, list(marks[-1]), pipeline)),
        run.total_steps,
        task.tokens_per_step if task else None,
        progress,
        setups=setups,
    )


def whole(parts: Sequence[Vector], holders: Sequence[NodeId], pipeline: Pipeline | None) -> list[Vector]:
    """Whole models of the parts that `holders` have: the parts themselves, or those of a replica's stages joined."""
    if pipeline is None:
        return list(parts)
    held = dict(zip(holders, parts, strict=True))
    stages = [[held[node] for node in stage if node in held] for stage in pipeline.nodes]
    return [join(group, pipeline.parameters) for group in zip(*stages, strict=True)]


def meetings_of(
    watch: Watch, pipeline: Pipeline | None, *, insecure: bool
) -> tuple[dict[NodeId, Meeting], dict[NodeId, list[Any]]]:
    """Where the workers meet those with whom they take inner steps, and the other processes of each worker.

    Raises:
        UserError: stages on several machines would meet over a network where anybody could listen.
    """
    live, places = watch.recipe.live, watch.places
    workers = [worker.id for worker in watch.recipe.topology.workers]
    if pipeline:
        here = {places[worker].id for worker in workers}
        if len(here) > 1 and not insecure and not all(ipaddress.ip_address(places[w].address).is_loopback for w in workers):
            raise UserError(
                f"pipeline.stages = {pipeline.stages}: stages on {len(here)} machines send activations over torch.distributed, "
                "which neither encrypts nor asks who is there; see docs/security.md, or give --insecure if nobody else can reach it"
            )
        where = watch.meeting_file()
        if len(here) > 1:
            port = ray.get(watch.hosts[workers[0]].free_port.remote(), timeout=START_S)
            where = f"tcp://{places[workers[0]].address}:{port}"
        return {worker: Meeting(where, i, len(workers)) for i, worker in enumerate(workers)}, {}
    if live.processes == 1:
        return {}, {}
    meetings = {worker: Meeting(watch.meeting_file(), 0, live.processes) for worker in workers}
    followers = {
        worker: [
            RayFollower.options(  # type: ignore[attr-defined]
                scheduling_strategy=on(places[worker]), num_gpus=live.gpu_fraction if places[worker].gpus else 0
            ).remote(watch.setups[worker], replace(meeting, rank=rank))
            for rank in range(1, live.processes)
        ]
        for worker, meeting in meetings.items()
    }
    watch.followers = [follower for group in followers.values() for follower in group]
    return meetings, followers


def _leave(
    directory: Path, recipe: Recipe, watch: Watch, task: Task | None, replica: Replica | None, stopped: str, wall_s: float
) -> dict[str, Any]:
    """Stop the hosts, put together what they leave, and write the run directory."""
    records = watch.stop()
    watch.evaluator.collect(wait=True)
    time_s = max(snapshot.time_s for snapshot in watch.final)
    recorder = merged([record.recorder for record in records], time_s)
    recorder.evaluations = watch.evaluator.recorder.evaluations
    profile, used = recipe.profile, set(watch.places.values())
    assert profile is not None
    modelled = (
        f"the pace: an inner step takes at least {profile.step_time_s * 1e3:.6g} ms ÷ its worker's speed "
        f"(profile {profile.name}, topology {recipe.topology.name})"
    )
    ended = Ended(
        time_s=time_s,
        inner_steps=watch.inner_steps,
        outer_steps=watch.final[0].outer_steps,
        local_updates=sum(record.local_updates for record in records),
        parts=watch.evaluator.whole(vectors(watch.final, watch.deadline_s)) if replica else [],
        nodes=list(watch.hosts),
        recorder=recorder,
        task=task,
        layout=replica.layout if replica else None,
        integers=largest(record.integers for record in records),
        real=(f"gradients of {task.description}" if task else "no gradients (task none)")
        + f"; the clock and the bytes, measured on {len(used)} machine{'s' * (len(used) > 1)}",
        modelled=modelled if recipe.live.pace == "profile" else "",
        clock="measured",
        processes=len(recipe.topology.workers) * recipe.live.processes,
    )
    experiment.start_directory(directory, recipe)
    return experiment.leave(directory, recipe, ended, stopped, time.perf_counter() - wall_s)
