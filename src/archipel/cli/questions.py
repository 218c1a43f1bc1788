"""The commands that answer a question without a recipe: what there is, studies, theory, fuzzing.

What belongs here: the arguments of these commands, and how their answers are printed. What does
not: how the answers are found (`studies/`, `theory/`, `fuzz.py`).
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from archipel import fuzz as fuzzing
from archipel import methods, studies
from archipel.cli import terminal
from archipel.cli.options import Json, a_path
from archipel.disk import rundir
from archipel.errors import UserError, nearest
from archipel.recipe import SECTIONS
from archipel.sim.faults import KINDS, FaultsConfig, RandomFaults
from archipel.sim.topology import MEASURED, PRESETS, PROFILES, load_topology
from archipel.theory import latency as model
from archipel.theory import moments
from archipel.theory import plots as plots_of
from archipel.train.configs import CONFIGS
from archipel.yamlfile import dump


def list_names(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A method, task, topology, profile, section or fault: its settings.",
        ),
    ] = None,
) -> None:
    """Methods, tasks, topologies, profiles, sections, faults and studies; with a name, its
    settings, their defaults and what they mean.
    """
    kinds = _names()
    if name is None:
        for kind in kinds:
            _tell_names(kind)
    elif name in KINDS:
        terminal.tell(_settings(KINDS[name]))
        terminal.tell(_in_a_line(KINDS[name]))
    elif config := SECTIONS.get(name) or CONFIGS.get(name) or _method_settings(name):
        terminal.tell(_settings(config))
        if config is FaultsConfig:
            terminal.tell("")
            terminal.tell(_settings(RandomFaults, "random."))
            terminal.tell("\nkinds of `schedule`; `archipel list KIND` shows what each one takes")
            table = Table(box=None, show_header=False)
            for kind, fault in KINDS.items():
                table.add_row(kind, Text(_in_a_line(fault)))
            terminal.tell(table)
    elif name in PROFILES:
        terminal.tell(dump(PROFILES[name].model_dump(mode="json")))
    elif name in PRESETS or name.startswith("internet-") or name.endswith((".yaml", ".yml")):
        terminal.tell(dump(load_topology(name).model_dump(mode="json")))
    elif name == MEASURED:
        terminal.tell(
            f"{MEASURED} is a profile that is taken when a run starts: this machine's, this task's"
        )
    elif name in studies.names():
        terminal.tell(f"{name} is a study: {studies.load(name).TITLE}")
        terminal.tell(f"`archipel study {name}` makes it, `archipel study --help` has its options")
    elif named := [kind for kind in kinds if name in (kind, _ONE_OF[kind])]:
        _tell_names(named[0])
        terminal.tell(f"`archipel list NAME` says more of each {_ONE_OF[named[0]]}")
    else:
        known = [*kinds, *_ONE_OF.values(), *(one for names in kinds.values() for one in names)]
        homes = _homes_of(name)
        meant = (
            f"; it is a setting of {', '.join(homes)}, see `archipel list {homes[0]}`"
            if homes
            else nearest(name, known)
        )
        raise UserError(f"nothing is called {name!r}{meant}; `archipel list` shows all names")


_ONE_OF = {
    "methods": "method",
    "tasks": "task",
    "topologies": "topology",
    "profiles": "profile",
    "sections": "section",
    "faults": "fault",
    "studies": "study",
}
"""Kinds of names, and what one of each is called."""


def _names() -> dict[str, list[str]]:
    """All names, by their kind."""
    return {
        "methods": methods.names(),
        "tasks": [*CONFIGS, "file.py:function"],
        "topologies": [*PRESETS, "internet-N", "FILE.yaml"],
        "profiles": [*PROFILES, MEASURED],
        "sections": list(SECTIONS),
        "faults": list(KINDS),
        "studies": studies.names(),
    }


def _tell_names(kind: str) -> None:
    terminal.tell(f"{kind:<11} {', '.join(_names()[kind])}")


def _homes_of(setting: str) -> list[str]:
    """Methods, tasks, sections and faults that have a setting of this name; also `run.steps`."""
    home, _, key = setting.rpartition(".")
    having: dict[str, type[BaseModel]] = {**CONFIGS, **SECTIONS, **KINDS}
    having |= {name: methods.load(name).Config for name in methods.names()}
    return [
        name
        for name, config in having.items()
        if key in {*config.model_fields} - {"name", "kind"} and home in ("", name)
    ]


def _method_settings(name: str) -> type[BaseModel] | None:
    known = name in methods.names() or name.endswith(".py")
    return methods.load(name).Config if known else None


def _settings(config: type[BaseModel], prefix: str = "") -> Table:
    table = Table("setting", "default", "meaning", box=None)
    for key, field in config.model_fields.items():
        default = "required" if field.is_required() else str(field.default)
        table.add_row(*map(Text, (prefix + key, default, field.description or "")))
    return table


def _in_a_line(config: type[BaseModel]) -> str:
    return " ".join((config.__doc__ or "").split())


def latency(
    workers: Annotated[int, typer.Option(min=2, help="n: how many workers there are.")] = 1024,
    inner_steps: Annotated[
        int, typer.Option(min=1, help="m: inner steps between two exchanges.")
    ] = 100,
    message_s: Annotated[
        float, typer.Option(help="Mean seconds of a message with one vector of weights.")
    ] = 1.0,
    sigma: Annotated[
        float, typer.Option(help="Standard deviation of the logarithm of a message's time.")
    ] = 0.5,
    step_s: Annotated[float, typer.Option(help="Mean seconds of an inner step.")] = 1.0,
    step_cv: Annotated[
        float, typer.Option(help="Standard deviation of an inner step's time, divided by its mean.")
    ] = 0.1,
    steps: Annotated[
        int, typer.Option(min=1, help="Inner steps of a worker in the whole run.")
    ] = 25_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn times.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=a_path, metavar="DIR", help="Folder for the plots. Default: runs/latency-DATE."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What pairs save against an all-reduce when messages take log-normal times. Drawn times;
    nothing is trained.
    """
    times = model.LogNormal(message_s, sigma)
    job = model.Job(times, workers, inner_steps, step_s, step_cv, steps=steps)
    terminal.say("drawing message times; with the defaults this takes about half a minute")
    result = model.study(job, seed)
    plots = model.write(result, out or rundir.dated("latency"))
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    for table in model.tables(result):
        terminal.tell(table)
    terminal.tell(f"Plots: {', '.join(map(str, plots))}")


