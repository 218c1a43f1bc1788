"""The plots of a report.

What belongs here: figures drawn from a comparison, each with its name and caption. What does not:
the numbers in them (`comparison.py`), and the page that they are in (`page.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from archipel.report.comparison import Groups, Row, loss_names, mean_and_sd
from archipel.report.results import Result, Trace, points, trace_of
from archipel.report.words import clock_format

# Okabe and Ito's palette, which colour-blind readers can tell apart; without its yellow, with a
# grey and a brown.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#444444", "#56B4E9", "#7A5C00"]
LOOKS = [(colour, dashes) for dashes in ("-", "--", ":") for colour in _COLOURS]
_ACTIVITIES = {
    "send": ("#FA3", "message in flight"),
    "all_reduce": ("#B43", "all-reduce"),
    "compute": ("#246", "computes"),
}
_WAITS = "#DCE1E7"
_ROWS_SHOWN = 64
_PANELS_SHOWN = 8
_TICKS_S = [n * unit_s for unit_s in (1, 60, 3600, 50 * 3600) for n in (1, 2, 5, 10, 20)]
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "text.parse_math": False,  # a `$` in a label is a `$`
}


Plot = tuple[str, Figure, str]
"""A plot's name, the figure, and its caption."""


def drawable(text: str) -> str:
    """`text` with a question mark for each character that the plots' font lacks, in place
    of a box and a warning.
    """
    font = get_font(findfont(FontProperties()))
    return "".join(one if font.get_char_index(ord(one)) else "?" for one in text)


def figures(groups: Groups, compared: Sequence[Row], target: float | None) -> Iterable[Plot]:
    """The plots that the runs have the data for."""
    left_out = ""
    if len(groups) > len(LOOKS):  # more cannot be told apart
        left_out = f" Drawn are the first {len(LOOKS)} of {len(groups)}, in the table's order."
        groups = dict(islice(groups.items(), len(LOOKS)))
    every = list(chain.from_iterable(groups.values()))
    data = (
        "tokens"
        if all(line.get("tokens") is not None for run in every for line in run.evals)
        else "inner_steps"
    )
    band = (
        " Line and band: mean ± one standard deviation over seeds, evaluation by evaluation."
        if len(every) > len(groups)
        else ""
    )
    if any(points(run, "time_s", "loss") for run in every):
        dots = {
            row["label"]: (row["time_to_target_s"], target)
            for row in compared
            if row["speed_up"] and row["label"] in groups
        }
        caption = (
            "Loss against time, modelled or measured as the first line says. Large dots: when the "
            "loss meets the target, mean over "
            f"seeds. High losses are cut off.{band}{left_out}"
        )
        yield "loss_vs_time", _curves(groups, "time_s", "loss", target, dots), caption
        caption = (
            f"Loss against {data.replace('_', ' ')}: what a method learns from the same "
            f"data, whatever the network.{band}{left_out}"
        )
        yield "loss_vs_tokens", _curves(groups, data, "loss", target, {}), caption
    if any(spread for run in every for _, spread in points(run, data, "replica_std")):
        caption = (
            "How far apart the replicas are: root mean square distance of a weight from its "
            f"mean over replicas.{band}{left_out}"
        )
        yield "replica_spread", _curves(groups, data, "replica_std", None, {}), caption
    panels = dict(islice(groups.items(), _PANELS_SHOWN))
    if traces := {label: trace for label, group in panels.items() if (trace := trace_of(group[0]))}:
        caption = (
            f"The beginning of one run of each method. A row is a node (at most {_ROWS_SHOWN} are "
            "drawn), on white a server. "
            "A message lies on its sender's row. Idle: share of the workers' time in the whole run "
            "in which they do not "
            "compute, transfers among it."
        )
        if len(panels) < len(groups):
            caption += f" Only the first {len(panels)} in the table's order are drawn."
        without = ", ".join(label for label in panels if label not in traces)
        yield (
            "timeline",
            _timeline(traces, groups),
            f"{caption} No trace: {without}." if without else caption,
        )


def _curves(
    groups: Groups, x: str, y: str, target: float | None, dots: dict[str, tuple[Any, Any]]
) -> Figure:
    """Lines of `y` over `x`, one for each label, and a dot on some of them."""
    looks = dict(zip(groups, cycle(LOOKS), strict=False))
    lines = {
        label: line for label, group in groups.items() if (line := _line(group, x, y))[1].any()
    }
    ends = [at[-1] for at, _, _ in lines.values()]
    if log := x == "time_s" and max(ends) > 20 * min(ends) > 0:
        lines = {label: line[:, line[0] > 0] for label, line in lines.items()}
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    handles = []
    for label, (at, mean, sd) in lines.items():
        colour, dashes = looks[label]
        handles += axes.plot(
            at, mean, color=colour, linestyle=dashes, linewidth=1.8, marker="o", markersize=3
        )
        axes.fill_between(at, mean - sd, mean + sd, color=colour, alpha=0.18, linewidth=0)
    for label, dot in dots.items():
        axes.plot(*dot, "o", color=looks[label][0], markeredgecolor="white", markersize=8, zorder=5)
    figure.legend(handles, [*map(drawable, lines)], loc="outside right upper")
    top = math.inf
    if y == "loss":  # the frame shows where methods differ, not the fall from the first loss
        levels = {
            run.summary["entropy_rate"]: "best possible"
            for group in groups.values()
            for run in group
        } | {target: "target"}
        levels.pop(None, None)
        losses = np.concatenate([mean for _, mean, _ in lines.values()])
        low = min(losses.min(), *levels, math.inf)
        top = min(losses.max(), low + 3 * max(np.median(losses) - low, (target or low) - low))
        height = top - low or 1.0
        axes.set_ylim(low - 0.06 * height, top + 0.02 * height)
        for level, words in levels.items():
            if not axes.get_ylim()[0] <= level <= axes.get_ylim()[1]:
                continue
            axes.axhline(level, color="#333333", linewidth=0.9, linestyle=(0, (5, 4)), zorder=1)
            axes.annotate(
                f"{words} {level:.3f}",
                (0, level),
                (4, 3),
                ("axes fraction", "data"),
                "offset points",
            )
    axes.set_ylabel(
        drawable(loss_names(chain.from_iterable(groups.values()))[0])
        if y == "loss"
        else "replica standard deviation"
    )
    if x == "time_s":
        shown = chain.from_iterable(at[mean <= top] for at, mean, _ in lines.values())
        _time_axis(axes, min(shown, default=min(ends)) if log else 0.0, 1.03 * max(ends) or 1.0)
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel(x.replace("_", " "))
        axes.xaxis.set_major_formatter(EngFormatter())
    return figure


