"""Run directories -> tables, plots and one HTML page.

What belongs here: reading what finished runs left behind, comparing them, and showing the
comparison. What does not: running or measuring anything, and knowledge of any method or engine. A
report reads `summary.json`, `metrics.jsonl` and `trace.json`.

The comparison is the published one (HALoS, arXiv 2506.04531): the time on the run's clock until the
loss reaches a target. Runs with equal labels are seeds of one method. Runs without losses (`task:
none`) are compared by time and bytes only.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter
from rich.table import Table
from rich.text import Text

from archipel.errors import UserError

_SUMMARY = (
    "label seed time_s inner_steps tokens outer_steps slow_link_bytes idle_fraction final_loss "
    "real modelled settings changed "
    "loss_name entropy_rate wall_s processes machine versions stopped"
)
_JSON = [
    "method",
    "label",
    "seed",
    "time_s",
    "inner_steps",
    "tokens",
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
    "settings",
]
_MEANS = (
    "final_loss",
    "time_s",
    "inner_steps",
    "outer_steps",
    "tokens",
    "slow_link_bytes",
    "idle_fraction",
)
# Okabe and Ito's palette, which colour-blind readers can tell apart; without its yellow, with a
# grey and a brown.
_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#444444", "#56B4E9", "#7A5C00"]
_LOOKS = [(colour, dashes) for dashes in ("-", "--", ":") for colour in _COLOURS]
_ACTIVITIES = {
    "send": ("#FA3", "message in flight"),
    "all_reduce": ("#B43", "all-reduce"),
    "compute": ("#246", "computes"),
}
_WAITS = "#DCE1E7"
_ROWS_SHOWN = 64
_TICKS_S = [n * unit_s for unit_s in (1, 60, 3600, 50 * 3600) for n in (1, 2, 5, 10, 20)]
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "text.parse_math": False,  # a `$` in a label is a `$`
}


class ReportError(UserError, ValueError):
    """A run directory that cannot be read (the message names the file), or runs that cannot be
    compared.
    """


@dataclass(frozen=True)
class Result:
    """What one finished run left behind.

    Attributes:
        directory: where it was read from.
        summary: `summary.json`.
        evals: the `eval` lines of `metrics.jsonl`, in the order of writing. A number that is not
            finite is None.
    """

    directory: Path
    summary: dict[str, Any]
    evals: list[dict[str, Any]]


_Groups = dict[str, list[Result]]  # label -> its runs
_Row = dict[str, Any]  # see `rows`
_Trace = dict[
    str, dict[str, list[tuple[float, float]]]
]  # node -> activity -> its spans: start and length in seconds


def find(directory: Path) -> list[Path]:
    """The run directories right in a folder, by name; or the folder itself if it is one."""
    return (
        [directory]
        if (directory / "summary.json").is_file()
        else sorted(path.parent for path in directory.glob("*/summary.json"))
    )


def load(directory: str | os.PathLike[str]) -> Result:
    """Read a run directory; behind its label stands if the run was live, or interrupted.

    Raises ReportError if a file is missing, is not JSON or lacks a key; the message names it.
    """
    directory = Path(directory)
    summary, metrics = directory / "summary.json", directory / "metrics.jsonl"
    values = _json(_read(summary), f"{summary}")
    if lacking := [key for key in _SUMMARY.split() if key not in values]:
        raise ReportError(f"{summary} lacks {', '.join(lacking)}")
    marks = ["live"] * (values.get("clock") == "measured") + ["interrupted"] * (
        values["stopped"] == "interrupted"
    )
    if marks:
        values["label"] += f" ({', '.join(marks)})"
    lines = [
        _json(line, f"{metrics}, line {number},")
        for number, line in enumerate(_read(metrics).splitlines(), start=1)
    ]
    return Result(directory, values, [line for line in lines if line.get("kind") == "eval"])


def distinguish(runs: Sequence[Result]) -> list[Result]:
    """The runs, each once, so that equal labels mean seeds of one experiment.

    Where runs of one label differ in more than the seed (settings, task, topology, length), or have
    one seed twice, each gets the name of the folder it lies in behind its label. Raises ReportError
    if even that does not tell them apart.
    """
    once = list({run.directory.resolve(): run for run in runs}.values())
    experiments: dict[str, set[str]] = defaultdict(set)
    seeds = Counter((run.summary["label"], run.summary["seed"]) for run in once)
    for run in once:
        experiments[run.summary["label"]].add(_experiment(run))
    told = []
    for run in once:
        label = run.summary["label"]
        if len(experiments[label]) > 1 or any(seeds[key] > 1 for key in seeds if key[0] == label):
            folder = run.directory.resolve().parent.name
            run = replace(run, summary=run.summary | {"label": f"{label} ({folder})"})
        told.append(run)
    groups: dict[str, set[str]] = defaultdict(set)
    for run in told:
        groups[run.summary["label"]].add(_experiment(run))
    for label, kinds in groups.items():
        repeated = Counter(run.summary["seed"] for run in told if run.summary["label"] == label)
        if len(kinds) > 1 or max(repeated.values()) > 1:
            raise ReportError(
                f"the runs called {label!r} are not seeds of one experiment; put them in folders "
                "of different names"
            )
    return told


def _experiment(run: Result) -> str:
    """All that a run was, but for its seed and label, as text."""
    recipe = run.directory / "recipe.yaml"
    if recipe.is_file():
        return re.sub(r"^(label|  seed):.*$", "", _read(recipe).decode(), flags=re.MULTILINE)
    return json.dumps(
        [run.summary[key] for key in ("settings", "real", "modelled")], sort_keys=True
    )


def target_loss(runs: Sequence[Result]) -> float | None:
    """The loss that the worst of the runs ends at, so that every run reaches it; interrupted ones
    count only if all were.

    None if no run has a final loss.
    """
    ended = [run for run in runs if run.summary["stopped"] != "interrupted"] or runs
    return max(
        (run.summary["final_loss"] for run in ended if run.summary["final_loss"] is not None),
        default=None,
    )


def time_to_target_s(run: Result, target: float | None) -> float | None:
    """Seconds on the run's clock at its first evaluation after the start with a loss at or below
    `target`; None if there is none.

    Not interpolated: the loss crossed the target somewhere between this evaluation and the one
    before.
    """
    # An untrained model at or below the target says nothing about a method.
    trained = [point for point in _points(run, "time_s", "loss") if point[0] > 0]
    return next((time_s for time_s, loss in trained if target is not None and loss <= target), None)


def rows(runs: Sequence[Result], target: float | None) -> list[_Row]:
    """One row for each label, over its seeds: what the tables show, before it is formatted.

    First the labels of which most seeds reach the target, among them the fastest; those that never
    reach it come last, by final loss. Without losses, the shortest run comes first. Raises
    ReportError if there are no runs, or if their losses differ in kind.

    Keys of a row: label, seeds, reached: the label, how many runs have it, and how many of these
        reach the target. time_to_target_s: mean over the runs that reach the target; None if none
        does. clock: `modelled`, or `measured` of a live run. speed_up: time of the slowest label
        that reaches the target ÷ time of this one. 1.0 is the slowest. times_slower: time of this
        label ÷ time of the fastest. 1.0 is the fastest; the published comparison quotes this one.
            Both are among labels with the same clock, and None unless all seeds reach the target: a
            mean over the lucky ones would flatter.
        final_loss, time_s, inner_steps, outer_steps, tokens, slow_link_bytes, idle_fraction: means;
        None if a run lacks it. *_sd: for each of these means, the sample standard deviation over
        seeds; None for a single run.
    """
    if not runs:
        raise ReportError("no runs to report")
    if len(names := _loss_names(runs)) > 1:
        raise ReportError(f"runs with different losses cannot share a report: {', '.join(names)}")
    result = []
    for label, group in _by_label(runs).items():
        times = [time for run in group if (time := time_to_target_s(run, target)) is not None]
        clock = group[0].summary.get("clock", "modelled")
        row: _Row = {"label": label, "seeds": len(group), "reached": len(times), "clock": clock}
        row["time_to_target_s"], row["time_to_target_s_sd"] = _mean_sd(times)
        for key in _MEANS:
            row[key], row[f"{key}_sd"] = _mean_sd([run.summary[key] for run in group])
        result.append(row)
    for row in result:
        same = [
            other
            for other in result
            if other["clock"] == row["clock"] and other["reached"] == other["seeds"]
        ]
        complete = [other["time_to_target_s"] for other in same]
        time = row["time_to_target_s"] if row["reached"] == row["seeds"] else None
        row["speed_up"], row["times_slower"] = (
            (max(complete) / time, time / min(complete)) if time else (None, None)
        )
    return sorted(
        result,
        key=lambda row: (
            -row["reached"] / row["seeds"],
            row["time_to_target_s"] or row["final_loss"] or row["time_s"],
        ),
    )


def as_json(runs: Sequence[Result], target: float | None) -> dict[str, Any]:
    """The comparison for a program: one object a run, with null where a figure does not apply."""
    return {
        "runs": [
            {
                **{key: run.summary.get(key) for key in _JSON},
                "time_to_target_s": time_to_target_s(run, target),
            }
            for run in runs
        ],
        "target_loss": target,
        "real": "; ".join(dict.fromkeys(run.summary["real"] for run in runs)),
        "modelled": "; ".join(
            dict.fromkeys(run.summary["modelled"] for run in runs if run.summary["modelled"])
        ),
    }


def record(run: Result, target: float | None) -> dict[str, Any]:
    """One run as a flat row: the figures of `as_json`, each setting of the method as
    `settings.NAME`, and how many updates were refused and workers restarted.
    """
    row: dict[str, Any] = {key: run.summary.get(key) for key in _JSON} | {
        "time_to_target_s": time_to_target_s(run, target)
    }
    for counts in ("refused_updates", "restarts"):
        row[counts] = sum((row[counts] or {}).values())
    settings: dict[str, Any] = row.pop("settings")
    return row | {f"settings.{name}": value for name, value in settings.items()}


def table(runs: Sequence[Result], target: float | None) -> Table:
    """The comparison for a terminal of 80 columns or more. Raises as `rows` does."""
    headers, *cells = _cells(rows(runs, target), target)
    result = Table(
        box=None,
        padding=(0, 1),
        pad_edge=False,
        caption=_notes(runs, target),
        caption_justify="left",
    )
    for place, header in enumerate(headers):
        result.add_column(Text(header), justify="right" if place else "left", no_wrap=not place)
    for row in cells:
        result.add_row(*map(Text, row))
    return result


def headline(runs: Sequence[Result]) -> str:
    """The first line of a report: what is real, what is modelled, and how many seeds there are."""
    real = [run.summary["real"] or "nothing was trained (task none)" for run in runs]
    modelled = [run.summary["modelled"] for run in runs if run.summary["modelled"]] or ["nothing"]
    said = [
        "; ".join(text.replace(": ", " – ", 1) for text in dict.fromkeys(texts))
        for texts in (real, modelled)
    ]
    return f"Real: {said[0]}. Modelled: {said[1]}. {_seeds(runs)}."


def changes(runs: Iterable[Result]) -> list[str]:
    """A line for each label that runs with settings other than the published ones."""
    return list(
        dict.fromkeys(
            f"{run.summary['label']}: {_changed(run.summary)}"
            for run in runs
            if run.summary["changed"]
        )
    )


def incidents(runs: Iterable[Result]) -> list[str]:
    """A line for each node of a label whose updates were refused, or that was restarted, over all
    seeds.
    """
    totals: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    after: dict[str, str] = {}
    for run in runs:  # runs of older versions do not say
        # A live run also starts those again that died.
        after[run.summary["label"]] = (
            "" if run.summary.get("clock") == "measured" else " after a loss that was not finite"
        )
        for kind in ("refused_updates", "restarts"):
            for node, count in run.summary.get(kind, {}).items():
                totals[run.summary["label"]][kind, node] += count
    return [
        f"{label}: {count} update{'s' if count > 1 else ''} of {node} refused"
        if kind == "refused_updates"
        else f"{label}: {node} restarted {'once' if count == 1 else f'{count} times'}{after[label]}"
        for label, counts in totals.items()
        for (kind, node), count in counts.items()
    ]


def write(runs: Sequence[Result], out: Path, target: float | None = None) -> Path:
    """Write `report.html`, a page that needs no other file, and its plots as PNG files into `out`.
    Returns the page's path.

    `target` is a loss; `target_loss(runs)` if None. Each file is replaced in one go. Raises
    ReportError as `rows` does, and for a `trace.json` that is not JSON.
    """
    target = target_loss(runs) if target is None else target
    compared = rows(runs, target)
    groups = {row["label"]: _by_label(runs)[row["label"]] for row in compared}
    with matplotlib.rc_context(_STYLE):
        plots = [
            (f"{name}.png", _png(figure), caption)
            for name, figure, caption in _figures(groups, compared, target)
        ]
    headers, *cells = _cells(compared, target, slower=True)
    template = string.Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(", ".join(groups)),
        headline=escape(headline(runs)),
        finding=escape(_finding(compared, target)),
        comparison=_html_table(headers, cells, groups),
        notes=escape(_notes(runs, target)),
        settings="\n".join(_settings(label, group[0].summary) for label, group in groups.items()),
        plots="\n".join(
            f'<figure><img alt="{escape(name)}" '
            f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for name, png, caption in plots
        ),
        runs=_runs_table(groups),
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, content in [*((name, png) for name, png, _ in plots), ("report.html", page.encode())]:
        partial = out / f".{name}.{os.getpid()}"
        partial.write_bytes(content)
        os.replace(partial, out / name)
    return out / "report.html"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ReportError(
            f"{path} is missing: the run has not finished, or this is not a run directory"
        ) from None


def _json(text: bytes, place: str) -> dict[str, Any]:
    """The object in `text`, which lies at `place`; NaN and infinities become None."""
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except ValueError as error:
        raise ReportError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ReportError(f"{place} is not a JSON object")
    return value


def _loss_names(runs: Iterable[Result]) -> list[str]:
    return sorted({run.summary["loss_name"] for run in runs if _points(run, "time_s", "loss")})


def _by_label(runs: Iterable[Result]) -> _Groups:
    groups: _Groups = {}
    for run in runs:
        groups.setdefault(run.summary["label"], []).append(run)
    return groups


def _points(run: Result, x: str, y: str) -> list[tuple[float, float]]:
    """The evaluations that have both quantities."""
    return [
        (line[x], line[y])
        for line in run.evals
        if line.get(x) is not None and line.get(y) is not None
    ]


def _mean_sd(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation; None where they are not defined."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    return fmean(known), stdev(known) if len(known) > 1 else None


def _cells(
    compared: Sequence[_Row], target: float | None, *, slower: bool = False
) -> list[list[str]]:
    """The comparison as text, headers first. `slower` adds the inverse of the speed-up."""
    clock = _clock(max(row["time_s"] for row in compared))
    trained = any(row["final_loss"] is not None for row in compared)
    columns: list[tuple[str, str, Callable[[Any], str], bool]] = [
        ("method", "label", str, True),
        (
            "time to target" if target is None else f"time to loss {target:.3f}",
            "time_to_target_s",
            clock,
            trained,
        ),
        ("speed-up", "speed_up", _factor, trained),
        ("times slower than the fastest", "times_slower", _factor, trained and slower),
        ("final loss", "final_loss", "{:.3f}".format, trained),
        ("tokens", "tokens", lambda value: _prefixed(value, "", " k", " M", " B", " T"), trained),
        ("time", "time_s", clock, not trained),
        ("inner steps", "inner_steps", "{:,.0f}".format, not trained),
        ("outer steps", "outer_steps", "{:,.0f}".format, not trained),
        (
            "bytes over slow links",
            "slow_link_bytes",
            lambda value: _prefixed(value, " B", " kB", " MB", " GB", " TB", " PB"),
            True,
        ),
        ("idle", "idle_fraction", "{:.1%}".format, True),
    ]
    columns = [column for column in columns if column[-1]]
    return [
        [header for header, *_ in columns],
        *([_cell(row, key, show) for _, key, show, _ in columns] for row in compared),
    ]


def _cell(row: _Row, key: str, show: Callable[[Any], str]) -> str:
    """`1.93 ±0.02`; without the deviation if it would show as nought, with the share of the seeds
    that the figure is of.
    """
    if row[key] is None:
        return "never" if key == "time_to_target_s" and row["final_loss"] is not None else "–"
    sd = row.get(f"{key}_sd")
    deviation = "" if sd is None or show(sd) == show(0.0) else f" ±{show(sd)}"
    part = key == "time_to_target_s" and row["reached"] < row["seeds"]
    return (
        show(row[key]) + deviation + (f" ({row['reached']}/{row['seeds']} seeds)" if part else "")
    )


def _prefixed(value: float, *units: str) -> str:
    """Three digits, with the unit that fits; each unit is 1000 times the one before."""
    power = next(
        (power for power in range(len(units)) if value < 999.5 * 1000**power), len(units) - 1
    )
    scaled = value / 1000**power
    decimals = 0 if power == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{decimals}f}{units[power]}"


def _clock(largest_s: float) -> Callable[[float], str]:
    """How all times of one table or axis are written: in seconds if none is above ten minutes, else
    h:mm:ss.
    """
    if largest_s < 600:
        return "{:.1f} s".format
    return lambda time_s: (
        f"{round(time_s) // 3600}:{round(time_s) // 60 % 60:02}:{round(time_s) % 60:02}"
    )


def _factor(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1}f}×"


def _seeds(runs: Sequence[Result]) -> str:
    counts = [len(group) for group in _by_label(runs).values()]
    span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{span} seed{'s' if max(counts) > 1 else ''}"


def _finding(compared: Sequence[_Row], target: float | None) -> str:
    """The result in one sentence."""
    if target is None or all(row["final_loss"] is None for row in compared):
        return "No losses to compare: this is about time and bytes."
    if not (reach := [row for row in compared if row["speed_up"] is not None]):
        return "No method reaches the target loss with all of its seeds."
    if len({row["clock"] for row in reach}) > 1:
        return (
            "Times of live runs are measured, those of the others modelled: they cannot be "
            "compared with each other."
        )
    time = _clock(max(row["time_s"] for row in compared))(reach[0]["time_to_target_s"])
    slowest = (
        f"; {reach[-1]['label']} takes {_factor(reach[-1]['times_slower'])} as long"
        if len(reach) > 1
        else ""
    )
    return (
        f"{reach[0]['label']} reaches the target loss {'first, ' if slowest else ''}after "
        f"{time}{slowest}."
    )


def _notes(runs: Sequence[Result], target: float | None) -> str:
    several = (
        f" ± is one standard deviation over {_seeds(runs)}."
        if len(runs) > len(_by_label(runs))
        else ""
    )
    if any(run.summary["stopped"] == "interrupted" for run in runs):
        several += " Interrupted runs are shown as far as they came."
    if len({run.summary.get("clock", "modelled") for run in runs}) > 1:
        several += (
            " Live runs have a measured clock and real bytes, the others modelled ones: "
            "compare within a kind only."
        )
    several += "".join(f" {line}." for line in incidents(runs))
    if target is None or not _loss_names(runs):
        return f"All figures are of whole runs.{several}"
    chosen = (
        "the loss that the worst of these runs ends at"
        if target == target_loss(runs)
        else "as asked for"
    )
    return (
        f"Target: {_loss_names(runs)[0]} {target:.3f}, {chosen}; the time is that of the first "
        "evaluation at or below it. "
        "Speed-up: times faster than the slowest method that reaches it. Tokens, bytes and idle "
        f"time are of whole runs.{several}"
    )


def _html_table(headers: Iterable[str], cells: Iterable[Sequence[str]], groups: _Groups) -> str:
    """A table whose first column is a label, beside the colour that the label has in the plots."""
    looks = dict(zip(groups, cycle(_LOOKS), strict=False))
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(
        f'\n<tr><th><i style="background:{looks[label][0]}"></i>{escape(label)}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for label, *rest in cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _changed(summary: dict[str, Any]) -> str:
    return " · ".join(
        f"{key} {used} (published: {default})"
        for key, (used, default) in summary["changed"].items()
    )


def _settings(label: str, summary: dict[str, Any]) -> str:
    """A method's settings: first those that differ from the published ones."""
    others = " · ".join(
        f"{key} {value}"
        for key, value in summary["settings"].items()
        if key not in summary["changed"]
    )
    first = (
        f"<b>{escape(_changed(summary))}</b>"
        if summary["changed"]
        else "all as published"
        if others
        else "nothing to set"
    )
    return f"<dt>{escape(label)}</dt><dd>{first}<small>{escape(others)}</small></dd>"


