"""Does the spread of NoLoCo's replicas follow the inner learning rate? (arXiv 2506.10911 reports a
Pearson correlation of 0.91 to 0.97.)

What is compared: at equal marks of a run, the replicas' standard deviation sqrt(mean over weights
and replicas of (φ_i − mean φ)²) and the inner learning rate of that moment. The workers are equally
fast and in one region, so that all are at the same outer step when they are compared; the first
outer steps, in which the spread builds up from nothing, are in it.

The theory (`theory/moments.py`): on a quadratic the stationary variance between replicas goes with
the square of the learning rate while that is small, so the standard deviation goes with the
learning rate itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from archipel.recipe import Recipe, parse_recipe
from archipel.report import Result, intervals
from archipel.studies import Claim, Findings, Size, within
from archipel.train.task import Schedule

TITLE = "Does the spread of NoLoCo's replicas follow the inner learning rate?"
WORKERS = 8
OUTER_STEPS = 50
PUBLISHED = (0.91, 0.97)
QUICK, FULL = Size(steps=2_000, seeds=2), Size(steps=20_000, seeds=12)


def recipes(size: Size) -> list[Recipe]:
    """One NoLoCo run for each seed, evaluated after every outer step."""
    inner_steps = max(1, size.steps // (WORKERS * OUTER_STEPS))
    return [
        parse_recipe(
            {
                "method": {"name": "noloco", "inner_steps": inner_steps},
                "topology": {"name": f"{WORKERS} equal workers", "regions": {"a": [1.0] * WORKERS}},
                "run": {
                    "steps": inner_steps * WORKERS * OUTER_STEPS,
                    "seed": seed,
                    "evaluations": OUTER_STEPS,
                },
            }
        )
        for seed in range(size.seeds)
    ]


def answer(runs: Sequence[Result], size: Size, out: Path) -> Findings:
    """Pearson's r of each run, and the interval of their mean."""
    steps = WORKERS * OUTER_STEPS * max(1, size.steps // (WORKERS * OUTER_STEPS))
    curves = [spread_and_rate(run, steps) for run in runs]
    correlations = [pearson(spread, rate) for spread, rate in curves]
    low, high = confidence_interval(correlations)
    seen = (
        f"{mean_correlation(correlations):.3f}, 95 % interval {low:.3f} to {high:.3f} over "
        f"{len(runs)} seeds (Fisher's z)"
    )
    return Findings(
        finding=f"Pearson's r between spread and learning rate: {seen}; the paper reports 0.91 to "
        "0.97.",
        claims=[
            Claim(
                "The replicas' spread follows the inner learning rate, Pearson's r 0.91 to 0.97.",
                "NoLoCo, its figure of the weights' deviation",
                seen,
                *within((low, high), PUBLISHED),
            )
        ],
        columns=["seed", "r", "evaluations", "largest spread", "last spread"],
        rows=[
            [
                run.summary["seed"],
                f"{r:.3f}",
                len(spread),
                f"{spread.max():.2e}",
                f"{spread[-1]:.2e}",
            ]
            for run, r, (spread, _) in zip(runs, correlations, curves, strict=True)
        ],
        plots=[plot(curves, out / "noloco-spread.png")],
    )


def spread_and_rate(run: Result, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The replicas' standard deviation and the learning rate as a factor of its peak, at each
    evaluation but the first.
    """
    lines = run.evals[1:]
    spread = np.array([line["replica_std"] for line in lines])
    # The rate of the last inner step that the model has absorbed.
    rate = np.array(
        [Schedule().factor(line["inner_steps"] / WORKERS - 1, steps / WORKERS) for line in lines]
    )
    return spread, rate


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation of two series of one length."""
    return float(np.corrcoef(x, y)[0, 1])


def mean_correlation(correlations: list[float]) -> float:
    """The mean by Fisher's z, in which correlations are about normally distributed."""
    return math.tanh(float(np.mean(np.arctanh(correlations))))


def confidence_interval(correlations: list[float]) -> tuple[float, float]:
    """95 % interval of the mean correlation over seeds, by Fisher's z and Student's t; (nan, nan)
    for a single one.
    """
    z = np.arctanh(correlations)
    low, high = intervals.interval(z.tolist())
    return math.tanh(low), math.tanh(high)


def plot(curves: list[tuple[np.ndarray, np.ndarray]], path: Path) -> Path:
    """Spread and learning rate over the run, and one against the other."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    over_time, scatter = figure.subplots(1, 2)
    for seed, (spread, rate) in enumerate(curves):
        over_time.plot(spread, linewidth=1.6, label=f"seed {seed}")
        scatter.plot(rate, spread, "o", markersize=4, alpha=0.7)
    rate = curves[0][1]
    over_time.plot(
        rate * max(spread.max() for spread, _ in curves),
        color="#444444",
        linestyle="--",
        label="learning rate (scaled)",
    )
    over_time.set(xlabel="outer step", ylabel="replica standard deviation", ylim=(0, None))
    over_time.legend(frameon=False)
    scatter.set(
        xlabel="learning rate ÷ its peak",
        ylabel="replica standard deviation",
        xlim=(0, None),
        ylim=(0, None),
    )
    for axes in (over_time, scatter):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path
