"""Many short runs with random faults, to find one in which an invariant does not hold.

What belongs here: how a run is drawn, how one that fails is made smaller, the line that replays it,
and the table of what has been tried. What does not: what a fault does (`sim/schedule.py`,
`sim/clock.py`), what must hold (`run/invariants.py`).

Nothing is trained: what waits for whom, what is lost and what is counted do not depend on weights.
Times are small round numbers, so that a shrunk recipe can be followed by hand.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from archipel import methods, simulation
from archipel.recipe import parse_recipe
from archipel.run import invariants
from archipel.run.invariants import Ledger, Violation
from archipel.sim.faults import KINDS

FAULTS_UNTIL_S = 100


@dataclass(frozen=True)
class Failure:
    """A run that went wrong.

    Attributes:
        recipe: one line of JSON, which is YAML: `echo RECIPE | archipel run /dev/stdin` replays it.
        invariant: name of the invariant that does not hold, or `exception`.
        message: what was found.
    """

    recipe: str
    invariant: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        method: its method.
        kinds: the kinds of its faults.
        checks: how often each invariant was checked.
        failure: what went wrong, if anything did.
    """

    method: str
    kinds: frozenset[str]
    checks: dict[str, int]
    failure: Failure | None


def fuzz(
    schedules: int,
    seed: int,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, failed: None,
) -> list[Outcome]:
    """What came of `schedules` random runs, with each failure shrunk. The same for any number of
    `processes`. Ctrl-C ends it early: then it is what came of the first of them.

    `progress` is told how many are done and how many have failed.
    """
    outcomes: list[Outcome] = []
    with suppress(KeyboardInterrupt), _map(min(processes, schedules)) as each:
        for outcome in each(partial(_nth, seed), range(schedules)):
            outcomes.append(outcome)
            progress(len(outcomes), len(failures(outcomes)))
    return outcomes


@contextmanager
def _map(
    processes: int,
) -> Iterator[Callable[[Callable[[int], Outcome], Iterable[int]], Iterator[Outcome]]]:
    """`map`, or one that does the same in several processes."""
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn")
    ) as pool:  # not forked: torch has threads by now

        def started(function: Callable[[int], Outcome], items: Iterable[int]) -> Iterator[Outcome]:
            usual = signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # the others inherit that, and leave Ctrl-C to this process
            try:
                return pool.map(function, items)
            finally:
                signal.signal(signal.SIGINT, usual)

        try:
            yield started
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C most have not begun


def _nth(seed: int, i: int) -> Outcome:
    recipe = draw(np.random.default_rng((seed, i)))
    outcome = outcome_of(recipe)
    return replace(outcome, failure=shrunk(recipe, outcome.failure)) if outcome.failure else outcome


def outcome_of(recipe: dict[str, Any]) -> Outcome:
    """Run the recipe with these fields."""
    line = json.dumps(recipe, separators=(", ", ": "))
    ledger = Ledger()
    failure = None
    try:
        simulator = simulation.make_simulator(parse_recipe(deepcopy(recipe)), None)
        [ledger] = [one for one in simulator.state.observers if isinstance(one, Ledger)]
        simulator.run()
    except Violation as error:
        failure = Failure(line, error.invariant, str(error))
    except Exception as error:  # a method or the engine fell over
        failure = Failure(line, "exception", f"{type(error).__name__}: {error}")
    kinds = frozenset(fault["kind"] for fault in recipe["faults"]["schedule"])
    return Outcome(recipe["method"]["name"], kinds, ledger.checks, failure)


def violation(recipe: dict[str, Any]) -> Failure | None:
    """What goes wrong in a run of the recipe with these fields, if anything does."""
    return outcome_of(recipe).failure


def failures(outcomes: Iterable[Outcome]) -> list[Failure]:
    return [outcome.failure for outcome in outcomes if outcome.failure]


