"""Comparing runs: times to a loss, means over seeds, ratios.

What belongs here: the numbers of a comparison. What does not: how they are worded (`words.py`) and
drawn (`plots.py`).

The comparison is the published one (HALoS, arXiv 2506.04531): the time on the run's clock until the
loss reaches a target. Runs with equal labels are seeds of one method. Runs without losses (`task:
none`) are compared by time per inner step and by bytes: a run ends when its model changes for the
first time at or after the planned inner steps, which is a few or many steps later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from archipel.report.results import ReportError, Result, points

_JSON = [
    "method",
    "label",
    "seed",
    "time_s",
    "inner_steps",
    "tokens",
    "absorbed_steps",
    "unreported_fraction",
    "outer_steps",
    "local_updates",
    "messages",
    "sent_bytes",
    "slow_link_bytes",
    "idle_fraction",
    "final_loss",
    "best_loss",
    "replica_loss",
    "replica_std",
    "stopped",
    "refused_updates",
    "restarts",
    "faults_planned",
    "faults_happened",
    "wire",
    "settings",
]
MEANS = (
    "final_loss",
    "time_s",
    "inner_steps",
    "outer_steps",
    "tokens",
    "unreported_fraction",
    "slow_link_bytes",
    "idle_fraction",
)
Groups = dict[str, list[Result]]
"""Label -> its runs."""
Row = dict[str, Any]
"""One label's figures, see `rows`."""


def target_loss(runs: Sequence[Result]) -> float | None:
    """The loss that the worst of the runs ends at, so that every run reaches it; interrupted ones
    count only if all were, and so do those that have diverged.

    None if no run has a final loss.
    """
    ended = [run for run in runs if run.summary["stopped"] != "interrupted"] or runs
    ended = [run for run in ended if not diverged(run)] or ended
    return max(
        (run.summary["final_loss"] for run in ended if run.summary["final_loss"] is not None),
        default=None,
    )


def diverged(run: Result) -> bool:
    """Whether a run ends with a loss that is not finite, or above the one that it began with."""
    if run.summary["stopped"] == "diverged":
        return True
    losses = [loss for _, loss in points(run, "time_s", "loss")]
    final = run.summary["final_loss"]
    return bool(losses) and (final is None or final > losses[0])


def reached(run: Result, target: float | None) -> tuple[float, float] | None:
    """When the loss of a run meets `target` for the first time, and how well that is known.

    The loss between two evaluations is taken to lie on the straight line between them, as it is
    drawn. It is known only that the loss was above the target at the first of the two and at or
    below it at the second.

    Returns:
        Seconds on the run's clock, and half the seconds between these two evaluations; None if no
        evaluation after the start is at or below the target.
    """
    before_s = 0.0
    before = None
    for time_s, loss in points(run, "time_s", "loss"):
        # An untrained model at or below the target says nothing about a method.
        if target is not None and time_s > 0 and loss <= target:
            half_s = (time_s - before_s) / 2
            if before is None or before <= target:
                return time_s, half_s
            return time_s - (target - loss) / (before - loss) * (time_s - before_s), half_s
        before_s, before = time_s, loss
    return None


def time_to_target_s(run: Result, target: float | None) -> float | None:
    """Seconds on the run's clock until its loss meets `target`, see `reached`; None if it never
    does.
    """
    found = reached(run, target)
    return found and found[0]


def time_per_step_s(run: Result) -> float | None:
    """Seconds on the run's clock for each inner step of all workers together; None if there are no
    inner steps.
    """
    steps: int = run.summary["inner_steps"]
    return run.summary["time_s"] / steps if steps else None


