"""What a recipe would do, without doing it.

What belongs here: what can be computed from a recipe, and what a simulation of it without gradients
shows. What does not: the figures' own arithmetic (`memory.py`, `train/footprint.py`, `sim/`), and
how they are printed (`cli/recipes.py`).

Times and bytes are those that the simulator models for the recipe's network and profile. Nothing is
trained, and no model is made, unless its own code needs values.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from archipel.actor import Message, NodeId
from archipel.assemble import (
    build_actors,
    check_reachable,
    pipeline_of,
    planned_steps,
    warn_of_divergence,
    warn_of_precision,
    warn_of_size,
)
from archipel.errors import UserError
from archipel.memory import Memory, machine_bytes, memory_of, too_large
from archipel.recipe import Recipe
from archipel.recipe.sections import RunConfig
from archipel.run.codec import Codec, coded_bytes
from archipel.run.metrics import link_name
from archipel.run.observer import Observer
from archipel.run.wire import BYTES_PER_ENTRY
from archipel.sim.topology import MEASURED, Link, Topology
from archipel.simulation import make_simulator, measure_profile
from archipel.tracking import trackers_of
from archipel.train.configs import NoTask
from archipel.train.footprint import Footprint, footprint_of
from archipel.train.task import Schedule, Task, make_task


@dataclass(frozen=True)
class OnWire:
    """Bytes of a vector of all weights: as fp32, and by the recipe's codec where it is a difference
    of weights, or weights themselves.
    """

    fp32_bytes: int
    difference_bytes: int
    value_bytes: int


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        description: the task's own.
        parameters: trainable parameters.
        message: what a live run sends.
        lr: learning rate of the first inner step, the largest, and that of the last one.
    """

    description: str
    parameters: int
    message: OnWire
    lr: tuple[float, float, float]


@dataclass(frozen=True)
class Modelled:
    """What a simulation without gradients shows: what the profile and the topology make of it.

    Attributes:
        message: what a vector of weights is taken for.
        step_time_s: of an inner step of the fastest worker.
        time_s: length of the run.
        stopped: the stop rule that ends it.
        steps_of: inner steps that each worker finishes until then.
        idle_fraction: of the workers' time; None: no time passes.
        sent_bytes, slow_link_bytes: on all links, and on those between regions.
        by_link: bytes on each link between regions, both ways together, most first. What is missing
            to `slow_link_bytes` has no certain way: an all-reduce by a tree, activations between
            stages, and what faults have sent in vain.
    """

    message: OnWire
    step_time_s: float
    time_s: float
    stopped: str
    steps_of: dict[str, int]
    idle_fraction: float | None
    sent_bytes: int
    slow_link_bytes: int
    by_link: dict[str, int]


@dataclass(frozen=True)
class Preview:
    """What a recipe would do.

    Attributes:
        label, method, wire: as the recipe has them.
        changed: settings of the method that are not the published ones: what it has, and those.
        topology, profile: their names.
        regions, workers, replicas: how many there are.
        slowest_link: between two regions, in words; None: there is none.
        steps, tokens: that are planned for all workers together; no tokens where none are counted.
        model: None where nothing is trained.
        memory: None there, and where the method's actors cannot be made of vectors without values.
        machine_bytes: memory of this machine; None: not known.
        modelled: None where the profile is measured when the run starts.
        warnings: what a run would warn of before it starts.
    """

    label: str
    method: str
    wire: Codec
    changed: dict[str, tuple[Any, Any]]
    topology: str
    profile: str
    regions: int
    workers: int
    replicas: int
    slowest_link: str | None
    steps: int
    tokens: int | None
    model: Model | None
    memory: Memory | None
    machine_bytes: int | None
    modelled: Modelled | None
    warnings: list[str]


def preview(recipe: Recipe, processes: int | None = None, *, live: bool = False) -> Preview:
    """What `recipe` would do.

    Args:
        processes: how many would compute gradients; None: as many as there usually are.
        live: refuse and warn of what concerns `archipel launch` on this machine, not a simulation.

    Raises:
        UserError: the recipe cannot run.
        TrainingError: it would not come to its end.
    """
    check_reachable(recipe)
    trackers_of(recipe.track)
    if live:
        check_live(recipe)
    with _noting_warnings() as noted:
        warn_of_divergence(recipe)
        task = None if isinstance(recipe.task, NoTask) else make_task(recipe.task)
        takes = footprint_of(task) if task else None
        if recipe.profile is None and task is None:
            measure_profile(None)  # refuses it
        steps = planned_steps(recipe, task.tokens_per_step if task else None)
        needed, there_bytes = None, machine_bytes()
        if task and takes:
            warn_of_precision(task.autocast)
            warn_of_size(recipe, takes.vector_bytes)
            with suppress(UserError):  # a method of the user's own may need values
                needed = memory_of(recipe, takes, processes)
        if needed and there_bytes is not None:
            needed_bytes = needed.live_bytes if live else needed.simulated_bytes
            if needed_bytes > there_bytes:
                warnings.warn(too_large(needed_bytes, there_bytes, live=live), stacklevel=2)
        modelled = rehearse(recipe, steps) if recipe.profile else None
    topology = recipe.topology
    return Preview(
        label=recipe.label,
        method=recipe.method,
        wire=recipe.wire,
        changed=recipe.changed(),
        topology=topology.name,
        profile=recipe.profile.name if recipe.profile else MEASURED,
        regions=len(topology.regions),
        workers=len(topology.workers),
        replicas=recipe.replicas,
        slowest_link=_slowest_link(topology),
        steps=steps,
        tokens=steps * task.tokens_per_step if task and task.tokens_per_step else None,
        model=_model(recipe, task, takes, steps) if task and takes else None,
        memory=needed,
        machine_bytes=there_bytes,
        modelled=modelled,
        warnings=noted,
    )


