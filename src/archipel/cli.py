"""The command line.

What belongs here: arguments, progress on the terminal, exit codes (0; 1: training could not go on;
2: the user's to mend; 130: Ctrl-C). What does not: anything that a program could not also call.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import archipel
from archipel import experiment, fuzz, methods, report, studies
from archipel.checkpoint import Every, noted_every, parse_every
from archipel.errors import Diverged, TrainingError, UserError, nearest
from archipel.recipe import (
    DEFAULT_PROFILE,
    DEFAULT_TOPOLOGY,
    LiveConfig,
    PipelineConfig,
    Recipe,
    RunConfig,
    parse_override,
    parse_recipe,
    read_recipe,
    section,
)
from archipel.run.screening import ScreeningConfig
from archipel.sim.faults import FaultsConfig
from archipel.sim.topology import MEASURED, PRESETS, PROFILES, load_topology
from archipel.theory import latency, moments
from archipel.theory import plots as theory_plots
from archipel.train.pool import Pool
from archipel.train.task import CONFIGS
from archipel.yamlfile import dump

if TYPE_CHECKING:  # it imports Ray, which takes a second
    from archipel.live.health import Now

app = typer.Typer(
    help="Train one model over slow links: compare methods on a modelled network, then run one for "
    "real.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out_console = Console()
log_console = Console(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        print(f"archipel {archipel.__version__}")
        raise typer.Exit


@app.callback()
def archipel_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Print the version, and do nothing else.",
        ),
    ] = False,
) -> None:
    """What all commands have."""


SECTIONS: dict[str, type[BaseModel]] = {
    "run": RunConfig,
    "pipeline": PipelineConfig,
    "live": LiveConfig,
    "bad_updates": ScreeningConfig,
}
"""Sections of a recipe that have one kind of settings."""
DEFAULT_METHODS = "sync_sgd,diloco,diloco+dynamic_steps,async_local_sgd,noloco,halos"

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Change one setting; can be given often."
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes that compute gradients. Default: one a core, or one a GPU."
    ),
]
SAVE_EVERY = "600s"
"""How often the nodes of a live run save their parts, unless something else is asked for."""
CheckpointEvery = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS|SECONDSs",
        help="Save the run after so many tokens, or seconds here (600s); Ctrl-C saves it anyway.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop at a training loss that is not finite; restart no worker."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object alone on stdout.")]


@app.command()
def compare(
    method_list: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="A,B,…",
            help="Methods by name; `name+flag` switches a flag of its settings on.",
        ),
    ] = DEFAULT_METHODS,
    topology: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Preset or YAML file.")
    ] = DEFAULT_TOPOLOGY,
    profile: Annotated[
        str, typer.Option(help="Size and step time of the modelled job, or `measured`.")
    ] = DEFAULT_PROFILE,
    task: Annotated[
        str,
        typer.Option(
            help="stdlib, synthetic, text (with --set task.path=…), none, or file.py:function."
        ),
    ] = "stdlib",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Inner steps of all workers together. Default: 10000.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Instead of --steps.")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each method, with seeds run.seed, run.seed + 1, …")
    ] = 1,
    settings: Set = None,
    target_loss: Annotated[
        float | None, typer.Option(help="Default: the loss that the worst of the methods ends at.")
    ] = None,
    processes: Processes = None,
    checkpoint_every: CheckpointEvery = None,
    strict: Strict = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for run directories and the report. Default: runs/compare-DATE."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which method trains fastest on this network? Real gradients, a modelled clock."""
    recipes = comparison(
        method_list,
        {
            "topology": topology,
            "profile": profile,
            "task": task,
            "pipeline": {},
            "run": {"steps": steps, "tokens": tokens},
            "bad_updates": None,
        },
        seeds,
        settings or [],
    )
    recipes = [recipe.strictly() for recipe in recipes] if strict else recipes
    run_all(
        recipes, out or _dated("compare"), processes, target_loss, checkpoint_every, as_json=as_json
    )


