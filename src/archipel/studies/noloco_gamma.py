"""Where on the scale of NoLoCo's averaging strength does a network break?

What is compared: at each momentum α, values of γ from 0 to past the end γ_max of the window that
`moments.gamma_window` gives for a flat direction; all else is the same, seeds included. As in
`noloco_stability.py`, whose measure of growth this takes, the workers are equally fast, so that all
are at the same outer step when they are compared.

γ = 0 is no averaging: the theorem's factor is 1 there, and no claim is made of it. Near γ_max a
typical run of so few workers can contract where the mean square grows (docs/theory.md, section 7):
so both factors stand beside the measured one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from archipel.disk import rundir
from archipel.recipe import Recipe, parse_recipe
from archipel.report import Result, intervals
from archipel.studies import Claim, Findings, Size
from archipel.studies.noloco_stability import agrees, curve, growth, typical_factor, verdict
from archipel.theory import moments

TITLE = "At which averaging strength do NoLoCo's replicas drift apart, and what does it cost?"
WORKERS, OUTER_STEPS, BETA = 8, 50, 0.7
ALPHAS = (0.0, 0.5, 0.7)
PARTS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5)
"""γ as parts of γ_max."""
QUICK, FULL = Size(steps=400, seeds=1), Size(steps=10_000, seeds=5)
COLORS = ("#0072B2", "#009E73", "#D55E00")

Runs = dict[float, dict[float, list[Result]]]
"""By α and the part of γ_max, in the order of seeds."""


def recipes(size: Size) -> list[Recipe]:
    """One NoLoCo run for each α, γ and seed, evaluated after every second outer step."""
    inner_steps = max(1, size.steps // (WORKERS * OUTER_STEPS))
    return [
        parse_recipe(
            {
                "label": _label(alpha, part),
                "method": {
                    "name": "noloco",
                    "inner_steps": inner_steps,
                    "alpha": alpha,
                    "beta": BETA,
                    "gamma": part * _largest(alpha),
                },
                "topology": {"name": f"{WORKERS} equal workers", "regions": {"a": [1.0] * WORKERS}},
                "run": {
                    "steps": inner_steps * WORKERS * OUTER_STEPS,
                    "seed": seed,
                    "evaluations": OUTER_STEPS // 2,
                },
            }
        )
        for alpha in ALPHAS
        for part in PARTS
        for seed in range(size.seeds)
    ]


def _label(alpha: float, part: float) -> str:
    return f"alpha{alpha}-part{part}"


def _largest(alpha: float) -> float:
    """γ_max in a flat direction, to four digits."""
    window = moments.gamma_window(moments.Setting(alpha, BETA, BETA, workers=WORKERS))
    return round(window[1], 4)


def answer(results: Sequence[Result], size: Size, out: Path) -> Findings:
    """How fast the replicas drift apart at each γ, beside the theory, and their last losses."""
    runs: Runs = {
        alpha: {
            part: [one for one in results if one.summary["label"] == _label(alpha, part)]
            for part in PARTS
        }
        for alpha in ALPHAS
    }
    return Findings(
        finding=" ".join(_finding(alpha, runs[alpha]) for alpha in ALPHAS),
        claims=[_claim(alpha, runs[alpha]) for alpha in ALPHAS],
        columns=[
            "α",
            "γ",
            "γ/γ_max",
            "√ρ",
            "typical",
            "measured",
            "last spread",
            "replicas' loss",
            "loss of mean",
        ],
        rows=[_row(alpha, part, group) for alpha in ALPHAS for part, group in runs[alpha].items()],
        plots=[plot(runs, out / "noloco-gamma.png")],
    )


def _whole(runs: Sequence[Result]) -> list[Result]:
    """Those that came to their end: one that has diverged has no curve."""
    return [one for one in runs if one.summary["stopped"] != rundir.DIVERGED]


def factors(runs: Sequence[Result]) -> list[float]:
    """The factor of the replicas' standard deviation in an outer step, for each run that came to
    its end.
    """
    return [math.sqrt(growth(curve(one, "replica_std"))) for one in _whole(runs)]


def _row(alpha: float, part: float, runs: list[Result]) -> list[Any]:
    gamma = part * _largest(alpha)
    setting = moments.Setting(alpha, BETA, gamma, workers=WORKERS)
    whole = _whole(runs)
    lost = f"{len(runs) - len(whole)} diverged" if len(whole) < len(runs) else ""
    found = ["", "", "", ""]
    if whole:
        spread = fmean(one.summary["replica_std"] for one in whole)
        found = [
            intervals.text(factors(runs), ".3f"),
            f"{spread:.2g}",
            *(
                intervals.text([one.summary[key] for one in whole], ".3f")
                for key in ("replica_loss", "final_loss")
            ),
        ]
    found[0] = ", ".join(filter(None, [found[0], lost]))
    return [
        alpha,
        f"{gamma:.3f}",
        part,
        f"{math.sqrt(moments.spread_radius(setting)):.3f}",
        f"{typical_factor(setting):.3f}",
        *found,
    ]


def _claim(alpha: float, groups: dict[float, list[Result]]) -> Claim:
    """At one α: below γ_max the spread shrinks, above it grows."""
    seen: list[str] = []
    agreed: list[bool | None] = []
    for part, runs in groups.items():
        if part == 0:
            continue
        found = factors(runs)
        if len(found) < len(runs):  # a loss that is not finite is growth
            seen.append(f"{part} γ_max: {len(runs) - len(found)} of {len(runs)} diverge")
            agreed.append(part > 1)
        else:
            seen.append(f"{part} γ_max: {intervals.text(found, '.3f')}")
            agreed.append(agrees(found, part < 1))
    return Claim(
        f"At α = {alpha} the replicas drift apart where γ is above {_largest(alpha):.2f}, and not "
        "below.",
        "the doubt that γ is never reported; docs/theory.md",
        f"factor of the spread in an outer step: {'; '.join(seen)}",
        *verdict(agreed),
    )


def _finding(alpha: float, groups: dict[float, list[Result]]) -> str:
    """The γ with the least loss of the replicas themselves, and where the spread first grows."""
    losses = {
        part: fmean(one.summary["replica_loss"] for one in _whole(runs))
        for part, runs in groups.items()
        if _whole(runs)
    }
    grows = [
        part
        for part, runs in groups.items()
        if part and (len(_whole(runs)) < len(runs) or fmean(factors(runs)) > 1)
    ]
    first = f"from {min(grows)} γ_max on" if grows else "at none of these γ"
    said = f"α = {alpha}, γ_max = {_largest(alpha):.2f}: the spread grows {first}"
    if not losses:
        return f"{said}; all runs have diverged."
    best = min(losses, key=lambda part: losses[part])
    return f"{said}; the replicas' own loss is least at {best} γ_max, {losses[best]:.3f}."


def plot(runs: Runs, path: Path) -> Path:
    """Growth of the spread and the replicas' own loss over γ/γ_max: a colour an α."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    growing, losing = figure.subplots(1, 2)
    for (alpha, groups), color in zip(runs.items(), COLORS, strict=True):
        parts = [part for part in groups if _whole(groups[part])]
        means = [fmean(factors(groups[part])) for part in parts]
        growing.plot(parts, means, "o-", color=color, markersize=4, label=f"α = {alpha}")
        theory = [
            math.sqrt(
                moments.spread_radius(
                    moments.Setting(alpha, BETA, part * _largest(alpha), workers=WORKERS)
                )
            )
            for part in PARTS
        ]
        growing.plot(PARTS, theory, ":", color=color, linewidth=1.2)
        losses = [fmean(one.summary["replica_loss"] for one in _whole(groups[p])) for p in parts]
        losing.plot(parts, losses, "o-", color=color, markersize=4)
    growing.plot([], [], ":", color="black", linewidth=1.2, label="theory, without kicks: √ρ")
    growing.set(xlabel="γ / γ_max", ylabel="factor of the spread in an outer step")
    losing.set(xlabel="γ / γ_max", ylabel="replicas' own validation loss", yscale="log")
    for axes in (growing, losing):
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *growing.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.savefig(path, dpi=160, metadata={"Software": None})
    return path