def check_live(recipe: Recipe) -> None:
    """Raise a `UserError` if a recipe that can be simulated cannot be launched."""
    from archipel.live.launch import check_launch  # here, for they import Ray
    from archipel.live.on_purpose import faults_of

    check_launch(recipe, None)
    actors = build_actors(recipe, pipeline_of(recipe), torch.empty(0), ())
    faults_of(recipe, [actor.me for actor in actors])


# A simulation without gradients


@dataclass
class Counts(Observer):
    """Inner steps by worker, and bytes by link between regions."""

    steps_of: Counter[NodeId] = field(default_factory=Counter)
    by_link: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def finishes(self, worker: NodeId, steps: int) -> None:
        self.steps_of[worker] += steps

    def departs(
        self, sender: NodeId, to: NodeId, message: Message, size_bytes: float, usual_s: float
    ) -> None:
        if sender.region != to.region:
            self._crosses((sender.region, to.region), size_bytes)

    def reduces(
        self, sent_bytes: float, usual_s: float, between: Mapping[tuple[str, str], float]
    ) -> None:
        for link, size_bytes in between.items():
            self._crosses(link, size_bytes)

    def _crosses(self, link: tuple[str, str], size_bytes: float) -> None:
        self.by_link[link_name(link)] += size_bytes


def rehearse(recipe: Recipe, steps: int) -> Modelled:
    """Simulate a recipe, which has a profile, without gradients, for so many inner steps. A target
    loss ends nothing there.

    Raises:
        UserError, TrainingError: see `Simulator.run`.
    """
    profile = recipe.profile
    assert profile is not None
    plan = {**recipe.run.model_dump(), "steps": steps, "tokens": None, "target_loss": None}
    counts = Counts()
    timed = replace(recipe, task=NoTask(), run=RunConfig(**plan))
    simulator = make_simulator(timed, None, observers=[counts])
    stopped = simulator.run()
    assert stopped is not None
    workers, recorder = [worker.id for worker in recipe.topology.workers], simulator.recorder
    entries = profile.model_bytes // BYTES_PER_ENTRY
    return Modelled(
        message=_on_wire(entries, entries, recipe.wire),
        step_time_s=profile.step_time_s,
        time_s=simulator.now,
        stopped=stopped,
        steps_of={str(worker): counts.steps_of[worker] for worker in workers},
        idle_fraction=recorder.idle_fraction(workers, simulator.now),
        sent_bytes=round(recorder.sent_bytes),
        slow_link_bytes=round(recorder.slow_link_bytes),
        by_link={
            link: round(size_bytes)
            for link, size_bytes in sorted(counts.by_link.items(), key=lambda item: -item[1])
        },
    )


# What is computed


def _model(recipe: Recipe, task: Task, takes: Footprint, steps: int) -> Model:
    layout = takes.layout
    return Model(
        description=task.description,
        parameters=layout.parameters,
        message=_on_wire(layout.numel, layout.parameters, recipe.wire),
        lr=learning_rates(task.schedule, takes.lr, steps / recipe.replicas),
    )


def _on_wire(numel: int, parameters: int, wire: Codec) -> OnWire:
    def size_bytes(codec: Codec) -> int:
        return coded_bytes(parameters, codec) + BYTES_PER_ENTRY * (numel - parameters)

    return OnWire(
        size_bytes("fp32"), size_bytes(wire), size_bytes("fp32" if wire == "fp32" else "bf16")
    )


def learning_rates(
    schedule: Schedule | None, lr: float, steps: float
) -> tuple[float, float, float]:
    """Of the first of a worker's planned steps, the largest, and of the last one."""
    if schedule is None:
        return lr, lr, lr
    first, last = 0, max(math.ceil(steps) - 1, 0)
    warm = min(max(math.ceil(schedule.warmup * steps) - 1, first), last)
    rates = [lr * schedule.factor(step, steps) for step in (first, warm, last)]
    return rates[0], max(rates), rates[-1]  # between the three it only rises or only falls


def _slowest_link(topology: Topology) -> str | None:
    links: dict[str, Link] = {link_name(link.between): link for link in topology.links}
    if topology.default and len(topology.regions) > 1:
        links["all other regions" if links else "all regions"] = topology.default
    if not links:
        return None
    name = min(links, key=lambda name: links[name].bandwidth_bytes_per_s)
    link = links[name]
    return f"{name}: {link.bandwidth_gbit_s:g} Gbit/s, {link.latency_ms:g} ms"


@contextmanager
def _noting_warnings() -> Iterator[list[str]]:
    """The texts of all warnings meanwhile, each once, are in the list afterwards."""
    noted: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield noted
    noted += dict.fromkeys(str(warning.message) for warning in caught)