# What has been tried


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines for a terminal: each failure with what replays it, the table, and how many schedules
    went wrong.
    """
    found = failures(outcomes)
    for failure in found:
        yield f"{failure.message}\n  echo '{failure.recipe}' | archipel run /dev/stdin"
    rows = table(outcomes)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        yield "  ".join(
            [
                first.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
            ]
        )
    yield coverage(outcomes)
    yield f"{len(outcomes):,} schedules, {len(found)} violations"


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Rows of cells: schedules by fault and method, then checks by invariant and method; and how
    many of them went wrong.

    A schedule has up to eight faults, of several kinds, and counts for each kind.
    """
    names = methods.names()
    columns = [[outcome for outcome in outcomes if outcome.method == name] for name in names] + [
        list(outcomes)
    ]

    def cell(count: int, violated: Sequence[Outcome]) -> str:
        return f"{count:,}" + (f" ({len(violated)} violated)" if violated else "")

    rows = [["schedules with", *names, "all"]]
    for kind in (*KINDS, "any"):
        having = [
            [outcome for outcome in column if kind in (*outcome.kinds, "any")] for column in columns
        ]
        rows.append(
            [
                kind,
                *(
                    cell(len(some), [outcome for outcome in some if outcome.failure])
                    for some in having
                ),
            ]
        )
    rows.append(["checks of", *names, "all"])
    for invariant in (*invariants.NAMES, "exception"):
        against = [
            [outcome for outcome in column if _broken(outcome) == invariant] for column in columns
        ]
        counts = [sum(outcome.checks.get(invariant, 0) for outcome in column) for column in columns]
        if invariant in invariants.NAMES or against[-1]:
            rows.append([invariant, *map(cell, counts, against)])
    return rows


def _broken(outcome: Outcome) -> str | None:
    return outcome.failure.invariant if outcome.failure else None


def coverage(outcomes: Iterable[Outcome]) -> str:
    """How often each invariant was checked with each fault and each method: the smallest number of
    all, or what is missing.
    """
    checks = {
        (invariant, kind, name): 0
        for invariant in invariants.NAMES
        for kind in KINDS
        for name in methods.names()
    }
    for outcome in outcomes:
        for invariant, count in outcome.checks.items():
            for kind in outcome.kinds:
                checks[invariant, kind, outcome.method] += count
    never = [" × ".join(key) for key, count in checks.items() if not count]
    if never:
        more = f" and {len(never) - 8} more" if len(never) > 8 else ""
        return (
            f"of {len(checks)} combinations of invariant, fault and method, never checked: "
            f"{', '.join(never[:8])}{more}"
        )
    fewest = min(checks, key=lambda key: checks[key])
    return (
        f"all {len(checks)} combinations of invariant, fault and method were checked, each "
        f"{checks[fewest]:,} times or more "
        f"({' × '.join(fewest)})"
    )


# How a run is drawn


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """The fields of a random recipe: a small topology, a method, and up to eight faults. It ends
    long after the last of them.
    """
    regions = {
        f"r{i}": [one(rng, 1.0, 0.5, 0.4) for _ in range(int(rng.integers(1, 4)))]
        for i in range(int(rng.integers(1, 4)))
    }
    name = one(rng, *methods.names())
    recipe: dict[str, Any] = {
        "method": {"name": name, **_settings(rng, name)},
        "topology": {
            "regions": regions,
            "local": {"bandwidth_gbit_s": 0.8},
            "default": {
                "bandwidth_gbit_s": one(rng, 0.8, 0.016),
                "latency_ms": one(rng, 0, 100),
                "jitter": one(rng, 0.0, 0.0, 0.5),
            },
            "sharing": one(rng, "none", "none", "fair"),
            "collective": one(rng, "ring", "tree"),
        },
        "profile": {"name": "tiny", "model_bytes": 1_000_000, "step_time_s": 1.0},
        "task": "none",
        "run": {"steps": 1_000_000_000, "seed": int(rng.integers(1000))},
        "faults": {
            "schedule": [],
            "save_every_s": one(rng, 10.0, 30.0),
            "deadline_s": one(rng, 2.0, 10.0, 20.0),
        },
    }
    recipe["run"]["seconds"] = 4.0 * FAULTS_UNTIL_S
    servers = _servers(recipe)
    workers = [f"{region}/w{i}" for region, speeds in regions.items() for i in range(len(speeds))]
    for _ in range(int(rng.integers(1, 9))):
        recipe["faults"]["schedule"] += _fault(rng, workers, servers, list(regions))
    return recipe


