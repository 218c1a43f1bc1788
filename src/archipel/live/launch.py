"""The real clock: the simulator's actors, each in a Ray actor of its own, and the one who watches
over them.

What belongs here: how mail gets from one host to another, whether hosts are alive and what happens
if not, and the run directory of a live run. What does not: what a host does with its mail
(`host.py`), where hosts belong (`cluster.py`), what a method does.

A live run starts with a rehearsal: the simulator runs the same recipe without gradients, in
milliseconds. It shows that the method comes to its end, and at which of its own inner steps each
holder of the model passes each mark. Holders keep their part of the model at just these counts,
however long they really take: so a live run evaluates, and takes home, what the simulator would.

A host that dies or falls silent is lost: all others are told so. It is started again with what it
saved last, and they are told that too. From then on nothing is as rehearsed, and the model is
evaluated when it is seen to have passed a mark. A whole run that was stopped goes on in the same
way: every host is started again.
"""

from __future__ import annotations

import ipaddress
import pickle
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from archipel import checkpoint, experiment
from archipel.actor import Actor, NodeId, Vector
from archipel.checkpoint import Every, Surroundings
from archipel.errors import Diverged, TrainingError, UserError
from archipel.experiment import CHECKPOINTS, INTERRUPTED, LIVE, Ended
from archipel.live.cluster import check_protected, machines, place, session
from archipel.live.host import Meeting, Saves, Setup, device
from archipel.live.ray_host import ask_for_port
from archipel.live.watch import Evaluator, Now, Watch
from archipel.recipe import Recipe
from archipel.run.census import Plan
from archipel.run.metrics import Recorder, merged
from archipel.run.observer import Observer
from archipel.sim.clock import Simulator
from archipel.sim.faults import FaultsConfig
from archipel.sim.network import Network
from archipel.sim.topology import Profile
from archipel.train.cut import boundary_bytes, parts_of
from archipel.train.data import Shard, shards_of
from archipel.train.pipeline import Pipeline, join
from archipel.train.pool_process import median_step_time_s
from archipel.train.replica import Replica, Run, layout_of
from archipel.train.task import CPU, NoTask, Task, make_task
from archipel.train.trainer import NoTraining
from archipel.train.trial import try_out
from archipel.vector import largest

# Rehearsal


@dataclass
class Marks(Observer):
    """What every holder of the model has counted, wherever the simulator evaluates it."""

    marks: list[Mapping[NodeId, int]] = field(default_factory=list)

    def evaluates(self, trained: Mapping[NodeId, int]) -> None:
        self.marks.append(trained)