def _time_axis(axes: Axes, start_s: float, end_s: float) -> None:
    """Linear if it starts at 0, else logarithmic; ticks at round times, written as in the
    tables.
    """
    clock = clock_format(end_s)
    step_s = next((tick for tick in _TICKS_S if end_s <= 9 * tick), end_s)
    ticks = _TICKS_S if start_s else [step_s * n for n in range(int(end_s / step_s) + 1)]
    axes.set_xscale("log" if start_s else "linear")
    axes.set_xticks(ticks, [clock(tick).replace(".0", "") for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(start_s, end_s)
    axes.set_xlabel("time")


def _line(group: Sequence[Result], x: str, y: str) -> Any:
    """Rows: mean of `x`, mean and standard deviation of `y` over the seeds. Columns: the
    evaluations that all seeds have.
    """
    seeds = [found for run in group if (found := points(run, x, y))] or [[]]
    curves = np.array([seed[: min(map(len, seeds))] for seed in seeds], dtype=float).reshape(
        len(seeds), -1, 2
    )
    sd = curves[..., 1].std(axis=0, ddof=1) if len(seeds) > 1 else np.zeros(curves.shape[1])
    return np.vstack([curves.mean(axis=0).T, sd])


def _window_s(traces: Iterable[Trace]) -> float:
    """Three rounds of every worker of the slowest method, but no longer than the shortest trace."""
    ends = []
    rounds = []
    for trace in traces:
        ends.append(
            max(
                (
                    start + length
                    for spans in trace.values()
                    for start, length in chain(*spans.values())
                ),
                default=1.0,
            )
        )
        starts = [sorted(start for start, _ in spans["compute"]) for spans in trace.values()]
        rounds.append(max((node[3] for node in starts if len(node) > 3), default=ends[-1]))
    return min(*ends, max(rounds)) or 1.0


def _timeline(traces: dict[str, Trace], groups: Groups) -> Figure:
    """One panel for each label, one row for each node, the same stretch of time in all panels."""
    looks = dict(zip(groups, cycle(LOOKS), strict=False))
    window_s = _window_s(traces.values())
    shown = {
        label: list(trace)[:: math.ceil(len(trace) / _ROWS_SHOWN)]
        for label, trace in traces.items()
    }
    heights = [0.5 + 0.095 * len(nodes) for nodes in shown.values()]
    figure = Figure(figsize=(10, 0.9 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False, height_ratios=heights)[
        :, 0
    ]
    for axes, (label, nodes) in zip(panels, shown.items(), strict=True):
        regions: dict[str, list[float]] = {}
        row = 0.0
        for node in nodes:
            region = node.split("/")[0]
            row += 1.0 if region in regions else 1.8
            regions.setdefault(region, []).append(row)
            spans = traces[label][node]
            if spans["compute"]:
                axes.broken_barh([(0, window_s)], (row - 0.42, 0.84), color=_WAITS, linewidth=0)
            for kind, (colour, _) in _ACTIVITIES.items():
                bars = [(start, length) for start, length in spans[kind] if start < window_s]
                axes.broken_barh(bars, (row - 0.42, 0.84), color=colour, linewidth=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_yticks(
            [sum(places) / len(places) for places in regions.values()], [*map(drawable, regions)]
        )
        axes.tick_params(axis="both", length=0)
        axes.set_ylim(row + 0.7, 1.1)
        axes.set_title(
            drawable(label), loc="left", color=looks[label][0], fontsize=11, fontweight="bold"
        )
        idle, _ = mean_and_sd([run.summary["idle_fraction"] for run in groups[label]])
        axes.set_title("" if idle is None else f"idle {idle:.0%}", loc="right", fontsize=10)
    panels[-1].tick_params(axis="x", length=3)
    _time_axis(panels[-1], 0.0, window_s)
    patches = [Patch(color=colour, label=words) for colour, words in reversed(_ACTIVITIES.values())]
    figure.legend(
        handles=[*patches, Patch(color=_WAITS, label="worker waits")],
        loc="outside upper center",
        ncols=4,
    )
    return figure
