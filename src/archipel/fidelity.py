"""How well the simulator foretells a live run: both side by side.

What belongs here: the simulated twin of a live run on a measured cluster, and what the two have in
common. What does not: the measurements (`live/probe.py`), and the runs themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from archipel import experiment
from archipel.disk import rundir
from archipel.errors import UserError
from archipel.recipe import Recipe
from archipel.report import Result
from archipel.run.wire import BYTES_PER_ENTRY
from archipel.series import Progress, say_nothing
from archipel.sim.topology import Profile, Topology
from archipel.train.configs import NoTask

COMPARED = {
    "time_s": "time, s",
    "outer_steps": "outer steps",
    "local_updates": "local updates",
    "slow_link_bytes": "bytes between regions",
    "sent_bytes": "bytes on all links",
    "final_loss": "final loss",
}
"""Keys of `summary.json`, and what they are called."""


@dataclass(frozen=True)
class Row:
    """One figure of both runs.

    Attributes:
        name: what it is.
        simulated, live: on the modelled clock, and as measured.
    """

    name: str
    simulated: float
    live: float

    @property
    def off(self) -> float | None:
        """By how much the live run is above the simulated one, as a part of that; None: of 0."""
        return self.live / self.simulated - 1 if self.simulated else None


@dataclass(frozen=True)
class Fidelity:
    """A live run and its simulated twin.

    Attributes:
        live, simulated: what they have left.
        rows: figures of both.
        order: the part of all pairs of finished inner loops that come in the same order in both
            runs; None: there are no two.
    """

    live: Result
    simulated: Result
    rows: list[Row]
    order: float | None


def measure(
    recipe: Recipe,
    topology: Topology,
    step_time_s: float,
    *,
    address: str | None = None,
    insecure: bool = False,
    out: Path | None = None,
    progress: Progress = say_nothing,
    live_progress: experiment.LiveProgress = say_nothing,
) -> Fidelity:
    """Run a recipe live, simulate it on `topology`, and compare.

    Args:
        topology: the cluster's, as `live.probe` measures it.
        step_time_s: of an inner step on the fastest worker.
        address, insecure: as for `experiment.launch`.
        out: the folder for both run directories; None: a new one, `runs/fidelity-DATE`.

    Raises:
        UserError, TrainingError, Interrupted: see `experiment.launch`.
    """
    check(recipe)
    out = rundir.dated("fidelity") if out is None else out
    live = experiment.launch(
        recipe, address=address, insecure=insecure, out=out / "live", progress=live_progress
    )
    twin = twin_of(recipe, topology, step_time_s)
    simulated = experiment.simulate(twin, out=out / "simulated", progress=progress)
    return compared(live, simulated)


def check(recipe: Recipe) -> None:
    """Raise a `UserError` if a live run of the recipe sends nothing that could be compared."""
    if isinstance(recipe.task, NoTask):
        raise UserError(
            "task none: a live run of it sends empty vectors; choose a task that trains"
        )


def twin_of(recipe: Recipe, topology: Topology, step_time_s: float) -> Recipe:
    """The recipe as the cluster runs it: its topology, and vectors as large as they really are."""
    from archipel.live.prepare import sizes  # here, for it imports Ray

    numel, activation_bytes = sizes(recipe)
    profile = Profile(
        name="probed",
        model_bytes=BYTES_PER_ENTRY * numel,
        step_time_s=step_time_s,
        activation_bytes=activation_bytes,
    )
    return replace(recipe, topology=topology, profile=profile)


def compared(live: Result, simulated: Result) -> Fidelity:
    """Two runs side by side."""
    rows = [
        Row(name, float(simulated.summary[key]), float(live.summary[key]))
        for key, name in COMPARED.items()
        if simulated.summary.get(key) is not None and live.summary.get(key) is not None
    ]
    # Of the workers' time; the idle part itself may be next to nothing, and a ratio of it no news.
    busy = [1 - float(run.summary["idle_fraction"]) for run in (simulated, live)]
    rows.insert(1, Row("computing, part of the time", *busy))
    return Fidelity(live, simulated, rows, order(_ends(simulated), _ends(live)))


def order(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> float | None:
    """The part of all pairs of events that come in the same order in both lists. Events that only
    one list has do not count.
    """
    place = {event: i for i, event in enumerate(other)}
    places = [place[event] for event in one if event in place]
    pairs = len(places) * (len(places) - 1) // 2
    same = sum(a < b for i, a in enumerate(places) for b in places[i + 1 :])
    return same / pairs if pairs else None


def _ends(run: Result) -> list[tuple[str, int]]:
    """Which worker has finished inner steps for which time, in the order of time."""
    lines = [
        json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()
    ]
    trainings = sorted((line["time_s"], line["node"]) for line in lines if line["kind"] == "train")
    times: dict[str, int] = {}
    ends = []
    for _, node in trainings:
        times[node] = times.get(node, 0) + 1
        ends.append((node, times[node]))
    return ends
