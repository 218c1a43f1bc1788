"""How much a result depends on the keys of a sweep, as plots.

What belongs here: figures of final losses and times against the values of swept keys, each with its
name and caption, and how a value is written. What does not: which runs a sweep makes (`grid.py`),
and the plots that every report has (`plots.py`).

An interval is always ± one sample standard deviation over seeds, as in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from archipel.report.comparison import (
    Groups,
    by_label,
    diverged,
    loss_names,
    time_per_step_s,
    time_to_target_s,
)
from archipel.report.plots import LOOKS, Plot, drawable
from archipel.report.results import Result
from archipel.report.words import clock_format

Value = bool | int | float | str | None
Values = Mapping[str, Value]
"""A setting of a sweep: each key's value."""
_LINES_SHOWN = 8
"""With more lines than this a heat map reads better."""
_DECADE = 10.0
_HEIGHT = 4.0
"""A panel of lines goes no higher above the lowest number than so many times the median does."""


def text_of(value: Value) -> str:
    """A value as a recipe has it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return str(value)


@dataclass(frozen=True)
class Key:
    """A key of a recipe that is swept.

    Attributes:
        key: as it was asked for, such as `halos.accumulate`.
        name: what tells it from the other keys, such as `accumulate`.
        values: in the order in which they were asked for.
    """

    key: str
    name: str
    values: Sequence[Value]

    @property
    def is_number(self) -> bool:
        """All values are numbers."""
        return all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values
        )

    @property
    def shown(self) -> list[Value]:
        """The values as an axis shows them: numbers rise."""
        numbers: list[Any] = list(self.values)
        return sorted(numbers) if self.is_number else numbers


@dataclass(frozen=True)
class _Quantity:
    """What is drawn: one number a run; None: there is none."""

    name: str
    of: Callable[[Result], float | None]
    missing: str
    show: Callable[[float], str] = "{:.3f}".format


def figures(
    keys: Sequence[Key], cells: Mapping[str, Values], runs: Sequence[Result], target: float | None
) -> Iterable[Plot]:
    """One plot for one key or two, else one for each key.

    Args:
        keys: those that were swept.
        cells: each label's values.
        runs: as many of each label, in the same order of seeds.
        target: the loss that times are drawn for; None: none are.
    """
    groups = by_label(runs)
    quantities = _quantities(groups, target)
    if not quantities:
        return
    seeds = len(next(iter(groups.values())))
    match keys:
        case [key]:
            yield "sensitivity", *_one(key, cells, groups, quantities, seeds)
        case [_, _]:
            yield "sensitivity", *_two(keys, cells, groups, quantities, seeds)
        case _:
            for key in keys:
                others = [other.name for other in keys if other is not key]
                figure, caption = _one(key, cells, groups, quantities, seeds, others)
                yield f"sensitivity_{key.name}", figure, caption


def _quantities(groups: Groups, target: float | None) -> list[_Quantity]:
    """Losses, and times to the target, if there is a setting in which every run has one; of runs
    without losses the time of an inner step.
    """
    runs = [run for group in groups.values() for run in group]

    def final_loss(run: Result) -> float | None:
        return None if diverged(run) else run.summary["final_loss"]

    def time_s(run: Result) -> float | None:
        return None if diverged(run) else time_to_target_s(run, target)

    if not (names := loss_names(runs)):
        return [
            _Quantity("time per inner step (s)", time_per_step_s, "no inner steps", "{:.4g}".format)
        ]

    def is_known(of: Callable[[Result], float | None]) -> bool:
        return any(all(of(run) is not None for run in group) for group in groups.values())

    if not is_known(final_loss):
        return []
    quantities = [_Quantity(f"final {names[0]}", final_loss, "diverged")]
    if target is not None and is_known(time_s):
        clock = clock_format(max(run.summary["time_s"] for run in runs))
        name = f"time to loss {target:.3f}"
        quantities.append(_Quantity(name, time_s, "diverged, or not all seeds meet it", clock))
    return quantities


def _point(groups: Sequence[Sequence[Result]], quantity: _Quantity) -> tuple[Sequence[float], int]:
    """For each seed the mean over groups, without those in which a run has no number; and how many
    these are.
    """
    of_runs = [[quantity.of(run) for run in group] for group in groups]
    known = [[n for n in numbers if n is not None] for numbers in of_runs if None not in numbers]
    return [fmean(of_seed) for of_seed in zip(*known, strict=True)], len(groups) - len(known)


def _one(
    key: Key,
    cells: Mapping[str, Values],
    groups: Groups,
    quantities: Sequence[_Quantity],
    seeds: int,
    others: Sequence[str] = (),
) -> tuple[Figure, str]:
    """A panel for each quantity, against the values of one key; averaged over `others`."""
    figure, panels = _panels(quantities)
    said = []
    for axes, quantity in zip(panels, quantities, strict=True):
        points = []
        for value in key.shown:
            found = [groups[label] for label in cells if cells[label][key.key] == value]
            point, without = _point(found, quantity)
            points.append(point)
            if without and others:
                said.append(
                    f" Left out at {key.name} = {text_of(value)} ({quantity.missing}): {without} "
                    f"of {len(found)} settings."
                )
        _series(axes, key, points, LOOKS[0][0])
        _finish(axes, key, quantity)
        if not all(points):
            said.append(f" ×: {quantity.missing}.")
    average = ""
    if others:
        average = (
            f" Each point is a mean over {len(cells) // len(key.values)} settings, those of "
            f"{' and '.join(others)}."
        )
    caption = f"{_names(quantities)} against {key.name}.{average}{_interval(seeds)}"
    return figure, caption + "".join(dict.fromkeys(said))


def _two(
    keys: Sequence[Key],
    cells: Mapping[str, Values],
    groups: Groups,
    quantities: Sequence[_Quantity],
    seeds: int,
) -> tuple[Figure, str]:
    """A panel for each quantity, against one key; a line for each value of the other."""
    # Numbers along the axis rather than as lines, then the longer list; else the first key.
    key, other = sorted(keys, key=lambda one: (one.is_number, len(one.values)), reverse=True)
    cell = {(values[key.key], values[other.key]): groups[label] for label, values in cells.items()}
    figure, panels = _panels(quantities)
    lines = len(other.values) <= _LINES_SHOWN
    said = []
    for axes, quantity in zip(panels, quantities, strict=True):
        grid = [
            [_point([cell[value, line]], quantity)[0] for value in key.shown]
            for line in other.shown
        ]
        if lines:
            for line, points, colour in zip(other.shown, grid, _colours(other), strict=True):
                label = drawable(f"{other.name} {text_of(line)}")
                _series(axes, key, points, colour, label)
            _finish(axes, key, quantity)
            if _cut(axes, [point for points in grid for point in points]):
                said.append(" High values are cut off.")
        else:
            _heat_map(axes, key, other, grid, quantity)
        if not all(point for points in grid for point in points):
            said.append(f" ×: {quantity.missing}.")
    caption = f"{_names(quantities)} against {key.name}, for each {other.name}."
    if lines:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        return figure, caption + _interval(seeds) + "".join(dict.fromkeys(said))
    over = f" Means over {seeds} seeds." if seeds > 1 else " One seed."
    return figure, caption + over + "".join(dict.fromkeys(said))


def _names(quantities: Sequence[_Quantity]) -> str:
    """`Final loss and time to loss 2.000`."""
    names = " and ".join(quantity.name for quantity in quantities)
    return names[0].upper() + names[1:]


def _interval(seeds: int) -> str:
    if seeds == 1:
        return " One seed: points alone, which say nothing of other seeds."
    return f" Points: single seeds. Line and bar: mean ± one standard deviation over {seeds} seeds."


def _panels(quantities: Sequence[_Quantity]) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    return figure, list(figure.subplots(1, len(quantities), squeeze=False)[0])


def _colours(key: Key) -> list[Any]:
    """Of lines: from dark to light where values are numbers."""
    if not key.is_number:
        return [colour for colour, _ in LOOKS[: len(key.values)]]
    return list(colormaps["viridis"](np.linspace(0, 0.85, len(key.values))))


def _places(key: Key) -> list[float]:
    """Where the values lie on an axis."""
    if key.is_number:
        return [float(value) for value in key.shown if value is not None]
    return [float(place) for place in range(len(key.values))]


def _series(
    axes: Axes, key: Key, points: Sequence[Sequence[float]], colour: Any, label: str = ""
) -> None:
    """Points of single seeds; with several, their means with bars, and a line, which is dotted
    where values have no order. A cross at the upper edge where there are none.
    """
    places = _places(key)
    known = [(at, point) for at, point in zip(places, points, strict=True) if point]
    missing = [at for at, point in zip(places, points, strict=True) if not point]
    means = [fmean(point) for _, point in known]
    at = [place for place, _ in known]
    several = any(len(point) > 1 for _, point in known)
    if several:
        axes.errorbar(
            at,
            means,
            [stdev(point) for _, point in known],
            color=colour,
            capsize=3,
            linewidth=1.6,
            linestyle="-" if key.is_number else ":",
            label=label,
        )
    for place, point in known:
        axes.plot([place] * len(point), point, "o", color=colour, markersize=4, alpha=0.6)
    if not several:
        axes.plot(at, means, "o-" if label else "o", color=colour, linewidth=0.8, label=label)
    if missing:  # an empty line would count as one at the figure's left edge
        heights = [0.97] * len(missing)
        axes.plot(missing, heights, "x", color=colour, transform=axes.get_xaxis_transform())


def _finish(axes: Axes, key: Key, quantity: _Quantity) -> None:
    """Scales, ticks and names of a panel's axes."""
    places = _places(key)
    if key.is_number and min(places) > 0 and max(places) > _DECADE * min(places):
        axes.set_xscale("log")
    axes.minorticks_off()
    _ticks(axes, "x", key, places)
    axes.set_ylabel(drawable(quantity.name))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: quantity.show(y)))


