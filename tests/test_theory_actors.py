"""The exact second moments of `theory.py` against the NoLoCo actors themselves, under the
simulator, on a noisy quadratic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import Quadratic, simulator

from archipel.actor import NodeId, Trained
from archipel.sim.topology import Topology
from archipel.theory.moments import Setting, step
from archipel.train.trainer import Done

COORDINATES = 400  # independent copies of the quadratic; they share the random groups
RUNS = 150  # independent random groups
OUTER_STEPS = 5


@dataclass
class NoisyQuadratic(Quadratic):
    """Inner SGD on ½λ(θ − c)² with c ~ N(0, σ²) drawn for each inner step, worker and coordinate; σ
    = 1.
    """

    curvature_rate: float = 0.1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def train(self, worker: NodeId, theta: Tensor, steps: int, progress: int, due_s: float) -> Done:
        result = theta.clone()
        for _ in range(steps):
            c = torch.from_numpy(self.rng.standard_normal(len(theta)).astype(np.float32))
            result -= self.curvature_rate * (result - c)
        return Done(Trained(result, steps, (0.0,) * steps))


@pytest.mark.parametrize(("workers", "size"), [(2, 2), (4, 2), (6, 3), (5, 2)])
def test_second_moments_of_the_actors_are_the_exact_ones(workers: int, size: int) -> None:
    """E[φ_i²] and E[φ_i φ_j] after 5 outer steps from φ = 1, within 5 standard errors over
    independent runs.
    """
    setting = Setting(
        0.5, 0.7, 0.7, curvature_rate=0.1, inner_steps=4, workers=workers, group_size=size
    )
    p = q = np.array([[1.0, 0.0], [0.0, 0.0]])
    for _ in range(OUTER_STEPS):
        p, q = step(setting, p, q)

    topology = Topology(regions={"a": [1.0] * workers})
    own, cross = [], []
    for run in range(RUNS):
        sim = simulator(
            "noloco",
            NoisyQuadratic(numel=COORDINATES, rng=np.random.default_rng(run)),
            topology=topology,
            settings={"inner_steps": 4, "group_size": size},
            steps=OUTER_STEPS * 4 * workers,
            theta=torch.ones(COORDINATES),
            seed=run,
        )
        sim.run()
        phi = torch.stack(sim.parts()).double()
        assert {actor.outer_steps for actor in sim.actors.values()} == {OUTER_STEPS}
        own.append(float(phi.square().mean()))
        cross.append(
            float((phi.sum(0).square() - phi.square().sum(0)).mean() / (workers * (workers - 1)))
        )
    for exact, measured in ((p[0, 0], own), (q[0, 0], cross)):
        standard_error = np.std(measured, ddof=1) / np.sqrt(RUNS)
        assert abs(np.mean(measured) - exact) < 5 * standard_error
        assert standard_error < 0.02 * exact
