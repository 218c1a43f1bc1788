"""The commands that make runs, and the one that shows them again.

What belongs here: the arguments of these commands, and which function of `experiment.py` or
`grid.py` each one calls. What does not: what is printed (`terminal.py`), and the runs themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from archipel import experiment, grid
from archipel.cli import terminal
from archipel.cli.options import (
    Address,
    CheckpointEvery,
    Insecure,
    Json,
    Processes,
    Set,
    Strict,
    file_argument,
    path_option,
)
from archipel.disk import rundir
from archipel.errors import Interrupted, UserError
from archipel.recipe import (
    DEFAULT_PROFILE,
    DEFAULT_TOPOLOGY,
    Recipe,
    load_recipe,
    parse_settings,
)
from archipel.report import Result, find, load
from archipel.sim.faults import FaultsConfig


def compare(
    method_list: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="A,B,…",
            help="Methods by name; `name+flag` switches a flag of its settings on.",
        ),
    ] = experiment.DEFAULT_METHODS,
    topology: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The network: a preset or a YAML file.")
    ] = DEFAULT_TOPOLOGY,
    profile: Annotated[
        str, typer.Option(help="Size and step time of the modelled job, or `measured`.")
    ] = DEFAULT_PROFILE,
    task: Annotated[
        str,
        typer.Option(
            help="stdlib, synthetic, text (with --set task.path=…), causal_lm (with --set "
            "task.model=… and task.data=…), none, or file.py:function."
        ),
    ] = "stdlib",
    faults: Annotated[
        Path | None,
        path_option(
            "FILE", "What goes wrong on purpose: a YAML file, as a recipe's section `faults`."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Inner steps of all workers together. Default: 10000.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of all workers together, instead of --steps.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each method, with seeds run.seed, run.seed + 1, …")
    ] = 1,
    settings: Set = None,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="Loss that times are given for. Default: the one that the worst method ends at."
        ),
    ] = None,
    processes: Processes = None,
    checkpoint_every: CheckpointEvery = None,
    strict: Strict = False,
    out: Annotated[
        Path | None,
        path_option(
            "DIR", "Folder for run directories and the report. Default: runs/compare-DATE."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which method trains fastest on this network? Real gradients, a modelled clock."""
    with terminal.running() as (progress, _):
        found = experiment.compare(
            method_list,
            topology=topology,
            profile=profile,
            task=task,
            faults=faults,
            steps=steps,
            tokens=tokens,
            seeds=seeds,
            settings=parse_settings(settings or []),
            target_loss=target_loss,
            processes=processes,
            checkpoint_every=checkpoint_every,
            strict=strict,
            out=out,
            progress=progress,
        )
    terminal.show(found, as_json=as_json)


