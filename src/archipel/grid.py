"""A sweep: one recipe with some of its keys varied over a grid, and what comes of it.

What belongs here: what a sweep file may say, which recipes it stands for, and what they leave
together. What does not: how recipes run (`series.py`), and what is drawn (`report/sensitivity.py`).

A **setting** of a sweep, in code a cell, is one value for each key of its grid. Each cell runs with
each seed, in an ordinary run directory, whose label is the cell's values.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field

from archipel import report
from archipel.assemble import check_has_loss, check_reachable, warn_of_divergence
from archipel.disk import rundir
from archipel.disk.checkpoint import parse_every
from archipel.errors import Interrupted, UserError, checked, nearest
from archipel.experiment import check_target
from archipel.pyfile import check_not_importing
from archipel.recipe import KEYS, Recipe, load_recipe, section
from archipel.recipe.arguments import check_arguments
from archipel.report import Result, sensitivity
from archipel.report.sensitivity import Key, Value, Values, text_of
from archipel.series import Progress, say_nothing, simulate_all
from archipel.sim.topology import Strict
from archipel.yamlfile import read_mapping

SWEPT = tuple(key for key in KEYS if key not in ("label", "live", "track"))
"""The sections of a recipe that a simulation heeds."""


class SweepConfig(Strict):
    """What a sweep file says."""

    recipe: Any = Field(description="a recipe's keys, or the path of a recipe file")
    grid: dict[str, list[Any]] = Field(
        min_length=1, description="a list of values for each key, by `section.key` or by section"
    )
    seeds: int = Field(
        1, ge=1, description="runs of each setting, with seeds run.seed, run.seed + 1, …"
    )


@dataclass(frozen=True)
class Cell:
    """One setting of a sweep.

    Attributes:
        values: by key.
        recipes: one a seed, all with one label.
    """

    values: Values
    recipes: Sequence[Recipe]


@dataclass(frozen=True)
class Sweep:
    """What the runs of a sweep have left.

    Attributes:
        keys: those that were swept.
        cells: each label's values, by key.
        results: what each run left: all seeds of a setting, then the next one.
        target_loss: the loss that times are given for; None where none was asked for.
        page: the report, an HTML file that needs no other.
    """

    keys: list[Key]
    cells: dict[str, Values]
    results: list[Result]
    target_loss: float | None
    page: Path

    def rows(self) -> list[dict[str, Any]]:
        """One row a setting, the best first: the swept keys, and means over its seeds with their
        sample standard deviations; see `report.rows` for the other keys.
        """
        return [
            {**self.cells[row["label"]], **row}
            for row in report.rows(self.results, self.target_loss)
        ]

    def to_dicts(self) -> list[dict[str, Any]]:
        """One flat dict a run, as for `pandas.DataFrame`: the swept keys, and what the run left;
        units are in the keys.
        """
        return [
            {**self.cells[result.summary["label"]], **report.record(result, self.target_loss)}
            for result in self.results
        ]


def sweep(
    source: Mapping[str, Any] | str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    target_loss: float | None = None,
    processes: int | None = None,
    checkpoint_every: str | int | None = None,
    strict: bool = False,
    out: str | Path | None = None,
    tell: Callable[[str], None] = say_nothing,
    progress: Progress = say_nothing,
) -> Sweep:
    """Simulate one recipe with each combination of values of some of its keys: real gradients, a
    modelled clock.

    What is in `out` of the very same recipes is kept: runs that have ended are not run again, those
    that were interrupted go on. A run that diverges does not end the sweep.

    Args:
        source: a sweep's keys `recipe`, `grid` and perhaps `seeds`, or a YAML file that has them.
        settings: further settings of all runs, by `section.key`.
        target_loss: the loss that times are given for; None: that of the recipe's section `run`. If
            there is none either, settings are ordered by final loss.
        processes, checkpoint_every, strict, progress: see `experiment.compare`.
        out: the folder for run directories and report; None: a new one, `runs/sweep-DATE`.
        tell: is told how many runs there are, before the first one starts.

    Raises:
        UserError: something in the sweep is unknown, or one of its runs cannot run as it is.
        TrainingError: training could not go on.
        Interrupted: Ctrl-C; the runs are saved, and the same call with the same `out` goes on.
    """
    check_not_importing("sweep")
    check_arguments(
        source=source,
        settings=settings,
        target_loss=target_loss,
        processes=processes,
        checkpoint_every=checkpoint_every,
        strict=strict,
        out=out,
        tell=tell,
        progress=progress,
    )
    keys, cells = plan(source, settings or {})
    recipes = [recipe for cell in cells for recipe in cell.recipes]
    check_target(target_loss)
    check_has_loss(recipes[0], "--target-loss", target_loss)
    every = None if checkpoint_every is None else parse_every(str(checkpoint_every))
    tell(size(cells))
    out = rundir.dated("sweep") if out is None else Path(out)
    try:
        results, _ = simulate_all(
            [recipe.strictly() for recipe in recipes] if strict else recipes,
            out,
            processes,
            every=every,
            progress=progress,
            keep=True,
        )
    except Interrupted:
        raise Interrupted(
            f"the same command with `--out {out}` goes on from here; `archipel report {out}` shows "
            "what happened until then"
        ) from None
    target = recipes[0].run.target_loss if target_loss is None else target_loss
    by_label = {cell.recipes[0].label: cell.values for cell in cells}
    page = report.write_page(
        results,
        out,
        target,
        heading="setting",
        first=partial(sensitivity.figures, keys, by_label, results, target),
    )
    return Sweep(keys, by_label, results, target, page)


def size(cells: Sequence[Cell]) -> str:
    """How many runs there are: `27 runs: 9 settings × 3 seeds`."""
    seeds = len(cells[0].recipes)
    counts = ((len(cells) * seeds, "run"), (len(cells), "setting"), (seeds, "seed"))
    runs, settings, each = (f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts)
    return f"{runs}: {settings} × {each}"


# From a sweep file to recipes


def plan(
    source: Mapping[str, Any] | str | Path, settings: Mapping[str, Any]
) -> tuple[list[Key], list[Cell]]:
    """The keys of a sweep, and its cells in the order of the grid: the last key varies first.

    Raises:
        UserError: something in it is unknown or impossible.
    """
    fields = read_mapping(Path(source), "sweep") if isinstance(source, (str, Path)) else source
    config = checked(SweepConfig, dict(fields), "sweep")
    recipe = _recipe_fields(config.recipe)
    keys = [Key(key, _name(key, config.grid), values) for key, values in config.grid.items()]
    for key in keys:
        _check_key(key, recipe)
    cells = [
        _cell(keys, values, recipe, settings, config.seeds)
        for values in product(*(key.values for key in keys))
    ]
    tasks = list(dict.fromkeys(cell.recipes[0].task.name for cell in cells))
    if len(tasks) > 1:
        raise UserError(
            f"grid: the losses of tasks {', '.join(tasks)} are of different kinds and cannot share "
            "a report; make a sweep for each task"
        )
    return keys, cells


def _recipe_fields(recipe: Any) -> Mapping[str, Any]:
    match recipe:
        case Mapping():
            return recipe
        case str() | Path():
            return read_mapping(Path(recipe), "recipe")
        case _:
            raise UserError(
                f"sweep.recipe = {recipe!r}: expected a recipe's keys, or the path of a recipe file"
            )


def _name(key: str, keys: Mapping[str, Any]) -> str:
    """What tells a key from the others: behind its section, unless two have the same there."""
    short = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == short for other in keys) > 1 else short


def _check_key(key: Key, recipe: Mapping[str, Any]) -> None:
    """Raise a `UserError` if a key or one of its values cannot be one, or is given twice."""
    if key.key.partition(".")[0] in ("live", "label", "track"):
        raise UserError(f"grid: {key.key}: nothing that a simulation does depends on it")
    if key.key == "run.seed":
        raise UserError("grid: run.seed: seeds are no setting; say how many, as in `seeds: 3`")
    if key.key in recipe:
        raise UserError(
            f"grid: {key.key}: the recipe has a section {key.key!r} too; give it in one place"
        )
    if not key.values:
        raise UserError(f"grid: {key.key}: the list is empty; give at least one value")
    for value in key.values:
        fits = value is None or isinstance(value, (bool, int, float, str))
        if not fits or (isinstance(value, float) and not math.isfinite(value)):
            raise UserError(
                f"grid: {key.key}: {value!r}: expected a number, a text, true, false or null"
            )
    for text, count in Counter(_plain(text_of(value)) for value in key.values).items():
        if count > 1:
            raise UserError(f"grid: {key.key}: {text} is in the list {count} times")


def _cell(
    keys: Sequence[Key],
    values: Sequence[Value],
    recipe: Mapping[str, Any],
    settings: Mapping[str, Any],
    seeds: int,
) -> Cell:
    """One cell of the grid.

    Raises:
        UserError: its recipe cannot be.
    """
    parts = [f"{key.name}={text_of(value)}" for key, value in zip(keys, values, strict=True)]
    cell = Cell({key.key: value for key, value in zip(keys, values, strict=True)}, [])
    try:
        first = _recipe_of(recipe, settings, cell.values)
        check_reachable(first)
    except UserError as error:
        raise UserError(f"grid: {', '.join(parts)}: {error}") from None
    given = [str(recipe["label"])] if "label" in recipe else []
    first = replace(first, label=",".join([*given, *map(_plain, parts)]))
    warn_of_divergence(first)
    runs = (first.run.model_copy(update={"seed": first.run.seed + i}) for i in range(seeds))
    return replace(cell, recipes=[replace(first, run=run) for run in runs])


def _plain(text: str) -> str:
    """A text as the name of a folder can hold it."""
    return re.sub(r"[^\w.+=-]+", "_", text)


def _recipe_of(recipe: Mapping[str, Any], settings: Mapping[str, Any], values: Values) -> Recipe:
    """The recipe with some values.

    Raises:
        UserError: it cannot be.
    """
    fields = {**recipe, **{key: value for key, value in values.items() if "." not in key}}
    parts = {key: value for key, value in values.items() if "." in key}
    method = str(section(fields.get("method", {}), "method").get("name"))
    known = [method, *SWEPT]
    for key in values:
        if (place := key.partition(".")[0]) not in known:
            raise UserError(
                f"{key}: unknown section {place!r}{nearest(place, known)}; allowed: "
                f"{', '.join(known)}"
            )
    own = re.compile(rf"^{re.escape(method)}\.")
    for key, count in Counter(own.sub("method.", key) for key in [*settings, *parts]).items():
        if count > 1:
            raise UserError(f"{key} is given twice; give it in one place")
    return load_recipe(fields, {**settings, **parts})
