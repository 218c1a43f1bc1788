"""A rehearsal of a live run: the simulator runs the same recipe without gradients, in milliseconds.

What belongs here: what a live run learns from the simulator before it starts. What does not: what
it does with that (`launch.py`, `course.py`).

It shows that the run reaches its end, and what each holder of the model has trained at each mark.
Hosts keep their part of the model at just these counts, however long they really take. So a live
run evaluates, and takes home, what the simulator would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from archipel import assemble
from archipel.actor import NodeId
from archipel.recipe import Recipe
from archipel.run.census import Plan
from archipel.run.metrics import Recorder
from archipel.run.observer import Observer
from archipel.sim.clock import Simulator
from archipel.sim.network import Network
from archipel.sim.topology import Profile
from archipel.train.trainer import NoTraining


@dataclass
class RehearsedMarks(Observer):
    """What every holder of the model has counted at each evaluation of the simulator."""

    marks: list[Mapping[NodeId, int]] = field(default_factory=list)

    def evaluates(self, trained: Mapping[NodeId, int]) -> None:
        self.marks.append(trained)


def rehearse(recipe: Recipe, profile: Profile, steps: int) -> list[dict[NodeId, int]]:
    """For each mark, the first one at 0 and the last one at the end, what every holder of the model
    will have counted.

    Raises:
        UserError, TrainingError: the method would not come to its end; see `Simulator.run`.
    """
    seed, pipeline, rehearsal = recipe.run.seed, assemble.pipeline_of(recipe), RehearsedMarks()
    Simulator(
        assemble.build_actors(recipe, pipeline, torch.empty(0), ()),
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
        wire=recipe.wire,
        observers=[rehearsal],
    ).run()
    *marks, last = map(dict, rehearsal.marks)
    if len(last) == 1:  # asynchronous methods overshoot by other amounts on another clock
        last = dict.fromkeys(last, steps)
    return [*marks, last]