def rehearse(recipe: Recipe, profile: Profile, steps: int) -> list[dict[NodeId, int]]:
    """For each mark, the first one at 0 and the last one at the end, what every holder of the model
    will have counted.

    Raises:
        UserError, TrainingError: the method would not come to its end; see `Simulator.run`.
    """
    seed, pipeline, rehearsal = recipe.run.seed, experiment.pipeline_of(recipe), Marks()
    Simulator(
        experiment.build_actors(recipe, pipeline, torch.empty(0), ()),
        recipe.topology.workers,
        Network(recipe.topology, np.random.default_rng((seed, 0x2E7))),
        profile,
        NoTraining(),
        Recorder(),
        Plan(
            steps,
            evaluate_every=max(1, steps // recipe.run.evaluations),
            stages=recipe.pipeline.stages,
        ),
        numel=0,
        parameters=0,
        seed=seed,
        pipeline=pipeline,
        observers=[rehearsal],
    ).run()
    *marks, last = map(dict, rehearsal.marks)
    if len(last) == 1:  # asynchronous methods overshoot by other amounts on another clock
        last = dict.fromkeys(last, steps)
    return [*marks, last]


# From a recipe to a run directory


@dataclass(frozen=True)
class Parts:
    """What a live run is put together from, on this machine.

    Attributes:
        recipe: with the profile filled in.
        actors: all of them, as they are at the start.
        run: what the learning rate depends on.
        marks: see `rehearse`; empty where a run goes on.
        task, replica, pipeline: None where nothing is trained, or there are no stages.
    """

    recipe: Recipe
    actors: Sequence[Actor]
    run: Run
    marks: list[dict[NodeId, int]]
    task: Task | None
    replica: Replica | None
    pipeline: Pipeline | None

    def parameters(self, node: NodeId) -> int:
        """How many leading entries of a node's vectors are parameters."""
        if self.pipeline:
            return self.pipeline.parameters_of(node)
        return self.replica.layout.parameters if self.replica else 0


def launch(
    recipe: Recipe,
    directory: Path,
    *,
    address: str | None = None,
    insecure: bool = False,
    every: Every | None = None,
    resume: bool = False,
    progress: Callable[[Now], None] = lambda _: None,
) -> dict[str, Any]:
    """Run `recipe` for real and leave a run directory like the simulator's, with measured times and
    bytes; its summary.

    After Ctrl-C the directory holds what happened until then, and `KeyboardInterrupt` goes on.
    After an error it holds what has been saved, if anything has.

    Args:
        address: of a running Ray cluster; None: a private one on this machine, for the time of the
            run.
        insecure: join a cluster without token or encryption.
        every: how often each node saves its part, and then on Ctrl-C too; None: never.
        resume: go on with the run that was stopped in `directory`.
        progress: is told about once a second how things stand.

    Raises:
        UserError: the recipe cannot run, a region has no machine, the cluster is not protected, or
            there is nothing to go on from.
        TrainingError: a node failed, or died or fell silent once too often; or a save cannot be
            written.
    """
    wall_s, threads = time.perf_counter(), torch.get_num_threads()
    check_launch(recipe, every)
    own = {}
    if resume:
        with experiment.alone_in(directory):
            own = checkpoint.load(folder_of(directory), Surroundings({}), recipe.to_yaml())
    torch.set_num_threads(1)  # the workers need the cores
    try:
        parts = prepare(recipe, resume=resume)
        with session(address):
            if address is not None and not insecure:
                check_protected(machines())
            watch = board(parts, directory, own, address, every, progress)
            with _kept_if_saved(directory, recipe, resume=resume):
                try:
                    watch.start(meetings_of(watch, parts, insecure=insecure))
                    if not resume:
                        experiment.start_directory(directory, parts.recipe)
                    with experiment.alone_in(directory):
                        stopped = watch.run()
                        return _leave(directory, parts, watch, stopped, wall_s)
                except KeyboardInterrupt:
                    if watch.started_s:
                        watch.ask()
                        watch.take_home_now()
                        watch.save_all()
                    if watch.final:
                        _leave(directory, parts, watch, INTERRUPTED, wall_s)
                    raise
                finally:
                    watch.end()
    finally:
        torch.set_num_threads(threads)


def check_launch(recipe: Recipe, every: Every | None) -> None:
    """Raise a `UserError` if a recipe that can be simulated cannot be launched, or cannot be
    saved.
    """
    stages, processes = recipe.pipeline.stages, recipe.live.processes
    if processes > 1 and stages > 1:
        raise UserError(
            f"live.processes = {processes}: a stage of a pipeline is one process; give processes = "
            "1 or stages = 1"
        )
    if recipe.faults is not None and recipe.faults != FaultsConfig():
        raise UserError(
            "faults: `archipel launch` makes none on purpose; `archipel run` does, on the virtual "
            "clock"
        )
    if every is not None and stages > 1:
        raise UserError(
            f"--checkpoint-every: live runs in stages (pipeline.stages = {stages}) cannot be saved "
            "yet"
        )
    if every is not None and every.tokens is not None and isinstance(recipe.task, NoTask):
        raise UserError(
            f"--checkpoint-every {every.tokens}: task none has no tokens; give seconds, such as "
            "600s"
        )


def folder_of(directory: Path) -> Path:
    """Where a live run in `directory` saves what nobody but its watch knows; each node has a folder
    in there.
    """
    return directory.resolve() / CHECKPOINTS / LIVE


def saved(directory: Path) -> bool:
    """A node of the live run in `directory` has saved its part."""
    return any(folder_of(directory).glob("*/*/event-*"))


@contextmanager
def _kept_if_saved(directory: Path, recipe: Recipe, *, resume: bool) -> Iterator[None]:
    """Remove a run directory if an error ends the run and nothing can go on from there."""
    try:
        yield
    except (UserError, TrainingError, OSError) as error:
        if not resume and not saved(directory) and experiment.is_run_directory(directory):
            shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, Diverged):
            raise Diverged(f"{recipe.label}: {error}") from None
        raise