def _runs_table(groups: _Groups) -> str:
    keys = ("label", "seed", "stopped", "inner_steps", "time_s", "wall_s", "processes", "machine")
    cells = []
    for run in chain.from_iterable(groups.values()):
        values = (
            f"{value:.1f}" if isinstance(value := run.summary[key], float) else str(value)
            for key in keys
        )
        versions = ", ".join(
            f"{name} {version}" for name, version in run.summary["versions"].items()
        )
        cells.append([*values, versions, run.directory.name])
    return _html_table([*keys, "versions", "directory"], cells, groups)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _figures(
    groups: _Groups, compared: Sequence[_Row], target: float | None
) -> Iterable[tuple[str, Figure, str]]:
    """Name, figure and caption of each plot that the runs have the data for."""
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
    if any(_points(run, "time_s", "loss") for run in every):
        dots = {
            row["label"]: (row["time_to_target_s"], target) for row in compared if row["speed_up"]
        }
        caption = (
            "Loss against time, modelled or measured as the first line says. Large dots: when an "
            "evaluation was at or below the "
            f"target for the first time. High losses are cut off.{band}"
        )
        yield "loss_vs_time", _curves(groups, "time_s", "loss", target, dots), caption
        caption = (
            f"Loss against {data.replace('_', ' ')}: what a method learns from the same "
            f"data, whatever the network.{band}"
        )
        yield "loss_vs_tokens", _curves(groups, data, "loss", target, {}), caption
    if any(spread for run in every for _, spread in _points(run, data, "replica_std")):
        caption = (
            "How far apart the replicas are: root mean square distance of a weight from its "
            f"mean over replicas.{band}"
        )
        yield "replica_spread", _curves(groups, data, "replica_std", None, {}), caption
    if traces := {label: trace for label, group in groups.items() if (trace := _trace(group[0]))}:
        caption = (
            f"The beginning of one run of each method. A row is a node (at most {_ROWS_SHOWN} are "
            "drawn), on white a server. "
            "A message lies on its sender's row. Idle: share of the workers' time in the whole run "
            "in which they do not "
            "compute, transfers among it."
        )
        without = ", ".join(label for label in groups if label not in traces)
        yield (
            "timeline",
            _timeline(traces, groups),
            f"{caption} No trace: {without}." if without else caption,
        )


