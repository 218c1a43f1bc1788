"""A comparison in words: headline, table, notes.

What belongs here: how numbers are written and explained, for the terminal and the page. What does
not: the numbers themselves (`comparison.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from archipel.report.comparison import Row, by_label, loss_names, rows, target_loss
from archipel.report.results import Result, points

FEW = 4
"""Fewer outer steps, or fewer losses after the start, say little of a method."""


def headline(runs: Sequence[Result]) -> str:
    """The first line of a report: what is real, what is modelled, how vectors travel if not all as
    fp32, and how many seeds there are.
    """
    real = [run.summary["real"] or "nothing was trained (task none)" for run in runs]
    modelled = [run.summary["modelled"] for run in runs if run.summary["modelled"]] or ["nothing"]
    said = [
        "; ".join(text.replace(": ", " – ", 1) for text in dict.fromkeys(texts))
        for texts in (real, modelled)
    ]
    wires = list(dict.fromkeys(run.summary.get("wire", "fp32") for run in runs))
    wire = "" if wires == ["fp32"] else f" Wire: {', '.join(wires)}."
    return f"Real: {said[0]}. Modelled: {said[1]}.{wire} {_seeds(runs)}."


def changes(runs: Iterable[Result]) -> list[str]:
    """A line for each label that runs with settings other than the published ones."""
    return list(
        dict.fromkeys(
            f"{run.summary['label']}: {changed(run.summary)}"
            for run in runs
            if run.summary["changed"]
        )
    )


def shared_changes(runs: Iterable[Result]) -> list[str]:
    """A line for each method: the settings that are not the published ones and are the same in all
    of its runs.
    """
    of_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        of_method[run.summary["method"]].append(run.summary["changed"])
    shared = {
        method: {
            key: pair
            for key, pair in changes[0].items()
            if all(other.get(key) == pair for other in changes)
        }
        for method, changes in of_method.items()
    }
    return [f"{method}: {changed({'changed': pairs})}" for method, pairs in shared.items() if pairs]


def incidents(runs: Iterable[Result]) -> list[str]:
    """A line for each node of a label whose updates were refused, or that was restarted, over all
    seeds; and one for a label of which some faults would have come after the end.
    """
    totals: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    after: dict[str, str] = {}
    faults: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:  # runs of older versions do not say
        # A live run also starts those again that died.
        after[run.summary["label"]] = (
            "" if run.summary.get("clock") == "measured" else " after a loss that was not finite"
        )
        for key in ("faults_planned", "faults_happened"):
            faults[run.summary["label"]][key] += run.summary.get(key, 0)
        for kind in ("refused_updates", "restarts"):
            for node, count in run.summary.get(kind, {}).items():
                totals[run.summary["label"]][kind, node] += count
    return [
        f"{label}: {count} update{'s' if count > 1 else ''} of {node} refused"
        if kind == "refused_updates"
        else f"{label}: {node} restarted {'once' if count == 1 else f'{count} times'}{after[label]}"
        for label, counts in totals.items()
        for (kind, node), count in counts.items()
    ] + [
        f"{label}: {count['faults_happened']} of {count['faults_planned']} planned faults "
        "happened; the run ended before the others"
        for label, count in faults.items()
        if count["faults_happened"] < count["faults_planned"]
    ]


def too_few(runs: Iterable[Result]) -> list[str]:
    """A line for each label whose runs have so few outer steps, or so few losses after the start,
    that their times and losses say little of the method.
    """
    said = []
    for label, group in by_label(list(runs)).items():
        losses = min(
            sum(time_s > 0 for time_s, _ in points(run, "time_s", "loss")) for run in group
        )
        outer_steps = min(run.summary["outer_steps"] or 0 for run in group)
        # Synchronous SGD takes no outer steps, and yet all that is trained is in its model.
        if not outer_steps and all(run.summary.get("absorbed_steps") for run in group):
            few, counted = losses, ""
        else:
            few = min(outer_steps, losses)
            counted = f"{outer_steps} outer step{'s' * (outer_steps != 1)} and "
        if losses and few < FEW:
            said.append(
                f"{label} has {counted}{losses} evaluation{'s' * (losses != 1)} after the start: "
                "too few to judge it"
            )
    return said


def table(
    runs: Sequence[Result],
    target: float | None,
    instead: Mapping[str, Mapping[str, str]] | None = None,
) -> Table:
    """The comparison for a terminal of 80 columns or more. Raises as `rows` does.

    Args:
        instead: columns that stand instead of the label: for each label, texts by header.
    """
    headers, *cells = table_cells(rows(runs, target), target)
    if instead:
        headers = [*next(iter(instead.values())), *headers[1:]]
        cells = [[*instead[label].values(), *rest] for label, *rest in cells]
    result = Table(
        box=None,
        padding=(0, 1),
        pad_edge=False,
        caption=notes(runs, target),
        caption_justify="left",
    )
    for place, header in enumerate(headers):
        result.add_column(Text(header), justify="right" if place else "left", no_wrap=not place)
    for row in cells:
        result.add_row(*map(Text, row))
    return result


def table_cells(
    compared: Sequence[Row],
    target: float | None,
    *,
    slower: bool = False,
    heading: str = "method",
) -> list[list[str]]:
    """The comparison as text, headers first. `slower` adds the inverse of the speed-up, `heading`
    is what a label stands for. Without a target there are no times to it.
    """
    clock = clock_format(max(row["time_s"] for row in compared))
    trained = any(row["final_loss"] is not None or row["diverged"] for row in compared)
    timed = trained and target is not None
    # A task of the user's may not say how many tokens are in a step.
    tokens = trained and any(row["tokens"] is not None for row in compared)
    partly = any(row["unreported_fraction"] for row in compared)
    columns: list[tuple[str, str, Callable[[Any], str], bool]] = [
        (heading, "label", str, True),
        (f"time to loss {target or 0.0:.3f}", "time_to_target_s", clock, timed),
        ("speed-up", "speed_up", _factor, timed),
        ("times slower than the fastest", "times_slower", _factor, timed and slower),
        ("final loss", "final_loss", "{:.3f}".format, trained),
        ("tokens", "tokens", lambda value: _prefixed(value, "", " k", " M", " B", " T"), tokens),
        ("time per inner step", "time_per_step_s", _duration, not trained),
        ("time", "time_s", clock, not trained),
        ("inner steps", "inner_steps", "{:,.0f}".format, not tokens),
        ("not in the model", "unreported_fraction", "{:.0%}".format, partly),
        ("outer steps", "outer_steps", "{:,.0f}".format, not trained),
        (
            "bytes over slow links",
            "slow_link_bytes",
            in_bytes,
            True,
        ),
        ("idle", "idle_fraction", "{:.1%}".format, True),
    ]
    columns = [column for column in columns if column[-1]]
    return [
        [header for header, *_ in columns],
        *([_cell(row, key, show) for _, key, show, _ in columns] for row in compared),
    ]


def _cell(row: Row, key: str, show: Callable[[Any], str]) -> str:
    """`1.93 ±0.02`; without the deviation if it would show as nought, with the share of the seeds
    that the figure is of. One seed's time to the target is only as well known as evaluations are
    close to each other. A final loss says how many seeds have diverged.
    """
    if key == "final_loss" and row["diverged"]:
        known = "" if row[key] is None else f"{show(row[key])}, "
        return f"{known}diverged{_of_seeds(row)}"
    if row[key] is None:
        return "never" if key == "time_to_target_s" and row["final_loss"] is not None else "–"
    sd = row.get(f"{key}_sd")
    if sd is None and key == "time_to_target_s":
        sd = row["time_to_target_s_grid"]
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


def in_bytes(size_bytes: float) -> str:
    """A size with its unit, such as `33 GB`."""
    return _prefixed(size_bytes, " B", " kB", " MB", " GB", " TB", " PB")


def clock_format(largest_s: float) -> Callable[[float], str]:
    """How all times of one table or axis are written: in seconds if none is above ten minutes, else
    h:mm:ss.
    """
    if largest_s < 600:
        return "{:.1f} s".format
    return lambda time_s: (
        f"{round(time_s) // 3600}:{round(time_s) // 60 % 60:02}:{round(time_s) % 60:02}"
    )


def _duration(seconds: float) -> str:
    """A short time, in the unit that fits: `2.21 s`, `39.6 ms`, `850 µs`."""
    return _prefixed(seconds * 1e6, " µs", " ms", " s")


def _factor(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1}f}×"


def _seeds(runs: Sequence[Result]) -> str:
    counts = [len(group) for group in by_label(runs).values()]
    span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{span} seed{'s' if max(counts) > 1 else ''}"


def finding(compared: Sequence[Row], target: float | None) -> str:
    """The result in one sentence."""
    if all(row["diverged"] == row["seeds"] for row in compared):
        return "All runs have diverged."
    if all(row["final_loss"] is None for row in compared):
        return _fastest_per_step(compared)
    if target is None:
        return _lowest_loss(compared)
    if not (reach := [row for row in compared if row["speed_up"] is not None]):
        but = " and does not diverge" if any(row["diverged"] for row in compared) else ""
        return f"No method reaches the target loss with all of its seeds{but}."
    if len({row["clock"] for row in reach}) > 1:
        return (
            "Times of live runs are measured, those of the others modelled: they cannot be "
            "compared with each other."
        )
    time = clock_format(max(row["time_s"] for row in compared))(reach[0]["time_to_target_s"])
    slowest = (
        f"; {reach[-1]['label']} takes {_factor(reach[-1]['times_slower'])} as long"
        if len(reach) > 1
        else ""
    )
    return (
        f"{reach[0]['label']} reaches the target loss {'first, ' if slowest else ''}after "
        f"{time}{slowest}."
    )


def _lowest_loss(compared: Sequence[Row]) -> str:
    """The result where no times to a loss are asked for."""
    sound = [row for row in compared if not row["diverged"]] or compared
    first, last = (
        f"{row['label']} ends at the {which} loss, {_cell(row, 'final_loss', '{:.3f}'.format)}"
        for row, which in ((sound[0], "lowest"), (sound[-1], "highest"))
    )
    return f"{first}; {last}." if len(sound) > 1 else f"{first}."


def _fastest_per_step(compared: Sequence[Row]) -> str:
    """The result where there are no losses."""
    about = "No losses to compare: this is about time and bytes."
    known = [row for row in compared if row["time_per_step_s"]]
    if len(known) < 2 or len({row["clock"] for row in known}) > 1:
        return about
    first, last = known[0], known[-1]
    return (
        f"{first['label']} takes the least time per inner step, "
        f"{_duration(first['time_per_step_s'])}; {last['label']} takes "
        f"{_factor(last['time_per_step_s'] / first['time_per_step_s'])} as long. {about}"
    )


def notes(runs: Sequence[Result], target: float | None) -> str:
    """What the figures of the table are, and what was unusual in these runs."""
    compared = rows(runs, target)
    several = _deviations(runs, compared)
    if any(row["unreported_fraction"] for row in compared):
        several += (
            " Not in the model: the share of all inner steps that were trained and never reached "
            "the model to take home."
        )
    if any(run.summary["stopped"] == "interrupted" for run in runs):
        several += " Interrupted runs are shown as far as they came."
    if len({run.summary.get("clock", "modelled") for run in runs}) > 1:
        several += (
            " Live runs have a measured clock and real bytes, the others modelled ones: "
            "compare within a kind only."
        )
    elif len({(run.summary["real"], run.summary["modelled"]) for run in runs}) > 1:
        several += (
            " These runs differ in what is real or what is modelled: compare like with like only."
        )
    several += "".join(
        f" {row['label']} has diverged{_of_seeds(row)}: it ends with a loss above the one that it "
        "began with, or not finite. It gets no speed-up."
        for row in compared
        if row["diverged"]
    )
    several += "".join(f" {line}." for line in (*too_few(runs), *incidents(runs)))
    counted = "Inner steps" if all(row["tokens"] is None for row in compared) else "Tokens"
    whole = f"{counted}, bytes and idle time are of whole runs."
    if target is None and loss_names(runs):
        return f"Ordered by final loss ({loss_names(runs)[0]}). {whole}{several}"
    if target is None or not loss_names(runs):
        return (
            "All figures are of whole runs. A run ends when its model changes at or after the "
            "planned inner steps, and with some methods that is many steps later: compare times "
            f"per inner step, by which the methods are ordered.{several}"
        )
    chosen = (
        "the loss that the worst of these runs ends at"
        if target == target_loss(runs)
        else "as asked for"
    )
    return (
        f"Target: {loss_names(runs)[0]} {target:.3f}, {chosen}; its time is read off the straight "
        "line between the evaluations before and after it. Speed-up: times faster than the slowest "
        f"method that reaches it. {whole}{several}"
    )


def _of_seeds(row: Row) -> str:
    return f" with {row['diverged']} of {row['seeds']} seeds" if row["seeds"] > 1 else ""


def _deviations(runs: Sequence[Result], compared: Sequence[Row]) -> str:
    """What ± stands for: chance, as far as seeds show it, and the time between evaluations."""
    grids = [row["time_to_target_s_grid"] for row in compared if row["reached"]]
    half_s = max(grids, default=0.0)
    clock = clock_format(max(row["time_s"] for row in compared))
    seeds = len(runs) > len(compared)
    said = f" ± is one standard deviation over {_seeds(runs)}." if seeds else ""
    if any(row["reached"] == 1 for row in compared):
        said += " ± of the time of one seed is half the time between these two evaluations"
        said += ", and says nothing of other seeds."
    if any(row["reached"] > 1 for row in compared):
        said += f" Evaluations are up to {clock(2 * half_s)} apart there."
    return said


def changed(summary: dict[str, Any]) -> str:
    return " · ".join(
        f"{key} {used} (published: {default})"
        for key, (used, default) in summary["changed"].items()
    )
