"""Several recipes, simulated one after the other in one folder.

What belongs here: in which order they run and with which pool, which of them need not run again,
and what becomes of the others when one diverges or Ctrl-C is pressed. What does not: which recipes
they are (`experiment.py`, `grid.py`), and how one of them runs (`simulation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel import report, simulation
from archipel.disk import rundir
from archipel.errors import Diverged, Interrupted, UserError
from archipel.memory import warn_of_memory
from archipel.methods import blaming
from archipel.recipe import Recipe, load_recipe
from archipel.report import Result
from archipel.sim.topology import MEASURED, Profile

if TYPE_CHECKING:
    from archipel.disk.checkpoint import Every
    from archipel.train.pool import Pool

Progress = Callable[[str, int, int, float], None]
"""Told (a run's name, inner steps so far, inner steps planned, seconds on the virtual clock) as
simulated runs go on.
"""
Measured = dict[str, Profile]
"""The profiles that have been measured, by what they depend on (`_job`)."""


def say_nothing(*_: object) -> None:
    """The progress that nobody asked for."""


def simulate_all(
    recipes: Iterable[Recipe],
    out: Path,
    processes: int | None = None,
    *,
    every: Every | None = None,
    progress: Progress = say_nothing,
    keep: bool = False,
) -> tuple[list[Result], list[str]]:
    """Simulate recipes one after the other, each in a run directory in `out`: what they left, and a
    line for each one that diverged and left nothing.

    Those that share task, workers and stages share a pool.

    Args:
        processes, every, progress: see `experiment.compare`.
        keep: what is in `out` of the very same recipes is kept: runs that have ended are not run
            again, those that were interrupted go on. So that it is kept too, a run that diverges
            leaves what happened until then.

    Raises:
        UserError, TrainingError, Interrupted: see `experiment.compare`.
    """
    directories = {out / rundir.name_of(recipe): recipe for recipe in recipes}
    measured = _measured_before(directories) if keep else {}
    directories = {path: _clocked(recipe, measured) for path, recipe in directories.items()}

    def goes_on(path: Path) -> bool:
        return keep and rundir.goes_on(path, directories[path])

    with rundir.claimed(out, [path.name for path in directories], goes_on):
        left = {
            path: recipe
            for path, recipe in directories.items()
            if not (keep and rundir.has_run(path, recipe))
        }
        diverged = simulate_each(
            left,
            out,
            processes,
            every,
            progress,
            going_on=[path for path in left if goes_on(path)],
            measured=measured,
            keep_diverged=keep,
        )
        finished = [path for path in directories if (path / "summary.json").is_file()]
        return [report.load(path) for path in finished], diverged


def simulate_each(
    recipes: Mapping[Path, Recipe],
    out: Path,
    processes: int | None,
    every: Every | None,
    progress: Progress,
    *,
    going_on: Collection[Path] = (),
    measured: Measured | None = None,
    keep_diverged: bool = False,
) -> list[str]:
    """Simulate each recipe in its run directory in `out`; a line for each one that diverged and
    left nothing.

    Args:
        going_on: the directories whose runs have begun and go on; the others start anew.
        measured: profiles that need not be measured.
        keep_diverged: see `simulation.simulate`.
    """
    diverged: list[str] = []
    measured = {} if measured is None else measured
    for recipe in recipes.values():
        simulation.check_every(every, recipe)
    pools = [_pool_of(recipe) for recipe in recipes.values()]
    # Those of one pool follow each other, in the order in which each pool is needed first.
    ordered = sorted(recipes.items(), key=lambda item: pools.index(_pool_of(item[1])))
    try:
        for _, group in groupby(ordered, lambda item: _pool_of(item[1])):
            same = dict(group)
            for recipe in same.values():
                warn_of_memory(recipe, processes)
            with simulation.open_pool(next(iter(same.values())), processes) as pool:
                same = _begun(same, pool, going_on, measured)
                diverged += _simulate_with(
                    pool, same, every, progress, going_on=going_on, keep_diverged=keep_diverged
                )
    except KeyboardInterrupt:
        raise Interrupted(
            f"`archipel resume {out}` goes on from here; `archipel report {out}` shows what "
            "happened until then"
        ) from None
    return diverged


def _pool_of(recipe: Recipe) -> Any:
    """Recipes for which this is equal can share a pool."""
    return recipe.task, recipe.topology.workers, recipe.pipeline


def _begun(
    recipes: Mapping[Path, Recipe],
    pool: Pool | None,
    going_on: Collection[Path],
    measured: Measured,
) -> dict[Path, Recipe]:
    """Make all run directories, so that those whose turn never comes can be resumed too. A profile
    that is to be measured is measured once, so that all methods run on one clock.
    """
    begun = {}
    for directory, recipe in recipes.items():
        if recipe.profile is None and _job(recipe) not in measured:
            measured[_job(recipe)] = simulation.measure_profile(pool)
        begun[directory] = _clocked(recipe, measured)
    for directory, recipe in begun.items():
        if directory not in going_on:
            rundir.start(directory, recipe)
    return begun


def _simulate_with(
    pool: Pool | None,
    recipes: Mapping[Path, Recipe],
    every: Every | None,
    progress: Progress,
    *,
    going_on: Collection[Path],
    keep_diverged: bool,
) -> list[str]:
    diverged: list[str] = []
    try:
        for directory, recipe in recipes.items():
            try:
                with blaming(recipe.method):
                    simulation.simulate(
                        recipe,
                        pool,
                        directory,
                        partial(progress, directory.name),
                        every=every,
                        resume=directory in going_on,
                        keep_diverged=keep_diverged,
                    )
            except Diverged as error:  # one method's trouble is no reason to lose the others
                diverged.append(f"{error} (seed {recipe.run.seed})")
    except UserError:  # what cannot run as it is cannot be resumed
        rundir.remove_unbegun(path for path in recipes if path not in going_on)
        raise
    return diverged


# A profile that is measured


def _job(recipe: Recipe) -> str:
    """What a measured profile depends on."""
    return repr((recipe.task, recipe.pipeline))


def _clocked(recipe: Recipe, measured: Measured) -> Recipe:
    """The recipe with the profile that has been measured for it, if it needs one and one has."""
    return replace(recipe, profile=recipe.profile or measured.get(_job(recipe)))


def _measured_before(recipes: Mapping[Path, Recipe]) -> Measured:
    """The profiles that were measured for these very recipes when they ran in their directories
    before: what is added to them has the same clock.
    """
    measured: Measured = {}
    for directory, recipe in recipes.items():
        if recipe.profile is None and (directory / "recipe.yaml").is_file():
            try:
                profile = load_recipe(directory / "recipe.yaml").profile
            except UserError:  # what it names is gone: it is another recipe now
                continue
            same = rundir.is_of(directory, replace(recipe, profile=profile))
            if profile is not None and profile.name == MEASURED and same:
                measured.setdefault(_job(recipe), profile)
    return measured