def prepare(recipe: Recipe, *, resume: bool) -> Parts:
    """Whatever can be done, and go wrong, before the first process is started. What goes on is as
    rehearsed no more.
    """
    experiment.check_reachable(recipe)
    task = None if isinstance(recipe.task, NoTask) else make_task(recipe.task)
    steps = experiment.planned_steps(recipe, task.tokens_per_step if task else None)
    workers, seed = recipe.topology.workers, recipe.run.seed
    run = Run(steps, recipe.replicas, seed)
    replica = None if task is None else Replica(task, run, device())
    pipeline = experiment.pipeline_of(recipe)
    if replica:
        try_out(replica, shards(recipe)[workers[0].id])
    profile = recipe.profile or measure_profile(replica, shards(recipe)[workers[0].id], pipeline)
    recipe = replace(recipe, profile=profile)
    marks = [] if resume else rehearse(recipe, profile, steps)
    theta = replica.first.clone() if replica else torch.empty(0)
    layouts = [replica.layout] if replica else []
    if task and pipeline:
        stages = parts_of(task, seed, pipeline.stages, pipeline.micro_batches)
        layouts = [layout_of(task, stage, CPU) for stage in stages]
        pipeline = replace(pipeline, parameters=tuple(layout.parameters for layout in layouts))
    return Parts(
        recipe,
        experiment.build_actors(recipe, pipeline, theta, layouts),
        run,
        marks,
        task,
        replica,
        pipeline,
    )


def measure_profile(
    replica: Replica | None, shard: Shard, pipeline: Pipeline | None = None
) -> Profile:
    """The profile `measured`: the weights of this task, and the time of one of its inner steps on
    this machine.

    Raises:
        UserError: nothing is trained, so there is nothing to measure.
    """
    if replica is None:
        raise UserError("profile = 'measured': task none trains nothing that could be measured")
    return Profile(
        name="measured",
        model_bytes=4 * replica.layout.numel,
        step_time_s=median_step_time_s(replica, shard),
        activation_bytes=boundary_bytes(replica.task, pipeline.stages, pipeline.micro_batches)
        if pipeline
        else 0,
    )


