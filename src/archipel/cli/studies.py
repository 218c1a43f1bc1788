"""`archipel study`: its arguments, and how its answers are printed.

What belongs here: nothing else. What does not: how a study is made and kept (`study.py`), and which
studies there are (`studies/`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from archipel import studies, study
from archipel.cli import terminal
from archipel.cli.options import Json, Processes, a_path
from archipel.errors import UserError
from archipel.studies import Size


def study_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME…]", help="Studies; see --list. `all`: every one."),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="All studies with their questions, and nothing else.")
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--quick", help="As long as a verdict needs, or seconds to a few minutes."
        ),
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=100, help="Inner steps of each run, instead of the size's.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each kind, instead of the size's.")
    ] = None,
    processes: Processes = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=a_path,
            metavar="DIR",
            help="Folder for runs and plots. Default: one in runs/studies, where the same runs are "
            "found again.",
        ),
    ] = None,
    write_docs: Annotated[
        Path | None,
        typer.Option(
            parser=a_path,
            metavar="DIR",
            help="Put records and plots into DIR/studies; DIR/claims.md is written from all there.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer questions about the methods with runs of their own, and write the page of claims."""
    if list_all:
        table = Table(box=None, show_header=False)
        for name in studies.names():
            table.add_row(name, studies.load(name).TITLE)
        terminal.tell(table)
        return
    chosen = studies.names() if names == ["all"] else names or []
    if not chosen and write_docs is None:
        raise UserError("study: give a NAME, or --list")
    if len(chosen) > 1 and (as_json or out is not None):
        raise UserError(f"{'--json' if as_json else '--out'}: give one study, not {len(chosen)}")
    for name in chosen:
        usual = studies.load(name).FULL if full else studies.load(name).QUICK
        size = Size(steps or usual.steps, seeds or usual.seeds)
        terminal.say(f"{studies.load(name).TITLE} {size.text}.")
        with terminal.running() as (progress, _):
            record = study.make(name, size, out, processes, progress, terminal.say)
        if write_docs is not None:
            study.keep(record, write_docs)
        if as_json:
            print(record.to_json(), end="")
        else:
            _tell(record)
    if write_docs is not None:
        if not chosen:
            study.write_page(write_docs)
        terminal.say(f"{write_docs / study.PAGE} is written from {write_docs / study.RECORDS}")


def _tell(record: study.Record) -> None:
    found = record.findings
    table = Table(*found.columns, box=None)
    for row in found.rows:
        table.add_row(*map(str, row))
    for text in (record.headline, table, found.finding):
        terminal.tell(text)
    for claim in found.claims:
        reason = f" ({claim.reason})" if claim.reason else ""
        terminal.tell(f"{claim.claim} {claim.verdict}{reason}: {claim.seen}")
    terminal.tell(f"Plots: {', '.join(map(str, found.plots))}")
