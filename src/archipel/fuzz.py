"""Many short runs with random faults, to find one in which an invariant does not hold.

What belongs here: how a run is drawn, how one that fails is made smaller, and the line that replays it. What does not: what a
fault does (`faults.py`, `simulator.py`), what must hold (`invariants.py`).

Nothing is trained: what waits for whom, what is lost and what is counted do not depend on weights. Times are small round
numbers, so that a shrunk recipe can be followed by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from archipel import experiment, methods
from archipel.invariants import Violation
from archipel.recipe import parse_recipe

FAULTS_UNTIL_S = 100
KINDS = ("slow", "crash", "leave", "join", "loss", "delay", "duplicate", "link_down", "partition")


@dataclass(frozen=True)
class Failure:
    """A run that went wrong.

    Attributes:
        recipe: one line of JSON, which is YAML: `echo RECIPE | archipel run /dev/stdin` replays it.
        invariant: the one that does not hold, or `exception`.
        message: what was found.
    """

    recipe: str
    invariant: str
    message: str


def fuzz(schedules: int, seed: int, progress: Callable[[int, int], None] = lambda done, failed: None) -> list[Failure]:
    """The failures of `schedules` random runs, each one shrunk. `progress` is told how many are done and how many have failed."""
    failures = []
    for i in range(schedules):
        recipe = draw(np.random.default_rng((seed, i)))
        if found := violation(recipe):
            failures.append(shrunk(recipe, found))
        progress(i + 1, len(failures))
    return failures


def violation(recipe: dict[str, Any]) -> Failure | None:
    """Run the recipe with these fields; what went wrong, if anything did."""
    line = json.dumps(recipe, separators=(", ", ": "))
    try:
        parsed = parse_recipe(deepcopy(recipe))
        experiment.make_simulator(parsed, None).run()
    except Violation as error:
        return Failure(line, error.invariant, str(error))
    except Exception as error:  # a method or the engine fell over
        return Failure(line, "exception", f"{type(error).__name__}: {error}")
    return None


# How a run is drawn


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """The fields of a random recipe: a small topology, a method, and up to eight faults. It ends long after the last of them."""
    regions = {f"r{i}": [one(rng, 1.0, 0.5, 0.4) for _ in range(int(rng.integers(1, 4)))] for i in range(int(rng.integers(1, 4)))}
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
    return [str(node) for node in experiment.make_simulator(parsed, None).actors if node not in workers]


def _fault(rng: np.random.Generator, workers: list[str], servers: list[str], regions: list[str]) -> Iterator[dict[str, Any]]:
    """A random fault, or none where this kind cannot be. The first worker never goes for good, and servers restart."""
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
            yield {"kind": kind, "node": node, "at_s": at_s, "restart_after_s": None if forever else for_s}
        case "leave" | "join" if len(workers) > 1:
            yield {"kind": kind, "node": one(rng, *workers[1:]), "at_s": at_s}
        case "loss" | "duplicate":
            yield {**lasting, "between": one(rng, None, between), "probability": one(rng, 0.1, 0.5, 0.9)}
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
    """The failure of a recipe that breaks the same invariant, with fewer faults and nodes and plainer links; none smaller does."""
    progressed = True
    while progressed:
        progressed = False
        for smaller in _smaller(recipe):
            found = violation(smaller)
            if found and found.invariant == failure.invariant and (found.invariant != "exception" or _same(found, failure)):
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
        yield {**recipe, "faults": {**recipe["faults"], "schedule": schedule[:i] + schedule[i + 1 :]}}
    for name, speeds in regions.items():
        if len(regions) > 1:
            yield with_topology(regions={other: speeds for other, speeds in regions.items() if other != name})
        if len(speeds) > 1:
            yield with_topology(regions={**regions, name: speeds[:-1]})
        if set(speeds) != {1.0}:
            yield with_topology(regions={**regions, name: [1.0] * len(speeds)})
    plain = {"bandwidth_gbit_s": 0.8, "latency_ms": 0, "jitter": 0.0}
    if topology["default"] != plain:
        yield with_topology(default=plain)
    if topology["sharing"] != "none":
        yield with_topology(sharing="none")