def _cut(axes: Axes, points: Sequence[Sequence[float]]) -> bool:
    """Lower a panel, so that it shows where most lines differ though some setting is far off; tell
    whether that was so.
    """
    shown = np.array([number for point in points for number in point])
    low, high = shown.min(), shown.max()
    top = low + _HEIGHT * (np.median(shown) - low)
    if far_off := bool(low < top < high):
        axes.set_ylim(low - 0.06 * (top - low), top)
    return far_off


def _ticks(axes: Axes, which: str, key: Key, places: Sequence[float]) -> None:
    """The values of a key as ticks."""
    texts = [drawable(text_of(value)) for value in key.shown]
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(places, texts)
    axis.set_label_text(drawable(key.name))
    if which == "x" and max(map(len, texts)) * len(texts) > 60:
        axis.set_tick_params(rotation=30)


def _heat_map(
    axes: Axes,
    key: Key,
    other: Key,
    grid: Sequence[Sequence[Sequence[float]]],
    quantity: _Quantity,
) -> None:
    """Means as colours, dark is low; a cross where there are none."""
    means = np.array([[fmean(point) if point else np.nan for point in points] for points in grid])
    image = axes.imshow(means, aspect="auto", cmap="viridis", origin="lower")
    bar = axes.figure.colorbar(image, ax=axes, label=drawable(quantity.name))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: quantity.show(y)))
    for row, column in zip(*np.nonzero(np.isnan(means)), strict=True):
        axes.plot(column, row, "x", color="#444444")
    axes.grid(visible=False)
    _ticks(axes, "x", key, range(len(key.values)))
    _ticks(axes, "y", other, range(len(other.values)))
