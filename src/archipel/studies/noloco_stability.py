"""Does the window of NoLoCo's averaging strength, derived on a quadratic, hold for a real network?

What is compared: settings inside and outside the window of `moments.gamma_window` for a flat
direction, each run with the same seeds. The workers are equally fast and in one region, so that all
are at the same outer step when they are compared. In each run three curves over outer steps: the
replicas' standard deviation, the mean of the replicas' own validation losses, and the validation
loss of their mean, which is what a user would watch.

Beside the measured growth of the spread stand two factors of a flat direction: the root of the mean
square's (`moments.spread_radius`) and that of a typical run, which is lower for so few workers
(docs/theory.md, section 7). Both are without kicks, and the learning rate's schedule changes those.
So there is `predicted`, the whole curve by recursion with the run's own partitions and kicks that
follow the learning rate; their size, which no theory gives, is fitted to the last setting's runs
alone and then used for all.

No warning precedes the diverging runs (`assemble.warn_of_divergence`): that they diverge is the
question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from archipel.disk import rundir
from archipel.errors import Diverged
from archipel.methods import noloco
from archipel.recipe import Recipe, parse_recipe
from archipel.report import Result, intervals
from archipel.studies import Claim, Findings, Size, Verdict
from archipel.theory import moments
from archipel.train.task import Schedule

TITLE = "Do NoLoCo's replicas drift apart outside the window of its averaging strength?"
WORKERS, OUTER_STEPS, BETA = 8, 50, 0.7
ALPHAS_AND_GAMMAS = ((0.9, 1.5), (0.9, 0.7), (0.9, 0.2), (0.5, 0.7))
QUICK, FULL = Size(steps=800, seeds=1), Size(steps=10_000, seeds=5)
COLORS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")
LEGEND = (
    "Factors of the replicas' standard deviation in one outer step: √ρ and typical, in a flat "
    "direction without kicks, in mean "
    "square and in a typical run; recursion and measured, least squares on the logarithm over the "
    "second half of the outer steps, "
    "of the recursion with each run's own partitions and kicks that follow the learning rate, and "
    "of the runs. spread, predicted: "
    "the last standard deviation, measured and of the recursion, whose one scale is fitted to the "
    "last row's runs. Losses: least → "
    "last, of their mean over seeds."
)
Key = tuple[float, float]  # (α, γ)
Curve = npt.NDArray[np.float64]
"""One value an outer step, from the first one's end on: shape (OUTER_STEPS,)."""


def recipes(size: Size) -> list[Recipe]:
    """One NoLoCo run for each setting and seed, evaluated after every outer step."""
    inner_steps = _inner_steps(size)
    return [
        _recipe(*key, inner_steps, seed) for key in ALPHAS_AND_GAMMAS for seed in range(size.seeds)
    ]