def shards(recipe: Recipe) -> dict[NodeId, Shard]:
    """Each worker's data; all stages of a replica have those of the first one."""
    workers, pipeline = (
        [worker.id for worker in recipe.topology.workers],
        experiment.pipeline_of(recipe),
    )
    readers = pipeline.nodes[0] if pipeline else workers
    data = shards_of([reader.region for reader in readers], recipe.run.seed)
    return {worker: data[i // recipe.pipeline.stages] for i, worker in enumerate(workers)}


def board(
    parts: Parts,
    directory: Path,
    own: dict[str, Any],
    address: str | None,
    every: Every | None,
    progress: Callable[[Now], None],
) -> Watch:
    """Give each actor a machine, and somebody who watches over all. `own`: what that one saved when
    the run was stopped.
    """
    recipe, marks = parts.recipe, parts.marks
    profile, workers, data, live = (
        recipe.profile,
        recipe.topology.workers,
        shards(recipe),
        recipe.live,
    )
    assert profile is not None
    fastest = max(worker.speed for worker in workers)
    pace_s = {
        worker.id: profile.step_time_s / (worker.speed / fastest) / recipe.pipeline.stages
        for worker in workers
    }
    folder, number, epoch = (
        folder_of(directory),
        own.get("number", secrets.randbits(62)),
        secrets.randbits(62),
    )
    ranks, by_replica = (
        {worker: i for i, worker in enumerate(data)},
        tuple(list(data.values())[:: recipe.pipeline.stages]),
    )
    setups = {
        actor.me: Setup(
            actor=pickle.dumps(actor),
            seed_rank=rank,
            task=recipe.task,
            run=parts.run,
            shard=data.get(actor.me),
            marks=tuple(mark[actor.me] for mark in marks)
            if marks and actor.me in marks[-1]
            else (),
            step_time_s=pace_s.get(actor.me, 0.0) if live.pace == "profile" else 0.0,
            epoch=epoch,
            rank=ranks.get(actor.me, 0),
            pipeline=parts.pipeline,
            shards=by_replica,
            processes=live.processes,
            deadline_s=live.deadline_s,
            parameters=parts.parameters(actor.me),
            screening=recipe.screening(live=True),
            saves=Saves(
                folder / actor.me.region / actor.me.name, f"{recipe.to_yaml()}# run {number}\n"
            )
            if every
            else None,
            begins="resume" if own else "start",
        )
        for rank, actor in enumerate(parts.actors)
    }
    return Watch(
        recipe=recipe,
        setups=setups,
        peers={actor.me: tuple(actor.peers()) for actor in parts.actors},
        places=place(
            list(setups), list(data), machines(), live.gpu_fraction * live.processes, address
        ),
        marks=marks,
        evaluator=Evaluator(
            parts.replica,
            Recorder(evaluations=own.get("evaluations", [])),
            live.deadline_s,
            lambda held: whole(held, list(marks[-1]) if marks else [], parts.pipeline),
        ),
        planned=parts.run.total_steps,
        tokens_per_step=parts.task.tokens_per_step if parts.task else None,
        progress=progress,
        folder=folder,
        every=every,
        number=number,
        address=address,
        spent_s=own.get("time_s", 0.0),
        exact=not own,
        restarts=own.get("restarts", {}),
        saves=own.get("saves", 0),
        sent_bytes=max(
            (evaluation.sent_bytes for evaluation in own.get("evaluations", [])), default=0.0
        ),
        slow_link_bytes=max(
            (evaluation.slow_link_bytes for evaluation in own.get("evaluations", [])), default=0.0
        ),
    )


def whole(
    parts: Sequence[Vector], holders: Sequence[NodeId], pipeline: Pipeline | None
) -> list[Vector]:
    """Whole models of the parts that `holders` have: the parts themselves, or those of a replica's
    stages joined.
    """
    if pipeline is None:
        return list(parts)
    held = dict(zip(holders, parts, strict=True))
    stages = [[held[node] for node in stage if node in held] for stage in pipeline.nodes]
    return [join(group, pipeline.parameters) for group in zip(*stages, strict=True)]


def meetings_of(watch: Watch, parts: Parts, *, insecure: bool) -> dict[NodeId, Meeting]:
    """Where the stages of a model meet.

    Raises:
        UserError: on several machines they would meet over a network where anybody could listen.
    """
    if not parts.pipeline or not parts.task:
        return {}
    places, workers = watch.places, [worker.id for worker in parts.recipe.topology.workers]
    here = {places[worker].id for worker in workers}
    where = watch.meeting_file()
    if len(here) > 1:
        if not insecure and not all(
            ipaddress.ip_address(places[worker].address).is_loopback for worker in workers
        ):
            raise UserError(
                f"pipeline.stages = {parts.recipe.pipeline.stages}: stages on {len(here)} machines "
                "send activations over "
                "torch.distributed, which neither encrypts nor asks who is there; see "
                "docs/security.md, or give --insecure if "
                "nobody else can reach it"
            )
        where = f"tcp://{places[workers[0]].address}:{ask_for_port(places[workers[0]])}"
    return {worker: Meeting(where, i, len(workers)) for i, worker in enumerate(workers)}


def _leave(
    directory: Path, parts: Parts, watch: Watch, stopped: str, wall_s: float
) -> dict[str, Any]:
    """Stop the hosts, put together what they leave, and write the run directory."""
    records, recipe = watch.stop(), parts.recipe
    watch.evaluator.collect(wait=True)
    if not watch.final:
        raise TrainingError("nobody who holds the model was there when it was to be taken home")
    time_s = max(snapshot.time_s for snapshot in watch.final)
    recorder = merged([record.recorder for record in records], time_s)
    recorder.evaluations = watch.evaluator.recorder.evaluations
    recorder.restarted = watch.restarts
    profile, used = recipe.profile, set(watch.places.values())
    assert profile is not None
    if parts.replica and not watch.evaluator.parts:
        raise TrainingError("the model to take home was lost with those who held it")
    modelled = (
        f"the pace: an inner step takes at least {profile.step_time_s * 1e3:.6g} ms ÷ its worker's "
        "speed "
        f"(profile {profile.name}, topology {recipe.topology.name})"
    )
    ended = Ended(
        time_s=time_s,
        inner_steps=watch.inner_steps,
        absorbed_steps=watch.absorbed_steps,
        outer_steps=watch.final[0].outer_steps,
        local_updates=sum(record.local_updates for record in records),
        parts=watch.evaluator.parts,
        nodes=list(watch.setups),
        recorder=recorder,
        task=parts.task,
        layout=parts.replica.layout if parts.replica else None,
        integers=largest(record.integers for record in records),
        real=(
            f"gradients of {parts.task.description}" if parts.task else "no gradients (task none)"
        )
        + f"; the clock and the bytes, measured on {len(used)} machine{'s' * (len(used) > 1)}",
        modelled=modelled if recipe.live.pace == "profile" else "",
        clock="measured",
        processes=len(recipe.topology.workers) * recipe.live.processes,
    )
    return experiment.leave(
        directory, recipe, ended, stopped, time.perf_counter() - wall_s + watch.spent_s
    )