@app.command()
def run(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE.yaml", help="What to run; only `method` is required in it."),
    ],
    settings: Set = None,
    processes: Processes = None,
    checkpoint_every: CheckpointEvery = None,
    check_invariants: Annotated[
        bool,
        typer.Option(
            "--check-invariants",
            help="Keep books and check them; a recipe with faults does so anyway.",
        ),
    ] = False,
    strict: Strict = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the run directory and the report. Default: runs/run-DATE."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate one recipe."""
    parsed = read_recipe(recipe, settings or [])
    if strict:
        parsed = parsed.strictly()
    if check_invariants and parsed.faults is None:
        parsed = parsed.with_faults(FaultsConfig())
    run_all([parsed], out or _dated("run"), processes, None, checkpoint_every, as_json=as_json)


@app.command()
def resume(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run directory, or a folder that holds some.")
    ],
    processes: Processes = None,
    checkpoint_every: CheckpointEvery = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of live runs: see `archipel launch`.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Of live runs: see `archipel launch`.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Go on with runs that were stopped: simulated ones as if they had not been, to the bit; live
    ones from their nodes' saves.

    They are saved as often as before.
    """
    recipes = {
        path: read_recipe(path / "recipe.yaml", []) for path in experiment.unfinished(directory)
    }
    if not recipes:
        raise UserError(
            f"nothing to resume in {directory}: no run directory (a folder with recipe.yaml) whose "
            "run has not ended, or of a live "
            "run its folder `checkpoint` is gone"
        )
    for path, recipe in recipes.items():
        experiment.check_resumable(path, recipe)
    every = None if checkpoint_every is None else parse_every(checkpoint_every)
    lively = {path: recipe for path, recipe in recipes.items() if experiment.is_live(path)}
    for path, recipe in lively.items():
        saved_every = every or noted_every(path / experiment.CHECKPOINTS / experiment.LIVE)
        go_live(
            recipe,
            path,
            address,
            saved_every or parse_every(SAVE_EVERY),
            insecure=insecure,
            resume=True,
        )
    target = next(iter(recipes.values())).run.target_loss
    recipes = {path: recipe for path, recipe in recipes.items() if path not in lively}
    noted = filter(
        None, (noted_every(path / experiment.CHECKPOINTS) for path in recipes)
    )  # runs of one command have one
    every = every or next(noted, None)
    diverged: list[str] = []
    with progress_of() as begin:
        # Runs of one comparison share a pool.
        for _, group in groupby(
            recipes.items(), lambda item: (item[1].task, item[1].topology.workers, item[1].pipeline)
        ):
            same = dict(group)
            with experiment.open_pool(next(iter(same.values())), processes) as pool:
                diverged += simulate_all(same, pool, directory, begin, every, resume=True)
    finish(report.find(directory), directory, diverged, target, as_json=as_json)


@app.command()
def launch(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.yaml", help="What to run: the same file that `archipel run` simulates."
        ),
    ],
    settings: Set = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A running Ray cluster. Default: a private one, on this machine.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Join a cluster without token or encryption.")
    ] = False,
    strict: Strict = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the run directory and the report. Default: runs/launch-DATE."
        ),
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|SECONDSs",
            help=f"How often each node saves its part. Default: {SAVE_EVERY}.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run one recipe for real: on this machine, or across the machines of a Ray cluster."""
    read = read_recipe(recipe, settings or [])
    read = read.strictly() if strict else read
    if checkpoint_every is None and read.pipeline.stages == 1:  # others cannot be saved
        checkpoint_every = SAVE_EVERY
    every = None if checkpoint_every is None else parse_every(checkpoint_every)
    launch_one(read, out or _dated("launch"), address, every, insecure=insecure, as_json=as_json)