def _settings(rng: np.random.Generator, name: str) -> dict[str, Any]:
    choices: dict[str, tuple[Any, ...]] = {
        "inner_steps": (1, 2, 4),
        "dynamic_steps": (False, True),
        "accumulate": (1, 2, 5),
        "report_since": ("merge", "send"),
        "workers_per_server": (None, 1, 2),
        "group_size": (1, 2, 3),
        "buffer": (1, 4),
    }
    known = methods.load(name).Config.model_fields
    return {key: one(rng, *values) for key, values in choices.items() if key in known}


def _servers(recipe: dict[str, Any]) -> list[str]:
    parsed = parse_recipe(deepcopy(recipe))
    workers = {worker.id for worker in parsed.topology.workers}
    return [
        str(node) for node in simulation.make_simulator(parsed, None).actors if node not in workers
    ]


def _fault(
    rng: np.random.Generator, workers: list[str], servers: list[str], regions: list[str]
) -> Iterator[dict[str, Any]]:
    """A random fault, or none where this kind cannot be. The first worker never goes for good, and
    servers restart.
    """
    kind = one(rng, *KINDS, "crash", "crash", "link_down")
    at_s, for_s = float(rng.integers(0, FAULTS_UNTIL_S)), float(one(rng, 1, 5, 20, 40))
    lasting: dict[str, Any] = {"kind": kind, "at_s": at_s, "for_s": for_s}
    between = [one(rng, *regions), one(rng, *regions)]
    match kind:
        case "slow":
            yield {**lasting, "node": one(rng, *workers), "factor": one(rng, 2.0, 10.0)}
        case "crash":
            node = one(rng, *workers, *servers, *servers)
            forever = node in workers[1:] and rng.random() < 0.2
            yield {
                "kind": kind,
                "node": node,
                "at_s": at_s,
                "restart_after_s": None if forever else for_s,
            }
        case "leave" | "join" if len(workers) > 1:
            yield {"kind": kind, "node": one(rng, *workers[1:]), "at_s": at_s}
        case "loss" | "duplicate":
            yield {
                **lasting,
                "between": one(rng, None, between),
                "probability": one(rng, 0.1, 0.5, 0.9),
            }
        case "delay":
            yield {**lasting, "between": one(rng, None, between), "extra_s": one(rng, 0.5, 10.0)}
        case "link_down" if between[0] != between[1]:
            yield {**lasting, "between": between}
        case "partition" if len(regions) > 1:
            yield {**lasting, "regions": [one(rng, *regions)]}


def one(rng: np.random.Generator, *among: Any) -> Any:
    return among[int(rng.integers(len(among)))]


# How a failing one is made smaller


def shrunk(recipe: dict[str, Any], failure: Failure) -> Failure:
    """The failure of a recipe that breaks the same invariant, with fewer faults and nodes and
    plainer links; none smaller does.
    """
    progressed = True
    while progressed:
        progressed = False
        for smaller in _smaller(recipe):
            found = violation(smaller)
            if (
                found
                and found.invariant == failure.invariant
                and (found.invariant != "exception" or _same(found, failure))
            ):
                recipe, failure, progressed = smaller, found, True
                break
    return failure


def _same(one: Failure, other: Failure) -> bool:
    """Two exceptions are of one kind: a recipe that has become impossible is no smaller example."""
    return one.message.partition(":")[0] == other.message.partition(":")[0]


def _smaller(recipe: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Recipes with one thing less, those with the largest change first."""

    topology = recipe["topology"]
    regions, schedule = topology["regions"], recipe["faults"]["schedule"]

    def with_topology(**fields: Any) -> dict[str, Any]:
        return {**recipe, "topology": {**topology, **fields}}

    for i in range(len(schedule)):
        yield {
            **recipe,
            "faults": {**recipe["faults"], "schedule": schedule[:i] + schedule[i + 1 :]},
        }
    for name, speeds in regions.items():
        if len(regions) > 1:
            yield with_topology(
                regions={other: speeds for other, speeds in regions.items() if other != name}
            )
        if len(speeds) > 1:
            yield with_topology(regions={**regions, name: speeds[:-1]})
        if set(speeds) != {1.0}:
            yield with_topology(regions={**regions, name: [1.0] * len(speeds)})
    plain = {"bandwidth_gbit_s": 0.8, "latency_ms": 0, "jitter": 0.0}
    if topology["default"] != plain:
        yield with_topology(default=plain)
    if topology["sharing"] != "none":
        yield with_topology(sharing="none")
