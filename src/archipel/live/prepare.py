"""What a live run is put together from, before its first process is started.

What belongs here: checks that need no other process, and what each host will be told. What does
not: processes (`launch.py` and what it calls).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from archipel import assemble, methods
from archipel.actor import Actor, NodeId, Vector
from archipel.errors import UserError
from archipel.live.compute import device
from archipel.live.initial import digest, pack
from archipel.live.on_purpose import faults_of
from archipel.live.protocol import HostSetup, SaveFolder
from archipel.live.rehearsal import rehearse
from archipel.recipe import Recipe
from archipel.run.census import Plan
from archipel.sim.schedule import Faults
from archipel.sim.topology import Profile
from archipel.train.configs import NoTask
from archipel.train.cut import boundary_bytes, parts_of
from archipel.train.data import Shard, shards_of
from archipel.train.pipeline import Pipeline, split
from archipel.train.pool_process import median_step_time_s
from archipel.train.replica import Replica, Run, layout_of
from archipel.train.task import CPU, Task, make_task
from archipel.train.trial import try_out


@dataclass(frozen=True)
class Parts:
    """What a live run is put together from, on this machine.

    Attributes:
        recipe: with the profile filled in.
        actors: all of them, as they are at the start.
        run: what the learning rate depends on.
        marks: see `rehearse`; empty where a stopped run goes on.
        task: what is trained; None: nothing.
        replica: of the whole model, in this process; None where nothing is trained.
        weights: the initial weights of each stage of the model, one where there is no pipeline;
            none where nothing is trained.
        pipeline: how workers share the replicas' stages; None: each has a whole replica.
        faults: what goes wrong on purpose; None: nothing.
    """

    recipe: Recipe
    actors: Sequence[Actor]
    run: Run
    marks: list[dict[NodeId, int]]
    task: Task | None
    replica: Replica | None
    weights: list[Vector]
    pipeline: Pipeline | None
    faults: Faults | None

    def parameters(self, node: NodeId) -> int:
        """How many leading entries of a node's vectors are parameters."""
        if self.pipeline:
            return self.pipeline.parameters_of(node)
        return self.replica.layout.parameters if self.replica else 0

    @property
    def plan(self) -> Plan:
        run, steps = self.recipe.run, self.run.total_steps
        return Plan(
            steps,
            run.seconds,
            run.target_loss,
            evaluate_every=max(1, steps // run.evaluations),
            tokens_per_step=self.task.tokens_per_step if self.task else None,
            stages=self.recipe.pipeline.stages,
            strict=run.strict,
        )


def prepare(recipe: Recipe, *, resume: bool) -> Parts:
    """Whatever can be done, and go wrong, before the first process is started. A run that goes on
    has no rehearsal.
    """
    assemble.check_reachable(recipe)
    task = None if isinstance(recipe.task, NoTask) else make_task(recipe.task)
    steps = assemble.planned_steps(recipe, task.tokens_per_step if task else None)
    workers, seed = recipe.topology.workers, recipe.run.seed
    run = Run(steps, recipe.replicas, seed)
    replica = None if task is None else Replica(task, run, device())
    pipeline = assemble.pipeline_of(recipe)
    if replica:
        try_out(replica, shards(recipe)[workers[0].id])
    profile = recipe.profile or measure_profile(replica, shards(recipe)[workers[0].id], pipeline)
    recipe = replace(recipe, profile=profile)
    with methods.blaming(recipe.method):  # what fails here fails before anything is started
        marks = [] if resume else rehearse(recipe, profile, steps)
    theta = replica.first.clone() if replica else torch.empty(0)
    layouts = [replica.layout] if replica else []
    if task and pipeline:
        stages = parts_of(task, seed, pipeline.stages, pipeline.micro_batches)
        layouts = [layout_of(task, stage, CPU) for stage in stages]
        pipeline = replace(pipeline, parameters=tuple(layout.parameters for layout in layouts))
    actors = assemble.build_actors(recipe, pipeline, theta, layouts)
    weights = split(theta, layouts) if pipeline and layouts else [theta] if replica else []
    faults = faults_of(recipe, [actor.me for actor in actors])
    return Parts(recipe, actors, run, marks, task, replica, weights, pipeline, faults)


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


def sizes(recipe: Recipe) -> tuple[int, int]:
    """Entries of a whole vector of the recipe's model, and bytes that the batch of one inner step
    sends over a boundary between stages.
    """
    task, config = make_task(recipe.task), recipe.pipeline
    numel = layout_of(task, task.seeded_model(recipe.run.seed), CPU).numel
    if config.stages == 1:
        return numel, 0
    return numel, boundary_bytes(task, config.stages, config.micro_batches)


def shards(recipe: Recipe) -> dict[NodeId, Shard]:
    """Each worker's data; all stages of a replica have those of the first one."""
    workers, pipeline = (
        [worker.id for worker in recipe.topology.workers],
        assemble.pipeline_of(recipe),
    )
    readers = pipeline.nodes[0] if pipeline else workers
    data = shards_of([reader.region for reader in readers], recipe.run.seed)
    return {worker: data[i // recipe.pipeline.stages] for i, worker in enumerate(workers)}


def make_setups(
    parts: Parts, folder: Path | None, number: int, *, resume: bool
) -> dict[NodeId, HostSetup]:
    """What each host is told when it is made.

    Args:
        folder: where hosts save their parts, each in a folder of its own; None: nothing is saved.
        number: tells this run's saves from those of another run of the same name.
        resume: hosts go on from what they have saved.
    """
    recipe, marks, epoch = parts.recipe, parts.marks, secrets.randbits(62)
    data, stages = shards(recipe), recipe.pipeline.stages
    by_replica = tuple(list(data.values())[::stages])
    rank = {worker: i for i, worker in enumerate(data)}
    pace_s = _pace_s(recipe)
    waits = recipe.run.target_loss is not None or stages > 1
    text = f"{recipe.to_yaml()}# run {number}\n"
    weights = digest(parts.weights)
    return {
        actor.me: HostSetup(
            actor=pack(actor, parts.weights),
            seed_rank=seed_rank,
            task=recipe.task,
            run=parts.run,
            shard=data.get(actor.me),
            marks=tuple(mark[actor.me] for mark in marks if actor.me in marks[-1]),
            step_time_s=pace_s.get(actor.me, 0.0),
            epoch=epoch,
            weights=weights,
            rank=rank.get(actor.me, 0),
            pipeline=parts.pipeline,
            shards=by_replica,
            processes=recipe.live.processes,
            deadline_s=recipe.live.deadline_s,
            parameters=parts.parameters(actor.me),
            topology=recipe.topology,
            screening=recipe.screening(live=True),
            wire=recipe.wire,
            save_folder=SaveFolder(folder / actor.me.region / actor.me.name, text)
            if folder
            else None,
            waits_for_release=waits,
            begins="resume" if resume else "start",
        )
        for seed_rank, actor in enumerate(parts.actors)
    }


def _pace_s(recipe: Recipe) -> dict[NodeId, float]:
    """The least time of an inner step of each worker that acts out a slower machine."""
    workers, profile = recipe.topology.workers, recipe.profile
    assert profile is not None
    if recipe.live.pace != "profile":
        return {}
    fastest = max(worker.speed for worker in workers)
    at_full_speed_s = profile.step_time_s / recipe.pipeline.stages
    return {worker.id: at_full_speed_s / (worker.speed / fastest) for worker in workers}