@app.command("report")
def report_command(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="Run directories, or folders that hold some."),
    ],
    target_loss: Annotated[
        float | None, typer.Option(help="Default: the loss that the worst of the runs ends at.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and the plots. Default: the first DIR."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Table, plots and one HTML page from runs that were made before."""
    _check_target(target_loss)
    found = [path for directory in directories for path in report.find(directory)]
    if not found:
        stopped = [str(directory) for directory in directories if experiment.unfinished(directory)]
        hint = (
            f"; what was stopped there goes on with `archipel resume {stopped[0]}`"
            if stopped
            else ""
        )
        raise UserError(
            "no run directory (a folder with summary.json) in "
            f"{', '.join(map(str, directories))}{hint}"
        )
    show([report.load(path) for path in found], out or directories[0], target_loss, as_json=as_json)


@app.command("list")
def list_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A method, task, topology or profile: its settings."),
    ] = None,
) -> None:
    """Methods, tasks, topologies, profiles and studies; with a name, its settings, their defaults
    and what they mean.
    """
    if name is None:
        for kind, known in (
            ("methods", methods.names()),
            ("tasks", [*CONFIGS, "file.py:function"]),
            ("topologies", [*PRESETS, "internet-N", "FILE.yaml"]),
            ("profiles", [*PROFILES, MEASURED]),
            ("sections", list(SECTIONS)),
            ("studies", studies.names()),
        ):
            out_console.print(
                f"{kind:<11} {', '.join(known)}", soft_wrap=True, markup=False, highlight=False
            )
        return
    config = (
        SECTIONS.get(name)
        or CONFIGS.get(name)
        or (methods.load(name).Config if name in methods.names() or name.endswith(".py") else None)
    )
    if config is not None:
        table = Table("setting", "default", "meaning", box=None)
        for key, field in config.model_fields.items():
            default = "required" if field.is_required() else str(field.default)
            table.add_row(*map(Text, (key, default, field.description or "")))
        out_console.print(table)
    elif name in PROFILES:
        out_console.print(
            dump(PROFILES[name].model_dump(mode="json")), markup=False, highlight=False
        )
    elif name in PRESETS or name.startswith("internet-") or name.endswith((".yaml", ".yml")):
        out_console.print(
            dump(load_topology(name).model_dump(mode="json")), markup=False, highlight=False
        )
    else:
        known = [*methods.names(), *CONFIGS, *PROFILES, *PRESETS, *SECTIONS]
        raise UserError(
            f"nothing is called {name!r}{nearest(name, known)}; `archipel list` shows all names"
        )


@app.command()
def study(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"One of: {', '.join(studies.names())}.")
    ],
    steps: Annotated[
        int, typer.Option(min=100, help="Inner steps of each run.")
    ] = studies.Settings.steps,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = studies.Settings.seeds,
    processes: Processes = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for runs and plots. Default: runs/NAME-DATE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer one question about a method with runs of its own."""
    chosen, folder = studies.load(name), out or _dated(name)
    _say(f"{chosen.TITLE} {seeds} seeds of {steps:,} inner steps.")
    with progress_of() as begin:
        answer = chosen.run(folder, studies.Settings(steps, seeds, processes, begin))
    if as_json:
        print(json.dumps({**asdict(answer), "plots": [str(plot) for plot in answer.plots]}))
        return
    table = Table(*answer.columns, box=None)
    for row in answer.rows:
        table.add_row(*map(str, row))
    for text in (
        answer.headline,
        table,
        answer.finding,
        f"Plots: {', '.join(map(str, answer.plots))}",
    ):
        out_console.print(text, soft_wrap=True, markup=False, highlight=False)


@app.command("latency")
def latency_command(
    workers: Annotated[int, typer.Option(min=2, help="n.")] = 1024,
    inner_steps: Annotated[int, typer.Option(min=1, help="m: inner steps of an outer step.")] = 100,
    message_s: Annotated[
        float, typer.Option(help="Mean seconds of a message with one vector of weights.")
    ] = 1.0,
    sigma: Annotated[
        float, typer.Option(help="Standard deviation of the logarithm of a message's time.")
    ] = 0.5,
    step_s: Annotated[float, typer.Option(help="Mean seconds of an inner step.")] = 1.0,
    step_cv: Annotated[
        float, typer.Option(help="Standard deviation of an inner step's time over its mean.")
    ] = 0.1,
    steps: Annotated[
        int, typer.Option(min=1, help="Inner steps of a worker in the whole run.")
    ] = 25_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawn times.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the plots. Default: runs/latency-DATE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What pairs save against an all-reduce when messages take log-normal times. Drawn times;
    nothing is trained.
    """
    times = latency.LogNormal(message_s, sigma)
    job = latency.Job(times, workers, inner_steps, step_s, step_cv, steps=steps)
    _say("drawing message times; with the defaults this takes about half a minute")
    result = latency.study(job, seed)
    plots = latency.write(result, out or _dated("latency"))
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    for table in latency.tables(result):
        out_console.print(table)
    out_console.print(
        f"Plots: {', '.join(map(str, plots))}", soft_wrap=True, markup=False, highlight=False
    )


@app.command("fuzz")
def fuzz_command(
    schedules: Annotated[
        int, typer.Option(min=1, help="Random runs, each with faults of its own.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Default: one a core. The result is the same.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Do the invariants hold whatever goes wrong? Random topologies, methods and faults; nothing is
    trained.
    """

    def progress(done: int, failed: int) -> None:
        if done % max(1, schedules // 10) == 0:
            _say(f"{done:,}/{schedules:,} schedules, {failed} violations")

    outcomes = fuzz.fuzz(schedules, seed, processes or os.cpu_count() or 1, progress)
    failures = fuzz.failures(outcomes)
    if as_json:
        found = [asdict(failure) for failure in failures]
        print(json.dumps({"schedules": schedules, "violations": len(failures), "failures": found}))
    else:
        for text in fuzz.report(outcomes):
            out_console.print(text, soft_wrap=True, markup=False, highlight=False)
    if failures:
        sys.exit(1)


theory_app = typer.Typer(
    help="What is known exactly about a method.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(theory_app, name="theory")


@theory_app.callback()
def theory_command() -> None:
    """What is known exactly about a method."""


@theory_app.command("noloco")
def theory_noloco(
    alpha: Annotated[float, typer.Option(help="α: outer momentum.")] = 0.5,
    beta: Annotated[float, typer.Option(help="β: outer learning rate.")] = 0.7,
    gamma: Annotated[float, typer.Option(help="γ: averaging strength.")] = 0.7,
    curvature: Annotated[
        float, typer.Option(help="ωλ: inner learning rate times curvature; 0: the limit.")
    ] = 0.0,
    inner_steps: Annotated[int, typer.Option(help="m: inner steps of an outer step.")] = 50,
    workers: Annotated[int | None, typer.Option(help="N. Default: infinitely many.")] = None,
    group_size: Annotated[int, typer.Option(help="n: workers that average together.")] = 2,
    conjecture: Annotated[
        bool,
        typer.Option(
            "--conjecture",
            help="Also how far off the paper's variance is, for several N; needs --curvature.",
        ),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for figures. Default: none are drawn."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Do NoLoCo's replicas stay together? Exact second moments on a quadratic; nothing is
    trained.
    """
    if conjecture and not curvature:
        raise UserError(
            "--conjecture: a flat direction has no variance to compare; give a --curvature, such "
            "as 0.001"
        )
    try:
        setting = moments.Setting(alpha, beta, gamma, curvature, inner_steps, workers, group_size)
        verdict = moments.verdict(setting)
        compared = moments.conjecture(setting) if conjecture else []
    except ValueError as error:  # it begins with the name of a field
        field, _, rest = str(error).partition(" ")
        option = {"curvature_rate": "curvature"}.get(field, field).replace("_", "-")
        raise UserError(f"--{option} {rest}") from None
    try:
        drawn, left_out = theory_plots.write(setting, plots) if plots else ([], {})
    except OSError as error:
        raise UserError(f"--plots {plots}: {error.strerror}") from None
    for file, why in left_out.items():
        _say(f"{file} is not drawn: {why}")
    if as_json:
        fields = asdict(verdict)
        empty = {
            key: None
            for key, value in fields.items()
            if isinstance(value, float) and math.isnan(value)
        }
        more = {"conjecture": [asdict(row) for row in compared]} if conjecture else {}
        print(json.dumps(fields | empty | more, allow_nan=False))
        return
    limit = "in the small-curvature limit, which decides for a network"
    where = f"curvature ωλ = {curvature}, m = {inner_steps}" if curvature else limit
    crowd = f"{workers} workers" if workers else "many workers"
    given = f"α = {alpha}, β = {beta}, γ = {gamma}, groups of {group_size}"
    out_console.print(
        f"{'stable' if verdict.stable else 'unstable'}: {given}, {crowd}, {where}\n"
        f"  stable window          {verdict.gamma_min:.2f} < γ < {verdict.gamma_max:.2f}\n"
        f"  its limit              γ < {verdict.gamma_max_limit:.2f} (small curvature, many "
        "workers)\n"
        f"  fastest contraction    γ = {verdict.gamma_best:.2f}\n"
        f"  in one outer step      the mean is multiplied by {verdict.spectral_radius_mean:.4f} in "
        "the long run, "
        f"the replicas' variance by {verdict.spectral_radius_spread:.4f}",
        soft_wrap=True, markup=False, highlight=False,
    )  # fmt: skip
    if conjecture:
        title = (
            "E(φ − mean of its group)²: exact over that of independent replicas, and over the "
            "conjectured 2((n − 1)/n)²·Var φ"
        )
        out_console.print(title, soft_wrap=True, markup=False, highlight=False)
        table = Table("  workers", "exact/independent", "exact/conjectured", box=None)
        for row in compared:
            one_group = (
                "  (one group of all: replicas that start equal stay equal)"
                if row.exact_over_independent == 0
                else ""
            )
            ratios = (
                f"{row.exact_over_independent:.4f}",
                f"{row.exact_over_conjectured:.4f}{one_group}",
            )
            table.add_row(f"  {row.workers or '∞'}", *ratios)
        out_console.print(table)
    if drawn:
        out_console.print(
            f"Plots: {', '.join(map(str, drawn))}", soft_wrap=True, markup=False, highlight=False
        )


def comparison(
    method_list: str, common: dict[str, Any], seeds: int, overrides: Sequence[str]
) -> list[Recipe]:
    """One recipe for each method and seed; overrides are `method.key`, `task.key`, `topology.key`,
    `profile.key` or `run.key`.

    Raises:
        UserError: something in them is unknown or impossible.
    """
    chosen = [_method_fields(text.strip()) for text in method_list.split(",") if text.strip()]
    if not chosen:
        raise UserError(
            f"--methods {method_list!r}: name at least one of {', '.join(methods.names())}"
        )
    labels = [label for label, _ in chosen]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        raise UserError(f"--methods: {', '.join(sorted(repeated))} is named twice")
    sections: dict[str, Any] = {
        **common,
        "run": {key: value for key, value in common["run"].items() if value is not None},
    }
    for override in overrides:
        place, key, value = parse_override(override)
        matching = [fields for label, fields in chosen if place in (label, fields["name"])]
        for fields in matching:
            fields[key] = value
        if place in sections:
            sections[place] = {**section(sections[place] or {}, place), key: value}
        elif not matching:
            known = [
                *dict.fromkeys([*labels, *(fields["name"] for _, fields in chosen)]),
                *sections,
            ]
            raise UserError(
                f"--set {override}: {place!r} is none of {', '.join(known)}{nearest(place, known)}"
            )
    first_seed = sections["run"].get("seed", 0)
    recipes = []
    for label, fields in chosen:
        for seed in range(seeds):
            run = {
                **sections["run"],
                "seed": first_seed + seed if isinstance(first_seed, int) else first_seed,
            }
            recipes.append(
                parse_recipe({**sections, "method": dict(fields), "label": label, "run": run})
            )
    return recipes


def _method_fields(text: str) -> tuple[str, dict[str, Any]]:
    """A method's label and fields from `name` or `name+flag+flag`."""
    name, *flags = text.split("+")
    known = [
        key
        for key, field in methods.load(name).Config.model_fields.items()
        if field.annotation is bool
    ]
    for flag in flags:
        if flag not in known:
            raise UserError(
                f"--methods {text}: {name} has no flag {flag!r}{nearest(flag, known)}; its flags: "
                f"{', '.join(known) or 'none'}"
            )
    label = "+".join([Path(name).stem, *flags])
    return label, {"name": name, **dict.fromkeys(flags, True)}


def run_all(
    recipes: list[Recipe],
    out: Path,
    processes: int | None,
    target_loss: float | None,
    checkpoint_every: str | None = None,
    *,
    as_json: bool,
) -> None:
    """Simulate `recipes`, which share task and topology, one after the other, and show them."""
    _check_target(target_loss)
    every = None if checkpoint_every is None else parse_every(checkpoint_every)
    names = [f"{recipe.label}-seed{recipe.run.seed}" for recipe in recipes]
    for recipe in recipes:
        experiment.check_reachable(recipe)
        experiment.warn_of_divergence(recipe)
    with experiment.open_pool(recipes[0], processes) as pool, progress_of() as begin:
        experiment.check_every(every, pool)
        if recipes[0].profile is None:
            profile = experiment.measure_profile(pool)  # once, so that all methods run on one clock
            recipes = [replace(recipe, profile=profile) for recipe in recipes]
        experiment.prepare_output(out, names)
        directories = {out / name: recipe for name, recipe in zip(names, recipes, strict=True)}
        for (
            directory,
            recipe,
        ) in directories.items():  # so that those whose turn has not come can be resumed too
            experiment.start_directory(directory, recipe)
        try:
            diverged = simulate_all(directories, pool, out, begin, every)
        except UserError:  # what cannot run as it is cannot be resumed
            experiment.remove_unbegun(directories)
            raise
    finished = [directory for directory in directories if (directory / "summary.json").is_file()]
    finish(
        finished,
        out,
        diverged,
        recipes[0].run.target_loss if target_loss is None else target_loss,
        as_json=as_json,
    )


def simulate_all(
    recipes: dict[Path, Recipe],
    pool: Pool | None,
    out: Path,
    begin: Callable[[str], experiment.Progress],
    every: Every | None,
    *,
    resume: bool = False,
) -> list[str]:
    """Simulate recipes that share a pool, each in its run directory; a line for each one that
    diverged.
    """
    diverged: list[str] = []
    try:
        for directory, recipe in recipes.items():
            try:
                experiment.simulate(
                    recipe, pool, directory, begin(directory.name), every=every, resume=resume
                )
            except Diverged as error:  # one method's trouble is no reason to lose the others
                diverged.append(f"{error} (seed {recipe.run.seed})")
    except KeyboardInterrupt:
        _complain(
            f"interrupted; `archipel resume {out}` goes on from here; `archipel report {out}` "
            "shows what happened until then",
            130,
        )
    return diverged


def finish(
    finished: list[Path],
    out: Path,
    diverged: list[str],
    target_loss: float | None,
    *,
    as_json: bool,
) -> None:
    """Show the runs in the directories `finished`, then complain about the others."""
    if finished:
        show([report.load(directory) for directory in finished], out, target_loss, as_json=as_json)
    else:
        with suppress(OSError):
            out.rmdir()  # unless something else is in it
    if diverged:
        raise Diverged("; ".join(diverged))


def launch_one(
    recipe: Recipe,
    out: Path,
    address: str | None,
    every: Every | None,
    *,
    insecure: bool,
    as_json: bool,
) -> None:
    """Run `recipe` live and show it."""
    name = f"{recipe.label}-seed{recipe.run.seed}"
    experiment.warn_of_divergence(recipe)
    experiment.prepare_output(out, [name])
    try:
        go_live(recipe, out / name, address, every, insecure=insecure)
    finally:
        with suppress(OSError):
            out.rmdir()  # unless something is in it
    show([report.load(out / name)], out, recipe.run.target_loss, as_json=as_json)


def go_live(
    recipe: Recipe,
    directory: Path,
    address: str | None,
    every: Every | None,
    *,
    insecure: bool,
    resume: bool = False,
) -> None:
    """Run `recipe` live in a run directory, or go on with the run that was stopped there."""
    from archipel.live import launch as live

    try:
        with live_progress_of(directory.name) as progress:
            live.launch(
                recipe,
                directory,
                address=address,
                insecure=insecure,
                every=every,
                resume=resume,
                progress=progress,
            )
    except KeyboardInterrupt:
        left = (
            f"; `archipel report {directory}` shows what happened until then"
            if directory.exists()
            else ""
        )
        goes_on = (
            f"; `archipel resume {directory}` goes on from here"
            if experiment.unfinished(directory)
            else ""
        )
        _complain(f"interrupted{goes_on}{left}", 130)
    except TrainingError as error:
        goes_on = (
            f"; `archipel resume {directory}` goes on from the last save"
            if experiment.unfinished(directory)
            else ""
        )
        raise TrainingError(f"{error}{goes_on}") from None


def show(runs: list[report.Run], out: Path, target_loss: float | None, *, as_json: bool) -> None:
    """The comparison on stdout, as a table or as JSON, and as a page in `out`."""
    runs = report.distinguish(runs)
    target = report.target_loss(runs) if target_loss is None else target_loss
    page = report.write(runs, out, target)
    if as_json:
        print(json.dumps(report.as_json(runs, target), allow_nan=False))
        return
    out_console.print(report.headline(runs), soft_wrap=True, markup=False, highlight=False)
    for note in report.changes(runs):
        out_console.print(note, soft_wrap=True, markup=False, highlight=False)
    out_console.print(report.table(runs, target))
    out_console.print(f"Report: {page}", soft_wrap=True, markup=False, highlight=False)


@contextmanager
def progress_of() -> Iterator[Callable[[str], experiment.Progress]]:
    """A bar a run on a terminal; elsewhere a plain line on stderr every tenth of a run."""
    if not log_console.is_terminal:
        yield _plain_progress
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,} steps"),
        TextColumn("{task.fields[clock_s]:,.0f} s modelled"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=log_console) as bars:

        def begin(name: str) -> experiment.Progress:
            bar = bars.add_task(name, total=1, clock_s=0.0)

            def progress(steps: int, planned: int, clock_s: float) -> None:
                bars.update(bar, completed=steps, total=planned, clock_s=clock_s)

            return progress

        yield begin


def _plain_progress(name: str) -> experiment.Progress:
    started, shown = time.perf_counter(), -1

    def progress(steps: int, planned: int, clock_s: float) -> None:
        nonlocal shown
        tenth = 10 * steps // planned
        if tenth > shown:
            shown = tenth
            log_console.print(
                f"{name}: {steps:,}/{planned:,} steps, {clock_s:,.0f} s modelled, "
                f"{time.perf_counter() - started:.0f} s here",
                soft_wrap=True, markup=False, highlight=False,
            )  # fmt: skip

    return progress


@contextmanager
def live_progress_of(name: str) -> Iterator[Callable[[Now], None]]:
    """How a live run stands: a bar on a terminal; elsewhere a plain line on stderr every tenth of
    the run, and every minute.
    """
    if log_console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,} steps"),
            TextColumn("{task.fields[says]}"),
        )
        with Progress(*columns, console=log_console) as bars:
            bar = bars.add_task(name, total=None, says="starting")
            yield lambda now: bars.update(
                bar, completed=now.inner_steps, total=now.planned, says=_in_words(now)
            )
        return
    shown, shown_s = -1, 0.0

    def progress(now: Now) -> None:
        nonlocal shown, shown_s
        tenth = 10 * now.inner_steps // now.planned
        if tenth > shown or now.time_s > shown_s + 60:
            shown, shown_s = tenth, now.time_s
            _say(f"{name}: {now.inner_steps:,}/{now.planned:,} steps, {_in_words(now)}")

    yield progress


def _in_words(now: Now) -> str:
    """Loss, speed, who idles and who is late, as far as they are known."""
    said = [f"{now.time_s:,.0f} s"]
    if now.loss is not None:
        said.append(f"loss {now.loss:.3f}")
    if now.tokens_per_s is not None:
        said.append(f"{now.tokens_per_s:,.0f} tokens/s")
    if now.idle:
        most = max(now.idle, key=lambda node: now.idle[node])
        said.append(
            f"idle {sum(now.idle.values()) / len(now.idle):.0%} (most: {most} {now.idle[most]:.0%})"
        )
    if now.late is not None:
        said.append(f"late: {now.late}")
    return ", ".join(said)


def _check_target(target_loss: float | None) -> None:
    if target_loss is not None and not math.isfinite(target_loss):
        raise UserError(f"--target-loss {target_loss}: expected a finite number")


def _dated(command: str) -> Path:
    return Path("runs") / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"


def main() -> None:
    """Run the command line and turn errors into one line and an exit code, and warnings into one
    line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal that cannot show Greek shows a question mark
    warnings.showwarning = lambda message, *_: _say(f"archipel: warning: {message}")
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UserError as error:
        _complain(error, 2)
    except TrainingError as error:
        _complain(error, 1)
    except OSError as error:  # a full disk, a folder that cannot be written to
        _complain(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    except Exception as error:
        # The option parser's own errors. Which package they come from depends on typer's version.
        if not hasattr(error, "format_message"):
            raise
        _complain(error.format_message(), getattr(error, "exit_code", 2))


def _say(line: str) -> None:
    log_console.print(line, soft_wrap=True, markup=False, highlight=False)


def _complain(message: object, code: int) -> NoReturn:
    _say(f"archipel: {message}")
    sys.exit(code)


if __name__ == "__main__":
    main()