def _curves(
    groups: _Groups, x: str, y: str, target: float | None, dots: dict[str, tuple[Any, Any]]
) -> Figure:
    """Lines of `y` over `x`, one for each label, and a dot on some of them."""
    looks = dict(zip(groups, cycle(_LOOKS), strict=False))
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
    figure.legend(handles, list(lines), loc="outside right upper")
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
        _loss_names(chain.from_iterable(groups.values()))[0]
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
    clock = _clock(end_s)
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
    seeds = [found for run in group if (found := _points(run, x, y))] or [[]]
    points = np.array([seed[: min(map(len, seeds))] for seed in seeds], dtype=float).reshape(
        len(seeds), -1, 2
    )
    sd = points[..., 1].std(axis=0, ddof=1) if len(seeds) > 1 else np.zeros(points.shape[1])
    return np.vstack([points.mean(axis=0).T, sd])


def _trace(run: Result) -> _Trace:
    """The spans of `trace.json`; empty if the run has none."""
    path = run.directory / "trace.json"
    events = _json(_read(path), f"{path}").get("traceEvents", []) if path.exists() else []
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    trace: _Trace = {named[key]: {kind: [] for kind in _ACTIVITIES} for key in sorted(named)}
    for event in events:
        if event["ph"] == "X" and event["name"] in _ACTIVITIES:
            trace[named[event["pid"], event["tid"]]][event["name"]].append(
                (event["ts"] / 1e6, event["dur"] / 1e6)
            )
    return trace


def _window_s(traces: Iterable[_Trace]) -> float:
    """Three rounds of every worker of the slowest method, but no longer than the shortest trace."""
    ends, rounds = [], []
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


def _timeline(traces: dict[str, _Trace], groups: _Groups) -> Figure:
    """One panel for each label, one row for each node, the same stretch of time in all panels."""
    looks = dict(zip(groups, cycle(_LOOKS), strict=False))
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
        axes.set_yticks([sum(places) / len(places) for places in regions.values()], list(regions))
        axes.tick_params(axis="both", length=0)
        axes.set_ylim(row + 0.7, 1.1)
        axes.set_title(label, loc="left", color=looks[label][0], fontsize=11, fontweight="bold")
        idle, _ = _mean_sd([run.summary["idle_fraction"] for run in groups[label]])
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