def sweep(
    file: Annotated[
        Path,
        file_argument("SWEEP.yaml", "A recipe, and a list of values for each key that is to vary."),
    ],
    settings: Set = None,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="Loss that times are given for. Default: the recipe's run.target_loss, or none."
        ),
    ] = None,
    processes: Processes = None,
    checkpoint_every: CheckpointEvery = None,
    strict: Strict = False,
    out: Annotated[
        Path | None,
        path_option(
            "DIR",
            "Folder for run directories and the report; the same sweep goes on there. Default: "
            "runs/sweep-DATE.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which settings train best? One recipe, simulated with each combination of some values."""
    with terminal.running() as (progress, _):
        found = grid.sweep(
            file,
            settings=parse_settings(settings or []),
            target_loss=target_loss,
            processes=processes,
            checkpoint_every=checkpoint_every,
            strict=strict,
            out=out,
            tell=_say,
            progress=progress,
        )
    terminal.show_sweep(found, as_json=as_json)


def run(
    recipe: Annotated[
        Path,
        file_argument("RECIPE.yaml", "What to run; only `method` is required in it."),
    ],
    settings: Set = None,
    processes: Processes = None,
    checkpoint_every: CheckpointEvery = None,
    check_invariants: Annotated[
        bool,
        typer.Option(
            "--check-invariants",
            help="Check the invariants (docs/reliability.md); a recipe with faults does so anyway.",
        ),
    ] = False,
    strict: Strict = False,
    out: Annotated[
        Path | None,
        path_option("DIR", "Folder for the run directory and the report. Default: runs/run-DATE."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate one recipe."""
    loaded = load_recipe(recipe, parse_settings(settings or []))
    if check_invariants and loaded.faults is None:
        loaded = loaded.with_faults(FaultsConfig())
    with terminal.running() as (progress, _):
        result = experiment.simulate(
            loaded,
            processes=processes,
            checkpoint_every=checkpoint_every,
            strict=strict,
            out=out,
            progress=progress,
        )
    _show_one(result, loaded, as_json=as_json)


def resume(
    directory: Annotated[
        Path,
        file_argument("DIR", "A run directory, or a folder that holds some."),
    ],
    processes: Processes = None,
    checkpoint_every: CheckpointEvery = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="For live runs: as in `archipel launch`."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="For live runs: as in `archipel launch`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Go on with runs that were stopped: simulated ones as if they had not been, to the bit; live
    ones from their nodes' saves.

    They are saved as often as before.
    """
    stopped = rundir.unfinished(directory)
    with terminal.running() as (progress, live_progress):
        found = experiment.resume(
            directory,
            processes=processes,
            checkpoint_every=checkpoint_every,
            address=address,
            insecure=insecure,
            progress=progress,
            live_progress=live_progress,
        )
    if not stopped:
        terminal.say(f"archipel: nothing to resume in {directory}: all runs there have ended")
    terminal.show(found, as_json=as_json)


def launch(
    recipe: Annotated[
        Path,
        file_argument("RECIPE.yaml", "What to run: the same file that `archipel run` simulates."),
    ],
    settings: Set = None,
    address: Address = None,
    insecure: Insecure = False,
    strict: Strict = False,
    out: Annotated[
        Path | None,
        path_option(
            "DIR", "Folder for the run directory and the report. Default: runs/launch-DATE."
        ),
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|SECONDSs",
            help=f"How often each node saves its part. Default: {experiment.SAVE_LIVE_EVERY}.",
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Leave the run to the cluster's head machine once it trains; see `attach`.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run one recipe for real: on this machine, or across the machines of a Ray cluster."""
    loaded = load_recipe(recipe, parse_settings(settings or []))
    if detach:
        from archipel import detached  # here, for it imports Ray

        with terminal.running():
            begun = detached.begin(
                loaded,
                address=address,
                insecure=insecure,
                strict=strict,
                checkpoint_every=checkpoint_every,
                out=out,
                tell=_say,
            )
        back = detached.ways_back(begun.name, str(address), insecure=insecure)
        terminal.show_begun(begun, back, as_json=as_json)
        return
    with terminal.running() as (_, progress):
        result = experiment.launch(
            loaded,
            address=address,
            insecure=insecure,
            strict=strict,
            checkpoint_every=checkpoint_every,
            out=out,
            progress=progress,
        )
    _show_one(result, loaded, as_json=as_json)


def attach(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="The run, as `launch --detach` has named it. Default: the only one there is.",
        ),
    ] = None,
    *,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The Ray cluster where the run goes on.")
    ],
    insecure: Insecure = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Save the run and end it, as Ctrl-C ends `launch`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Follow a run that was launched with --detach until it ends. Ctrl-C leaves it alone."""
    from archipel import detached  # here, for it imports Ray

    with terminal.running() as (_, progress):
        ended = detached.attach(
            name, address=address, insecure=insecure, stop=stop, tell=_say, progress=progress
        )
        if isinstance(ended, Interrupted) and not stop:  # by somebody else
            raise ended
    if isinstance(ended, Interrupted):
        _say(f"stopped; {ended}")
    else:
        terminal.show(ended, as_json=as_json)


def report(
    directories: Annotated[
        list[Path],
        file_argument("DIR…", "Run directories, or folders that hold some."),
    ],
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="Loss that times are given for. Default: the one that the worst run ends at."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        path_option("DIR", "Folder for report.html and the plots. Default: the first DIR."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Table, plots and one HTML page from runs that were made before."""
    experiment.check_target(target_loss)
    found = [path for directory in directories for path in find(directory)]
    if not found:
        stopped = [str(directory) for directory in directories if rundir.unfinished(directory)]
        hint = (
            f"; what was stopped there goes on with `archipel resume {stopped[0]}`"
            if stopped
            else ""
        )
        raise UserError(
            "no run directory (a folder with summary.json) in "
            f"{', '.join(map(str, directories))}{hint}"
        )
    results = [load(path) for path in found]
    terminal.show(experiment.compared(results, out or directories[0], target_loss), as_json=as_json)


def _say(text: str) -> None:
    terminal.say(f"archipel: {text}")


def _show_one(result: Result, recipe: Recipe, *, as_json: bool) -> None:
    """One run and its report, which lies in the folder of its run directory."""
    comparison = experiment.compared([result], result.directory.parent, recipe.run.target_loss)
    terminal.show(comparison, as_json=as_json)