def fuzz(
    schedules: Annotated[
        int, typer.Option(min=1, help="Random runs, each with faults of its own.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")] = 0,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many processes work. Default: one a core. The result does not depend on it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Do the invariants hold whatever goes wrong? Random topologies, methods and faults; nothing is
    trained.
    """

    def progress(done: int, failed: int) -> None:
        if done % max(1, schedules // 10) == 0:
            terminal.say(f"{done:,}/{schedules:,} schedules, {failed} violations")

    outcomes = fuzzing.fuzz(schedules, seed, processes or os.cpu_count() or 1, progress)
    failures = fuzzing.failures(outcomes)
    if as_json:
        found = [asdict(failure) for failure in failures]
        print(
            json.dumps({"schedules": len(outcomes), "violations": len(failures), "failures": found})
        )
    else:
        for text in fuzzing.report(outcomes):
            terminal.tell(text)
    if len(outcomes) < schedules:
        terminal.say(
            f"archipel: interrupted after {len(outcomes):,} of {schedules:,} schedules, "
            f"{len(failures)} violations"
        )
        sys.exit(130)
    if failures:
        sys.exit(1)


def theory_noloco(
    alpha: Annotated[float, typer.Option(help="α: outer momentum.")] = 0.5,
    beta: Annotated[float, typer.Option(help="β: outer learning rate.")] = 0.7,
    gamma: Annotated[float, typer.Option(help="γ: averaging strength.")] = 0.7,
    curvature: Annotated[
        float,
        typer.Option(
            help="ωλ: inner learning rate times curvature; 0 is the limit of a flat direction."
        ),
    ] = 0.0,
    inner_steps: Annotated[int, typer.Option(help="m: inner steps between two exchanges.")] = 50,
    workers: Annotated[
        int | None, typer.Option(help="N: how many workers there are. Default: infinitely many.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="n: workers that average together.")] = 2,
    conjecture: Annotated[
        bool,
        typer.Option(
            "--conjecture",
            help="Also show how far off the paper's variance is, for several N; needs --curvature.",
        ),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            parser=a_path, metavar="DIR", help="Folder for figures. Default: none are drawn."
        ),
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
        drawn, left_out = plots_of.write(setting, plots) if plots else ([], {})
    except OSError as error:
        raise UserError(f"--plots {plots}: {error.strerror}") from None
    for file, why in left_out.items():
        terminal.say(f"{file} is not drawn: {why}")
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
    terminal.tell(
        f"{'stable' if verdict.stable else 'unstable'}: {given}, {crowd}, {where}\n"
        f"  stable window          {verdict.gamma_min:.2f} < γ < {verdict.gamma_max:.2f}\n"
        f"  its limit              γ < {verdict.gamma_max_limit:.2f} (small curvature, many "
        "workers)\n"
        f"  fastest contraction    γ = {verdict.gamma_best:.2f}\n"
        f"  in one outer step      the mean is multiplied by {verdict.spectral_radius_mean:.4f} in "
        "the long run, "
        f"the replicas' variance by {verdict.spectral_radius_spread:.4f}",
    )
    if conjecture:
        title = (
            "E(φ − mean of its group)²: exact over that of independent replicas, and over the "
            "conjectured 2((n − 1)/n)²·Var φ"
        )
        terminal.tell(title)
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
        terminal.tell(table)
    if drawn:
        terminal.tell(f"Plots: {', '.join(map(str, drawn))}")
