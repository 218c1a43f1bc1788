"""What do NoLoCo's random routes do, alone and together with its outer step? (arXiv 2506.10911
reports of routes without any outer step: a spread of the weights up to 15 % lower, and a perplexity
up to 4 % higher.)

What is compared: a model in 2 stages, 4 replicas of each, micro-batches on random or on fixed
routes, with the published outer step or with none. Without one, each node goes on from its own
weights (groups of one, α = 0, β = 1, γ = 0), and nothing but the routes ties the replicas together.
Evaluations take fixed routes. Everything else is the same in all runs, data included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from archipel.recipe import Recipe, parse_recipe
from archipel.report import Result, intervals
from archipel.studies import Claim, Findings, Size, within

TITLE = (
    "What do random routes between pipeline stages do to NoLoCo's loss, and to the spread of "
    "its replicas?"
)
STAGES, REPLICAS, MICRO_BATCHES = 2, 4, 2
OUTER_STEPS = 50
QUICK, FULL = Size(steps=1_000, seeds=2), Size(steps=10_000, seeds=5)
ROUTINGS = ("fixed", "random")
OUTER: dict[str, dict[str, Any]] = {
    "without": {"group_size": 1, "alpha": 0.0, "beta": 1.0, "gamma": 0.0},
    "with": {},
}


def recipes(size: Size) -> list[Recipe]:
    """For each seed a run on fixed and on random routes, without and with an outer step."""
    inner_steps = max(1, size.steps // (REPLICAS * OUTER_STEPS))
    return [
        parse_recipe(
            {
                "label": f"{routing}-routes-{outer}-outer-step",
                "method": {"name": "noloco", "inner_steps": inner_steps, **fields},
                "topology": {
                    "name": f"{STAGES * REPLICAS} equal workers",
                    "regions": {"a": [1.0] * (STAGES * REPLICAS)},
                },
                "pipeline": {"stages": STAGES, "micro_batches": MICRO_BATCHES, "routing": routing},
                "run": {"steps": inner_steps * REPLICAS * OUTER_STEPS, "seed": seed},
            }
        )
        for routing in ROUTINGS  # outermost: those with one kind of routes share a pool
        for outer, fields in OUTER.items()
        for seed in range(size.seeds)
    ]


def answer(results: Sequence[Result], size: Size, out: Path) -> Findings:
    """What random routes change, without and with an outer step."""
    runs = {
        (outer, routing): [
            result
            for result in results
            if result.summary["label"] == f"{routing}-routes-{outer}-outer-step"
        ]
        for outer in OUTER
        for routing in ROUTINGS
    }
    return Findings(
        finding=" ".join(
            finding(outer, runs[outer, "fixed"], runs[outer, "random"]) for outer in OUTER
        )
        + ("" if size.seeds > 1 else " One seed says nothing about chance.")
        + " (The paper, without: a spread up to 15 % lower, a perplexity up to 4 % higher.)",
        claims=claims(runs["without", "fixed"], runs["without", "random"]),
        columns=[
            "outer step",
            "routes",
            "loss of the mean",
            "replicas' own loss",
            "spread of the replicas",
        ],
        rows=[
            [
                outer,
                routing,
                *(intervals.text([one.summary[key] for one in group], ".4g") for key in FIGURES),
            ]
            for (outer, routing), group in runs.items()
        ],
        plots=[plot(runs, out / "noloco-routing.png")],
    )


FIGURES = ("final_loss", "replica_loss", "replica_std")


def claims(fixed: Sequence[Result], random: Sequence[Result]) -> list[Claim]:
    """The published effects of routes alone, of runs without an outer step."""
    spread, perplexity = changes(fixed, random)
    source = "NoLoCo, its ablation of routes"
    return [
        Claim(
            "Random routes alone make the replicas' spread up to 15 % smaller.",
            source,
            f"changed by {intervals.text([100 * one for one in spread], '+.1f')} %",
            *within(intervals.interval(spread), (-0.15, 0.0)),
        ),
        Claim(
            "Random routes alone cost up to 4 % of perplexity.",
            source,
            f"changed by {intervals.text([100 * one for one in perplexity], '+.1f')} %",
            *within(intervals.interval(perplexity), (0.0, 0.04)),
        ),
    ]


def changes(fixed: Sequence[Result], random: Sequence[Result]) -> tuple[list[float], list[float]]:
    """By which part of it random routes change the spread, and the replicas' own perplexity; pairs
    of one seed.
    """
    pairs = list(zip(fixed, random, strict=True))
    return (
        [b.summary["replica_std"] / a.summary["replica_std"] - 1 for a, b in pairs],
        [math.expm1(b.summary["replica_loss"] - a.summary["replica_loss"]) for a, b in pairs],
    )


def finding(outer: str, fixed: Sequence[Result], random: Sequence[Result]) -> str:
    """What random routes change, of runs that differ in nothing else: pairs of the same seed."""
    spread, perplexity = (
        intervals.text([100 * one for one in found], "+.1f") for found in changes(fixed, random)
    )
    return (
        f"{outer.capitalize()} an outer step, random routes change the spread by {spread} % "
        f"and the replicas' own perplexity by {perplexity} %."
    )


def plot(runs: dict[tuple[str, str], list[Result]], path: Path) -> Path:
    """The spread and the replicas' own loss over the run, every seed a line."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    names = {
        "replica_std": "spread of the replicas",
        "replica_loss": "replicas' own validation loss",
    }
    panels = figure.subplots(1, 2)
    for axes, (key, name) in zip(panels, names.items(), strict=True):
        for color, outer in zip(("#B5651D", "#1F5FA8"), OUTER, strict=True):
            for style, routing in zip(("--", "-"), ROUTINGS, strict=True):
                for i, one in enumerate(runs[outer, routing]):
                    steps, values = zip(
                        *((line["inner_steps"], line[key]) for line in one.evals[1:]), strict=True
                    )
                    label = None if i else f"{outer} outer step, {routing} routes"
                    axes.plot(steps, values, style, color=color, linewidth=1.2, label=label)
        axes.set(xlabel="inner steps of all replicas", ylabel=name)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, None)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.savefig(path, dpi=160, metadata={"Software": None})
    return path