def rows(runs: Sequence[Result], target: float | None) -> list[Row]:
    """One row for each label, over its seeds: what the tables show, before it is formatted.

    First the labels of which most seeds reach the target, among them the fastest; those that never
    reach it come last, by final loss, and behind them those of which a seed has diverged. Without
    a target, the one with the lowest final loss comes first; without losses, the one that takes the
    least time per inner step. Raises ReportError if
    there are no runs, or if their losses differ in kind.

    Keys of a row:
        label, seeds, reached: the label, how many runs have it, and how many of these reach the
            target.
        clock: `modelled`, or `measured` of a live run.
        time_to_target_s: mean over the runs that reach the target; None if none does.
        time_to_target_s_grid: how well one of these times is known: half the time between the two
            evaluations around the target, mean over the same runs.
        speed_up: time of the slowest label that reaches the target ÷ time of this one; 1.0 is the
            slowest.
        times_slower: time of this label ÷ time of the fastest; 1.0 is the fastest. The published
            comparison quotes this one. Both ratios are among labels with the same clock, and None
            unless all seeds reach the target: a mean over the lucky ones would flatter. None too if
            a seed has diverged, though it met the target on its way.
        diverged: how many of the runs have diverged.
        time_per_step_s: seconds of a run ÷ inner steps that all its workers together have trained
            in them, mean over the runs; None if one of them has trained none.
        final_loss, time_s, inner_steps, outer_steps, tokens, unreported_fraction, slow_link_bytes,
            idle_fraction: means; None if a run lacks it. `inner_steps` and `tokens` are those
            trained, `unreported_fraction` the share of them that is not in the model.
        *_sd: for each of these means, the sample standard deviation over seeds; None for a single
            run.
    """
    if not runs:
        raise ReportError("no runs to report")
    if len(names := loss_names(runs)) > 1:
        raise ReportError(f"runs with different losses cannot share a report: {', '.join(names)}")
    result = []
    for label, group in by_label(runs).items():
        met = [found for run in group if (found := reached(run, target)) is not None]
        clock = group[0].summary.get("clock", "modelled")
        row: Row = {"label": label, "seeds": len(group), "reached": len(met), "clock": clock}
        row["diverged"] = sum(map(diverged, group))
        row["time_to_target_s"], row["time_to_target_s_sd"] = mean_and_sd([at_s for at_s, _ in met])
        row["time_to_target_s_grid"], _ = mean_and_sd([half_s for _, half_s in met])
        for key in MEANS:
            row[key], row[f"{key}_sd"] = mean_and_sd([run.summary.get(key) for run in group])
        row["time_per_step_s"], row["time_per_step_s_sd"] = mean_and_sd(
            [time_per_step_s(run) for run in group]
        )
        result.append(row)
    sound = [row for row in result if row["reached"] == row["seeds"] and not row["diverged"]]
    for row in result:
        complete = [other["time_to_target_s"] for other in sound if other["clock"] == row["clock"]]
        time = row["time_to_target_s"] if row in sound else None
        row["speed_up"] = max(complete) / time if time else None
        row["times_slower"] = time / min(complete) if time else None
    return sorted(
        result,
        key=lambda row: (
            row["diverged"] > 0,
            -row["reached"] / row["seeds"],
            row["time_to_target_s"] or row["final_loss"] or row["time_per_step_s"] or math.inf,
        ),
    )


def as_json(runs: Sequence[Result], target: float | None) -> dict[str, Any]:
    """The comparison for a program: one object a run, with null where a figure does not apply."""
    return {
        "runs": [_figures_of(run, target) for run in runs],
        "target_loss": target,
        "real": "; ".join(dict.fromkeys(run.summary["real"] for run in runs)),
        "modelled": "; ".join(
            dict.fromkeys(run.summary["modelled"] for run in runs if run.summary["modelled"])
        ),
    }


def _figures_of(run: Result, target: float | None) -> dict[str, Any]:
    time_s, half_s = reached(run, target) or (None, None)
    figures = {key: run.summary.get(key) for key in _JSON}
    return figures | {
        "time_to_target_s": time_s,
        "time_to_target_s_grid": half_s,
        "time_per_step_s": time_per_step_s(run),
        "diverged": diverged(run),
    }


def record(run: Result, target: float | None) -> dict[str, Any]:
    """One run as a flat row: the figures of `as_json`, each setting of the method as
    `settings.NAME`, and how many updates were refused and workers restarted.
    """
    row = _figures_of(run, target)
    for counts in ("refused_updates", "restarts"):
        row[counts] = sum((row[counts] or {}).values())
    settings: dict[str, Any] = row.pop("settings")
    return row | {f"settings.{name}": value for name, value in settings.items()}


def loss_names(runs: Iterable[Result]) -> list[str]:
    return sorted({run.summary["loss_name"] for run in runs if points(run, "time_s", "loss")})


def by_label(runs: Iterable[Result]) -> Groups:
    groups: Groups = {}
    for run in runs:
        groups.setdefault(run.summary["label"], []).append(run)
    return groups


def mean_and_sd(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; None where they are not defined."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    return fmean(known), stdev(known) if len(known) > 1 else None
