"""What runs left behind, read from their run directories.

What belongs here: reading `summary.json`, `metrics.jsonl` and `trace.json`, and telling runs with
one label apart. What does not: comparing them (`comparison.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from archipel.errors import UserError

_SUMMARY = (
    "label seed time_s inner_steps tokens outer_steps slow_link_bytes idle_fraction final_loss "
    "real modelled settings changed "
    "loss_name entropy_rate wall_s processes machine versions stopped"
)
Trace = dict[str, dict[str, list[tuple[float, float]]]]
"""Node -> activity -> its spans: start and length in seconds."""
ACTIVITIES = ("send", "all_reduce", "compute")
"""What a trace tells of a node; of two at one time the later one in this list is drawn on top."""


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
    values = json_object(read(summary), f"{summary}")
    if lacking := [key for key in _SUMMARY.split() if key not in values]:
        raise ReportError(f"{summary} lacks {', '.join(lacking)}")
    marks = ["live"] * (values.get("clock") == "measured") + ["interrupted"] * (
        values["stopped"] == "interrupted"
    )
    if marks:
        values["label"] += f" ({', '.join(marks)})"
    lines = [
        json_object(line, f"{metrics}, line {number},")
        for number, line in enumerate(read(metrics).splitlines(), start=1)
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
        return re.sub(r"^(label|  seed):.*$", "", read(recipe).decode(), flags=re.MULTILINE)
    return json.dumps(
        [run.summary[key] for key in ("settings", "real", "modelled")], sort_keys=True
    )


def trace_of(run: Result) -> Trace:
    """The spans of `trace.json`; empty if the run has none."""
    path = run.directory / "trace.json"
    events = json_object(read(path), f"{path}").get("traceEvents", []) if path.exists() else []
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    trace: Trace = {named[key]: {kind: [] for kind in ACTIVITIES} for key in sorted(named)}
    for event in events:
        if event["ph"] == "X" and event["name"] in ACTIVITIES:
            trace[named[event["pid"], event["tid"]]][event["name"]].append(
                (event["ts"] / 1e6, event["dur"] / 1e6)
            )
    return trace


def points(run: Result, x: str, y: str) -> list[tuple[float, float]]:
    """The evaluations that have both quantities."""
    return [
        (line[x], line[y])
        for line in run.evals
        if line.get(x) is not None and line.get(y) is not None
    ]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ReportError(
            f"{path} is missing: the run has not finished, or this is not a run directory"
        ) from None


def json_object(text: bytes, place: str) -> dict[str, Any]:
    """The object in `text`, which lies at `place`; NaN and infinities become None."""
    try:
        value = json.loads(text, parse_constant=lambda _: None)
    except ValueError as error:
        raise ReportError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ReportError(f"{place} is not a JSON object")
    return value
