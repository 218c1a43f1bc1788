"""The commands that measure a cluster: what its links and machines are like, and how well the
simulator foretells a run on it.

What belongs here: the arguments of these commands, and how their answers are printed. What does
not: the measurements (`live/probe.py`) and the comparison (`fidelity.py`).
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from archipel import fidelity as comparison
from archipel.cli import terminal
from archipel.cli.options import Address, Insecure, Json, Set, file_argument, path_option
from archipel.errors import UserError
from archipel.recipe import Recipe, load_recipe, parse_settings
from archipel.sim.topology import load_topology
from archipel.yamlfile import dump

if TYPE_CHECKING:
    from archipel.live.probe import Probed

RecipeFile = Annotated[
    Path,
    file_argument("RECIPE.yaml", "The run that the cluster is for: its regions, workers and task."),
]
Seconds = Annotated[
    float, typer.Option(min=0.1, max=30, help="About so long each link is filled, three times.")
]


def probe(
    recipe: RecipeFile,
    settings: Set = None,
    address: Address = None,
    insecure: Insecure = False,
    seconds: Seconds = 4.0,
    out: Annotated[
        Path | None,
        path_option("FILE.yaml", "The topology file. Default: print it."),
    ] = None,
) -> None:
    """Measure the links and the inner steps of a cluster, and write a topology."""
    loaded = load_recipe(recipe, parse_settings(settings or []))
    found = _probe(loaded, address, seconds, insecure=insecure)
    text = _topology_file(loaded, found)
    if out is None:
        terminal.tell(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    terminal.tell(_links(found))
    terminal.tell(f"Topology: {out}")


def fidelity(
    recipe: RecipeFile,
    settings: Set = None,
    address: Address = None,
    insecure: Insecure = False,
    seconds: Seconds = 4.0,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The cluster, if it has been probed already. Only with live.pace = profile.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        path_option("DIR", "Folder for both run directories. Default: runs/fidelity-DATE."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Probe a cluster, run a recipe there and on the simulator, and print both side by side."""
    loaded = load_recipe(recipe, parse_settings(settings or []))
    comparison.check(loaded)
    if topology is not None:
        measured, step_time_s = load_topology(topology), _step_time_s(loaded)
    else:
        found = _probe(loaded, address, seconds, insecure=insecure)
        measured, step_time_s = found.topology(loaded), found.step_time_s(loaded)
        if not as_json:
            terminal.tell(_links(found))
    with terminal.running() as (progress, live_progress):
        both = comparison.measure(
            loaded,
            measured,
            step_time_s,
            address=address,
            insecure=insecure,
            out=out,
            progress=progress,
            live_progress=live_progress,
        )
    if as_json:
        print(json.dumps(_as_json(both), allow_nan=False))
        return
    terminal.tell(_side_by_side(both))
    if both.order is not None:
        terminal.tell(f"{both.order:.1%} of all pairs of inner loops end in the same order")
    terminal.tell(f"Runs: {both.live.directory}, {both.simulated.directory}")


def _step_time_s(recipe: Recipe) -> float:
    """Of an inner step that nobody measures, since the run acts it out.

    Raises:
        UserError: the run does not: its inner steps take as long as they take.
    """
    if not recipe.acts_out_profile:
        raise UserError(
            "--topology: a topology does not say how long an inner step takes here; leave it out, "
            "or give --set live.pace=profile and a profile that is not `measured`"
        )
    assert recipe.profile is not None
    return recipe.profile.step_time_s


def _probe(recipe: Recipe, address: str | None, seconds: float, *, insecure: bool) -> Probed:
    from archipel.live.probe import probe as measure  # here, for it imports Ray

    return measure(
        recipe,
        address=address,
        insecure=insecure,
        seconds=seconds,
        progress=lambda what: terminal.say(f"archipel: measuring {what}"),
    )


def _topology_file(recipe: Recipe, found: Probed) -> str:
    lines = [f"# Measured on {datetime.date.today()} by `archipel topology probe`."]
    for (a, b), link in found.links.items():
        both = " and ".join(_mbit_s(one) for one in link.both_bytes_per_s)
        lines.append(
            f"# {a} to {b}: {_mbit_s(link.there_bytes_per_s)} of messages, back "
            f"{_mbit_s(link.back_bytes_per_s)}; both at once {both} Mbit/s"
        )
    if found.step_times_s:
        lines.append(
            f"# An inner step of the fastest worker takes {found.step_time_s(recipe) * 1e3:.4g} ms "
            "(profile: {…, step_time_s: …})."
        )
    fields = found.topology(recipe).model_dump(mode="json", exclude={"name"})
    return "\n".join([*lines, dump(fields)])


def _links(found: Probed) -> Table:
    table = Table(box=None)
    for name in ("link", "Mbit/s there", "back", "both at once", "latency, ms"):
        table.add_column(name, justify="left" if name == "link" else "right")
    for (a, b), link in found.links.items():
        table.add_row(
            f"{a} – {b}",
            _mbit_s(link.there_bytes_per_s),
            _mbit_s(link.back_bytes_per_s),
            " + ".join(_mbit_s(one) for one in link.both_bytes_per_s),
            f"{link.round_trip_s / 2 * 1e3:.3g}",
        )
    return table


def _side_by_side(both: comparison.Fidelity) -> Table:
    table = Table(box=None)
    table.add_column("")
    for name in ("simulated (modelled clock)", "live (measured)", "live is off by"):
        table.add_column(name, justify="right")
    for row in both.rows:
        off = "" if row.off is None else f"{row.off:+.1%}"
        table.add_row(row.name, f"{row.simulated:,.4g}", f"{row.live:,.4g}", off)
    return table


def _as_json(both: comparison.Fidelity) -> dict[str, object]:
    rows = [
        {"name": row.name, "simulated": row.simulated, "live": row.live, "off": row.off}
        for row in both.rows
    ]
    runs = {"live": str(both.live.directory), "simulated": str(both.simulated.directory)}
    return {"rows": rows, "order": both.order, "runs": runs}


def _mbit_s(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.4g}"
