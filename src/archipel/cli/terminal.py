"""What the commands print: results on stdout, progress and complaints on stderr.

What belongs here: how progress, a comparison and an error look on a terminal, and plainly where
there is none. What does not: which command prints what, and what a report says (`report/`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from archipel import experiment, report, series
from archipel.errors import Diverged, Interrupted
from archipel.report.sensitivity import text_of

if TYPE_CHECKING:  # they import Ray, which takes a second
    from archipel.detached import Report
    from archipel.grid import Sweep
    from archipel.live.health import Now

_WIDE = 10_000
"""Columns of a stdout that is no terminal: more than any table needs."""
_log = Console(stderr=True)


def tell(text: RenderableType) -> None:
    """Print a result on stdout: a line as it is, never wrapped, or a table. In a file or a pipe a
    table is as wide as its content, so that each of its rows is one line.
    """
    out = Console()
    if not out.is_terminal:
        out.width = _WIDE
    out.print(text, soft_wrap=isinstance(text, str), markup=False, highlight=False)


def say(line: str) -> None:
    """Print a line on stderr."""
    _log.print(line, soft_wrap=True, markup=False, highlight=False)


def show(comparison: experiment.Comparison, *, as_json: bool) -> None:
    """A comparison on stdout, as a table or as JSON.

    Raises:
        Diverged: some of its runs did; what there is has been shown.
    """
    results, target = comparison.results, comparison.target_loss
    if as_json:
        print(json.dumps(report.as_json(results, target), allow_nan=False))
    else:
        tell(report.headline(results))
        for note in report.changes(results):
            tell(note)
        tell(report.table(results, target))
        tell(f"Report: {comparison.page}")
    if comparison.diverged:
        raise Diverged("; ".join(comparison.diverged))


def show_sweep(sweep: Sweep, *, as_json: bool) -> None:
    """A sweep on stdout, as a table that has a column for each key, or as JSON."""
    results, target = sweep.results, sweep.target_loss
    if as_json:
        found = report.as_json(results, target)
        for run in found["runs"]:
            run["swept"] = sweep.cells[run["label"]]
        print(json.dumps(found, allow_nan=False))
        return
    tell(report.headline(results))
    for note in report.shared_changes(results):
        tell(note)
    columns = {
        label: {key.name: text_of(values[key.key]) for key in sweep.keys}
        for label, values in sweep.cells.items()
    }
    tell(report.table(results, target, columns))
    tell(f"Report: {sweep.page}")


def show_begun(begun: Report, back: str, *, as_json: bool) -> None:
    """On stdout: which run goes on without this command, where, and the ways back to it."""
    if as_json:
        where = {"machine": begun.machine, "directory": str(begun.directory)}
        print(json.dumps({"name": begun.name, **where}))
        return
    tell(f"{begun.name} goes on, on {begun.machine}, in {begun.directory}")
    tell(back)


@contextmanager
def running() -> Iterator[tuple[series.Progress, experiment.LiveProgress]]:
    """Runs are going on: shows their progress, see `_progress`, and lets Ctrl-C end the command.

    The option parser would swallow a `KeyboardInterrupt` and what it says.
    """
    try:
        with _progress() as told:
            yield told
    except Interrupted as error:
        say(f"archipel: {'; '.join(filter(None, ('interrupted', str(error))))}")
        sys.exit(130)


@contextmanager
def _progress() -> Iterator[tuple[series.Progress, experiment.LiveProgress]]:
    """What simulated runs and live ones tell of their progress: a bar a run on a terminal;
    elsewhere a plain line on stderr every tenth of a run, and every minute of a live one.
    """
    if not _log.is_terminal:
        yield _plain_progress(), _plain_live_progress()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,} steps"),
        TextColumn("{task.fields[says]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_log) as bars:
        of_run: dict[str, TaskID] = {}

        def update(name: str, steps: int, planned: int, says: str) -> None:
            if name not in of_run:
                of_run[name] = bars.add_task(name, total=planned, says=says)
            bars.update(of_run[name], completed=steps, says=says)

        yield (
            lambda name, steps, planned, time_s: update(
                name, steps, planned, f"{time_s:,.0f} s modelled"
            ),
            lambda name, now: update(name, now.inner_steps, now.planned, _in_words(now)),
        )


def _plain_progress() -> series.Progress:
    started: dict[str, float] = {}
    shown: dict[str, int] = {}

    def update(name: str, steps: int, planned: int, time_s: float) -> None:
        now = time.perf_counter()
        tenth = 10 * steps // planned
        started.setdefault(name, now)
        if tenth > shown.get(name, -1):
            shown[name] = tenth
            say(
                f"{name}: {steps:,}/{planned:,} steps, {time_s:,.0f} s modelled, "
                f"{now - started[name]:.0f} s here"
            )

    return update


def _plain_live_progress() -> experiment.LiveProgress:
    shown: dict[str, tuple[int, float]] = {}

    def update(name: str, now: Now) -> None:
        tenth = 10 * now.inner_steps // now.planned
        last, last_s = shown.get(name, (-1, 0.0))
        if tenth > last or now.time_s > last_s + 60:
            shown[name] = tenth, now.time_s
            say(f"{name}: {now.inner_steps:,}/{now.planned:,} steps, {_in_words(now)}")

    return update


def _in_words(now: Now) -> str:
    """Loss, speed, who idles and who is late, as far as they are known."""
    said = [f"{now.time_s:,.0f} s"]
    if now.loss is not None:
        said.append(f"loss {now.loss:.3f}")
    if now.tokens_per_s is not None:
        said.append(f"{now.tokens_per_s:,.0f} tokens/s")
    if now.idle:
        most = max(now.idle, key=lambda node: now.idle[node])
        mean = sum(now.idle.values()) / len(now.idle)
        said.append(f"idle {mean:.0%} (most: {most} {now.idle[most]:.0%})")
    if now.under_way is not None:
        said.append(now.under_way)
    if now.late is not None:
        said.append(f"late: {now.late}")
    return ", ".join(said)
