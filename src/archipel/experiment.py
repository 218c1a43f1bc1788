"""Simulate, launch, compare and resume: what the command line and Python programs call.

What belongs here: which recipes run, in which folder, and what comes of them together. What does
not: how they follow each other (`series.py`) and how one of them runs (`simulation.py`,
`live/launch.py`), a grid of them (`grid.py`), and anything that is printed (`terminal.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel import report
from archipel.assemble import check_has_loss, check_reachable, warn_of_divergence
from archipel.disk import rundir
from archipel.disk.checkpoint import noted_every, parse_every
from archipel.errors import Diverged, Interrupted, TrainingError, UserError
from archipel.memory import warn_of_memory
from archipel.pyfile import check_not_importing
from archipel.recipe import (
    DEFAULT_PROFILE,
    DEFAULT_TOPOLOGY,
    Recipe,
    load_recipe,
    recipes_of,
)
from archipel.recipe.arguments import check_arguments
from archipel.report import Result
from archipel.series import Progress, say_nothing, simulate_all, simulate_each
from archipel.yamlfile import read_mapping

if TYPE_CHECKING:  # the live engine imports Ray, which takes a second
    from archipel.disk.checkpoint import Every
    from archipel.live.health import Now

DEFAULT_METHODS = "sync_sgd,diloco,diloco+dynamic_steps,async_local_sgd,noloco,halos"
SAVE_LIVE_EVERY = "600s"
"""How often the nodes of a live run save their parts, unless something else is asked for."""

LiveProgress = Callable[[str, "Now"], None]
"""Told (a run's name, how it stands) about once a second as live runs go on."""


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        results: what each run left, in the order in which they ran.
        target_loss: the loss that times are given for; None where no run has a loss.
        page: the report, an HTML file that needs no other.
        diverged: a line for each run that ended because a loss was not finite; these left nothing.
    """

    results: list[Result]
    target_loss: float | None
    page: Path
    diverged: list[str]

    def rows(self) -> list[dict[str, Any]]:
        """One row a method, over its seeds, the fastest first; see `report.rows` for the keys."""
        return report.rows(self.results, self.target_loss)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One flat dict a run, as for `pandas.DataFrame`; units are in the keys."""
        return [report.record(result, self.target_loss) for result in self.results]


def compare(
    methods: str | Iterable[str | Mapping[str, Any]] = DEFAULT_METHODS,
    *,
    topology: str | Mapping[str, Any] = DEFAULT_TOPOLOGY,
    profile: str | Mapping[str, Any] = DEFAULT_PROFILE,
    task: str | Mapping[str, Any] = "stdlib",
    faults: Mapping[str, Any] | str | Path | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    seeds: int = 1,
    settings: Mapping[str, Any] | None = None,
    target_loss: float | None = None,
    processes: int | None = None,
    checkpoint_every: str | int | None = None,
    strict: bool = False,
    out: str | Path | None = None,
    progress: Progress = say_nothing,
) -> Comparison:
    """Simulate several methods on one network and one task: real gradients, a modelled clock.

    Args:
        methods: each one's name, `name+flag` with a flag of its settings switched on, or a mapping
            of `name`, settings, and perhaps a `label`; names can also be one text with commas.
        topology: a preset, a YAML file, or a topology's keys.
        profile: what a message weighs and how long a step takes: a preset, `measured`, or keys.
        task: what is trained; `none` trains nothing, `file.py:function` is one of your own.
        faults: what goes wrong on purpose, the same for all: a recipe's section `faults`, or a YAML
            file that has its keys.
        steps: inner steps of all workers together; 10,000 where neither this nor `tokens` is given.
        tokens: instead of `steps`.
        seeds: runs of each method, with seeds `run.seed`, `run.seed` + 1, …
        settings: further settings by `section.key`, such as `{"halos.accumulate": 8}`.
        target_loss: the loss that times are given for; None: the one that the worst run ends at.
        processes: how many compute gradients; None: one a core, or one a GPU. Results do not
            depend on it.
        checkpoint_every: save each run after so many tokens (1000000), or seconds here ("600s").
        strict: end a run at a training loss that is not finite, instead of restarting its worker.
        out: the folder for run directories and report; None: a new one, `runs/compare-DATE`.
        progress: is told how the runs go on.

    Raises:
        UserError: something cannot run as it is; or `Diverged`, if every run did.
        TrainingError: training could not go on.
        Interrupted: Ctrl-C; the runs are saved and can be resumed.
    """
    check_not_importing("compare")
    check_arguments(
        methods=methods,
        faults=faults,
        seeds=seeds,
        settings=settings,
        target_loss=target_loss,
        processes=processes,
        checkpoint_every=checkpoint_every,
        strict=strict,
        out=out,
        progress=progress,
    )
    recipes = recipes_of(
        methods,
        {
            "topology": topology,
            "profile": profile,
            "task": task,
            "pipeline": {},
            "wire": "fp32",
            "track": None,
            "run": {"steps": steps, "tokens": tokens},
            "faults": (
                read_mapping(Path(faults), "faults file")
                if isinstance(faults, (str, Path))
                else faults
            ),
            "bad_updates": None,
        },
        seeds,
        settings or {},
    )
    check_target(target_loss)
    check_has_loss(recipes[0], "--target-loss", target_loss)
    recipes = [recipe.strictly() for recipe in recipes] if strict else recipes
    for recipe in recipes:
        check_reachable(recipe)
        warn_of_divergence(recipe)
    every = _every(checkpoint_every)
    out = rundir.dated("compare") if out is None else Path(out)
    results, diverged = simulate_all(recipes, out, processes, every=every, progress=progress)
    target = recipes[0].run.target_loss if target_loss is None else target_loss
    return compared(results, out, target, diverged)


def simulate(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    processes: int | None = None,
    checkpoint_every: str | int | None = None,
    strict: bool = False,
    out: str | Path | None = None,
    progress: Progress = say_nothing,
) -> Result:
    """Run one recipe on the virtual clock.

    Args:
        recipe: its fields, of which only `method` is required, or a YAML file that has them.
        settings, processes, checkpoint_every, strict, progress: see `compare`.
        out: the folder for the run directory; None: a new one, `runs/run-DATE`.

    Raises:
        UserError, TrainingError, Interrupted: see `compare`.
    """
    check_not_importing("simulate")
    check_arguments(
        recipe=recipe,
        settings=settings,
        processes=processes,
        checkpoint_every=checkpoint_every,
        strict=strict,
        out=out,
        progress=progress,
    )
    loaded = load_recipe(recipe, settings)
    loaded = loaded.strictly() if strict else loaded
    check_reachable(loaded)
    warn_of_divergence(loaded)
    every = _every(checkpoint_every)
    out = rundir.dated("run") if out is None else Path(out)
    results, diverged = simulate_all([loaded], out, processes, every=every, progress=progress)
    if diverged:
        raise Diverged(diverged[0])
    return results[0]


def launch(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    address: str | None = None,
    insecure: bool = False,
    strict: bool = False,
    checkpoint_every: str | int | None = None,
    out: str | Path | None = None,
    progress: LiveProgress = say_nothing,
) -> Result:
    """Run one recipe for real, on this machine or across the machines of a Ray cluster.

    Args:
        recipe, settings, strict: see `simulate`.
        address: of a running Ray cluster; None: a private one on this machine.
        insecure: join a cluster without token or encryption.
        checkpoint_every: how often each node saves its part; None: every 600 s, and not at all
            where a model in stages cannot be saved.
        out: the folder for the run directory; None: a new one, `runs/launch-DATE`.
        progress: is told about once a second how things stand.

    Raises:
        UserError, TrainingError, Interrupted: see `compare`.
    """
    check_not_importing("launch")
    check_arguments(
        recipe=recipe,
        settings=settings,
        address=address,
        insecure=insecure,
        strict=strict,
        checkpoint_every=checkpoint_every,
        out=out,
        progress=progress,
    )
    loaded = load_recipe(recipe, settings)
    loaded = loaded.strictly() if strict else loaded
    if checkpoint_every is None and loaded.pipeline.stages == 1:
        checkpoint_every = SAVE_LIVE_EVERY
    every = _every(checkpoint_every)
    warn_of_divergence(loaded)
    out = rundir.dated("launch") if out is None else Path(out)
    name = rundir.name_of(loaded)
    with rundir.claimed(out, [name]):
        _go_live(loaded, out / name, address, every, progress, insecure=insecure, resume=False)
        return report.load(out / name)


def resume(
    directory: str | Path,
    *,
    processes: int | None = None,
    checkpoint_every: str | int | None = None,
    address: str | None = None,
    insecure: bool = False,
    progress: Progress = say_nothing,
    live_progress: LiveProgress = say_nothing,
) -> Comparison:
    """Go on with runs that were stopped: simulated ones as if they had not been, to the bit; live
    ones from their nodes' saves. Where all have ended, what they left is compared and nothing runs.

    Args:
        directory: a run directory, or a folder that holds some.
        checkpoint_every: None: as often as before.
        processes, progress: see `compare`.
        address, insecure: see `launch`.
        live_progress: is told how live runs stand.

    Raises:
        UserError, TrainingError, Interrupted: see `compare`.
    """
    check_not_importing("resume")
    check_arguments(
        directory=directory,
        processes=processes,
        checkpoint_every=checkpoint_every,
        address=address,
        insecure=insecure,
        progress=progress,
        live_progress=live_progress,
    )
    directory = Path(directory)
    found = rundir.unfinished(directory)
    left = [] if found else [report.load(path) for path in report.find(directory)]
    if left and all(result.summary["stopped"] != rundir.INTERRUPTED for result in left):
        return compared(left, directory, rundir.target_loss(left[0].directory))
    if not found:
        raise UserError(
            f"nothing to resume in {directory}: no run directory (a folder with recipe.yaml) whose "
            "run has not ended, or of a live run its folder `checkpoint` is gone"
        )
    every = _every(checkpoint_every)
    with rundir.alone_in(*found):
        recipes = {
            path: load_recipe(path / "recipe.yaml")
            for path in found
            if not rundir.is_finished(path)  # by another process, a moment ago
        }
        for path, recipe in recipes.items():
            rundir.check_resumable(path, recipe)
        live = {path: recipe for path, recipe in recipes.items() if rundir.is_live(path)}
        for path, recipe in live.items():
            noted = noted_every(path / rundir.CHECKPOINTS / rundir.LIVE)
            often = every or noted or parse_every(SAVE_LIVE_EVERY)
            _go_live(recipe, path, address, often, live_progress, insecure=insecure, resume=True)
        rest = {path: recipe for path, recipe in recipes.items() if path not in live}
        # The runs of one command were saved equally often, also those that have no save yet.
        noted = next(filter(None, (noted_every(path / rundir.CHECKPOINTS) for path in rest)), None)
        diverged = simulate_each(
            rest, directory, processes, every or noted, progress, going_on=rest
        )
        results = [report.load(path) for path in report.find(directory)]
    target = next((recipe.run.target_loss for recipe in recipes.values()), None)
    return compared(results, directory, target, diverged)


def compared(
    results: Sequence[Result],
    out: Path,
    target_loss: float | None = None,
    diverged: Sequence[str] = (),
) -> Comparison:
    """Runs side by side, with a report in the folder `out`.

    Args:
        target_loss: the loss that times are given for; None: the one that the worst run ends at.
        diverged: a line for each run that left nothing.

    Raises:
        UserError: they cannot be compared; or `Diverged`, if there is nothing to compare.
    """
    if not results:
        raise Diverged("; ".join(diverged))
    results = report.distinguish(results)
    target = report.target_loss(results) if target_loss is None else target_loss
    return Comparison(results, target, report.write(results, out, target), list(diverged))


def _every(checkpoint_every: str | int | None) -> Every | None:
    return None if checkpoint_every is None else parse_every(str(checkpoint_every))


def check_target(target_loss: float | None) -> None:
    """Raise a `UserError` if a target is no number."""
    if target_loss is not None and not math.isfinite(target_loss):
        raise UserError(f"--target-loss {target_loss}: expected a finite number")


def _go_live(
    recipe: Recipe,
    directory: Path,
    address: str | None,
    every: Every | None,
    progress: LiveProgress,
    *,
    insecure: bool,
    resume: bool,
) -> None:
    """Run `recipe` live in a run directory, or go on with the run that was stopped there."""
    from archipel.live import launch as live  # here, for it imports Ray

    if address is None:
        warn_of_memory(recipe, live=True)
    try:
        live.launch(
            recipe,
            directory,
            address=address,
            insecure=insecure,
            every=every,
            resume=resume,
            progress=partial(progress, directory.name),
        )
    except KeyboardInterrupt:
        said = []
        if rundir.unfinished(directory):
            said.append(f"`archipel resume {directory}` goes on from here")
        if directory.exists():
            said.append(f"`archipel report {directory}` shows what happened until then")
        raise Interrupted("; ".join(said)) from None
    except TrainingError as error:
        if not rundir.unfinished(directory):
            raise
        goes_on = f"`archipel resume {directory}` goes on from the last save"
        raise TrainingError(f"{error}; {goes_on}") from None