def _inner_steps(size: Size) -> int:
    return max(1, size.steps // (WORKERS * OUTER_STEPS))


def answer(results: Sequence[Result], size: Size, out: Path) -> Findings:
    """How fast the spread grows or shrinks in each setting, beside the theory."""
    inner_steps = _inner_steps(size)
    # A run that has diverged has no curve to its end; the others still answer.
    lost = [one for one in results if one.summary["stopped"] == rundir.DIVERGED]
    every = [one for one in results if one not in lost]
    if not every:
        raise Diverged(f"all {len(lost)} runs have diverged")
    runs: dict[Key, list[Result]] = {}
    for result in every:
        key = result.summary["settings"]["alpha"], result.summary["settings"]["gamma"]
        runs.setdefault(key, []).append(result)
    predictions = {
        key: [predicted(*key, inner_steps, run.summary["seed"]) for run in group]
        for key, group in runs.items()
    }
    fitted = list(runs)[-1]
    pairs = zip(runs[fitted], predictions[fitted], strict=True)
    kick = math.exp(np.mean([np.log(curve(run, "replica_std") / line) for run, line in pairs]))
    predictions = {key: [kick * line for line in lines] for key, lines in predictions.items()}
    return Findings(
        finding="\n".join(
            [
                *(_finding(key, runs[key]) for key in runs),
                *(f"Without figures: {one.directory.name} has diverged" for one in lost),
                LEGEND,
            ]
        ),
        claims=[claim(runs)],
        columns=[
            "α",
            "γ",
            "√ρ",
            "typical",
            "recursion",
            "measured",
            "spread",
            "predicted",
            "replicas' loss",
            "loss of mean",
        ],
        rows=[_row(key, runs[key], predictions[key]) for key in runs],
        plots=[plot(runs, predictions, out / "noloco-stability.png")],
    )


def _recipe(alpha: float, gamma: float, inner_steps: int, seed: int) -> Recipe:
    return parse_recipe(
        {
            "label": f"alpha{alpha}-gamma{gamma}",
            "method": {
                "name": "noloco",
                "inner_steps": inner_steps,
                "alpha": alpha,
                "beta": BETA,
                "gamma": gamma,
            },
            "topology": {"name": f"{WORKERS} equal workers", "regions": {"a": [1.0] * WORKERS}},
            "run": {
                "steps": inner_steps * WORKERS * OUTER_STEPS,
                "seed": seed,
                "evaluations": OUTER_STEPS,
            },
        }
    )


def curve(run: Result, key: str) -> Curve:
    """`key` of the evaluation after each outer step; not that of the untrained model."""
    return np.array([line[key] for line in run.evals[1:]])


def growth(spread: Curve) -> float:
    """The factor of a curve in one step: least squares on its logarithm over the second half, when
    the kicks grow weak.
    """
    half = spread[len(spread) // 2 :]
    return math.exp(np.polyfit(np.arange(len(half)), np.log(half), 1)[0])


def typical_factor(setting: moments.Setting, outer_steps: int = 20_000) -> float:
    """The factor of the replicas' standard deviation in an outer step of a long run, pairs, flat
    direction, no kicks.

    exp of the Lyapunov exponent: the mean logarithm of the growth of all deviations from the mean,
    seed 0. N must be even.
    """
    assert setting.workers is not None
    rng = np.random.default_rng(0)
    total = 0.0
    x = rng.normal(size=(2, setting.workers))  # rows: φ and δ; two neighbours are a pair
    for _ in range(outer_steps):
        x = x[:, rng.permutation(setting.workers)]
        apart = x[0] - x[0].reshape(-1, 2).mean(axis=1).repeat(2)
        x[1] = setting.alpha * x[1] - setting.gamma * apart
        x[0] += x[1]
        x -= x.mean(axis=1, keepdims=True)
        size = float(np.linalg.norm(x))
        if size == 0:  # groups that average fully have all met: nothing is left to grow
            return 0.0
        total += math.log(size)
        x = x / size
    return math.exp(total / outer_steps)


def predicted(alpha: float, gamma: float, inner_steps: int, seed: int) -> Curve:
    """The root of the spread after each outer step, from equal replicas, in a flat direction. Up to
    one factor.

    An inner step kicks with a variance in proportion to the square of its learning rate, and the
    kicks of a round add up. The partitions are those that a run with this seed has, so only the
    kicks are averaged over: with M the move of all (φ, δ) and A the averaging, C ← M C Mᵀ + β²s²·A
    Aᵀ in all four blocks, C the second moments of 2·WORKERS numbers.
    """
    total = inner_steps * OUTER_STEPS
    rates = np.array([Schedule().factor(step, total) for step in range(total)]).reshape(
        OUTER_STEPS, inner_steps
    )
    workers = tuple(
        worker.id for worker in _recipe(alpha, gamma, inner_steps, seed).topology.workers
    )
    moments = np.zeros((2 * WORKERS, 2 * WORKERS))
    same = np.eye(WORKERS)
    spread = []
    for outer_step, variance in enumerate((rates**2).sum(axis=1)):
        group = noloco.groups(workers, 2, seed, outer_step)
        average = np.array(
            [[(other in group[me]) / len(group[me]) for other in workers] for me in workers]
        )
        pulled = -gamma * (same - average)
        momentum = alpha * same
        move = np.block([[same + pulled, momentum], [pulled, momentum]])
        moments = move @ moments @ move.T + np.kron(
            np.ones((2, 2)), BETA**2 * variance * average @ average.T
        )
        phi = moments[:WORKERS, :WORKERS]
        spread.append(math.sqrt((np.trace(phi) - phi.sum() / WORKERS) / WORKERS))
    return np.array(spread)


def claim(runs: dict[Key, list[Result]]) -> Claim:
    """The window of the theorem, on a network: in which settings the spread grows."""
    factors = {
        key: [growth(curve(run, "replica_std")) for run in group] for key, group in runs.items()
    }
    seen = "; ".join(
        f"α = {alpha}, γ = {gamma} ({'inside' if _is_inside((alpha, gamma)) else 'outside'}): "
        f"{intervals.text(found, '.3f')} an outer step"
        for (alpha, gamma), found in factors.items()
    )
    return Claim(
        "Replicas drift apart outside the window of γ, and not inside it.",
        "the doubt that γ is never reported; docs/theory.md",
        seen,
        *verdict([agrees(found, _is_inside(key)) for key, found in factors.items()]),
    )


def verdict(settings: Sequence[bool | None]) -> tuple[Verdict, str]:
    """Of all settings: is one as the theorem says? None: its interval does not tell."""
    agree, total = settings.count(True), len(settings)
    if False in settings:
        return "does not hold", f"{agree} of {total} settings are as the theorem says"
    if None in settings:
        return "cannot be told", f"only {agree} of {total} settings have an interval apart from 1"
    return "holds", ""


def agrees(factors: Sequence[float], inside: bool) -> bool | None:
    """All of the interval of the growth is below 1 inside the window, and above 1 outside of it.
    None: 1 is in the interval, or there is none.
    """
    low, high = intervals.interval(factors)
    if high < 1 or low > 1:
        return (high < 1) == inside
    return None


def _is_inside(key: Key) -> bool:
    low, high = moments.gamma_window(moments.Setting(key[0], BETA, key[1], workers=WORKERS))
    return low < key[1] < high


def _row(key: Key, runs: list[Result], predictions: list[Curve]) -> list[Any]:
    """One setting: factors of the spread in an outer step, the last spread, and both losses; see
    `LEGEND`.
    """
    flat = moments.Setting(key[0], BETA, key[1], workers=WORKERS)
    spreads, replicas, means = (
        [curve(run, name) for run in runs] for name in ("replica_std", "replica_loss", "loss")
    )
    return [
        *key,
        f"{math.sqrt(moments.spread_radius(flat)):.3f}",
        f"{typical_factor(flat):.3f}",
        intervals.text([growth(line) for line in predictions], ".3f"),
        intervals.text([growth(spread) for spread in spreads], ".3f"),
        f"{np.mean([spread[-1] for spread in spreads]):.2g}",
        f"{np.mean([line[-1] for line in predictions]):.2g}",
        *(
            f"{line.min():.3f} → {line[-1]:.3f}"
            for line in (np.mean(replicas, axis=0), np.mean(means, axis=0))
        ),
    ]


def _finding(key: Key, runs: list[Result]) -> str:
    """What happened with one setting, mean over seeds."""
    low, high = moments.gamma_window(moments.Setting(key[0], BETA, key[1], workers=WORKERS))
    side = "inside" if low < key[1] < high else "outside"
    factor = np.mean([growth(curve(run, "replica_std")) for run in runs])
    curves = {
        name: np.mean([curve(run, name) for run in runs], axis=0)
        for name in ("replica_loss", "loss")
    }
    return (
        f"α = {key[0]}, γ = {key[1]}, {side} the window {low:g} to {high:.2f}: in the second half "
        "the spread is multiplied by "
        f"{factor:.3f} an outer step; the replicas' own loss is {_least(curves['replica_loss'])}, "
        "the loss of their mean "
        f"{_least(curves['loss'])}."
    )


def _least(loss: Curve) -> str:
    after = int(np.argmin(loss)) + 1
    if after == len(loss):
        return "least at the end"
    return f"least after outer step {after} and ends {loss[-1] - loss.min():.3f} above"


def plot(runs: dict[Key, list[Result]], predictions: dict[Key, list[Curve]], path: Path) -> Path:
    """Spread, replicas' loss and loss of their mean over outer steps: a line a run, a colour a
    setting; predictions dashed.
    """
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    names = {
        "replica_std": "replicas' standard deviation",
        "replica_loss": "validation loss of the replicas, mean",
        "loss": "validation loss of the replicas' mean",
    }
    for (key, group), color in zip(runs.items(), COLORS, strict=False):
        steps = np.arange(1, OUTER_STEPS + 1)
        for axes, name in zip(panels, names, strict=True):
            for i, run in enumerate(group):
                label = None if i else f"α = {key[0]}, γ = {key[1]}"
                axes.plot(
                    steps, curve(run, name), color=color, linewidth=1.2, alpha=0.8, label=label
                )
        for line in predictions[key]:
            panels[0].plot(steps, line, "--", color="black", linewidth=0.8)
    panels[0].plot([], [], "--", color="black", linewidth=0.8, label="theory, one scale for all")
    for axes, name in zip(panels, names.values(), strict=True):
        axes.set(xlabel="outer step", title=name, yscale="linear" if axes is panels[2] else "log")
        axes.spines[["top", "right"]].set_visible(False)
    for axis in (panels[1].yaxis.set_major_formatter, panels[1].yaxis.set_minor_formatter):
        axis(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    figure.savefig(path, dpi=160, metadata={"Software": None})
    return path
