"""Runs in which a seed says what goes wrong: processes killed and stopped, and a link cut, at
random moments.

    python tests/wan/chaos.py METHOD SEED EVENTS

What belongs here: what goes wrong and when, and what must hold of the run all the same. What does
not: how a live run is started over namespaces (`live_network.py`).

Processes are killed by the recipe's own `faults`, so that they have names. They are stopped and
woken up from outside (SIGSTOP, SIGCONT), and the link's devices are set down and up, so nobody in
the run knows of it beforehand.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from live_network import LiveNetwork, LiveRun, recipe_of

from archipel.assemble import build_actors
from archipel.recipe import parse_recipe

WORKERS = 8
STEP_S = 0.1
DEADLINE_S = 8.0
EVERY_S = 4.0
"""From one event to the next, on average."""
QUIET_S = 30.0
"""After the last one; whoever is down then has time to come back."""


@dataclass
class Chaos:
    """What goes wrong in one run.

    Attributes:
        method, seed: of which everything follows.
        events: how often something goes wrong.
        recipe: what is launched; its `faults` are the kills.
        outside: what is done from outside: when, what, where, and for how long.
        log: what has been done, and what the run says of it, in the order of time.
    """

    method: str
    seed: int
    events: int
    recipe: dict[str, Any] = field(init=False)
    outside: list[tuple[float, str, str, float]] = field(init=False, default_factory=list)
    log: list[tuple[float, str]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.recipe = recipe_of(
            self.method,
            workers=WORKERS // 2,
            inner_steps=4,
            step_time_s=STEP_S,
            run={"steps": 10**7, "evaluations": 2},
            live={"pace": "profile", "deadline_s": DEADLINE_S, "max_restarts": 100},
        )
        nodes = [
            str(actor.me)
            for actor in build_actors(parse_recipe(self.recipe), None, torch.empty(0), ())
        ]
        kills, at_s = [], 4.0
        for _ in range(self.events):
            at_s += rng.uniform(0.5, 1.5) * EVERY_S
            match rng.choice(["kill", "stop", "link down"]):
                case "kill":
                    node, back_s = rng.choice(nodes), rng.uniform(0.5, 4.0)
                    kills.append(
                        {"kind": "crash", "node": node, "at_s": at_s, "restart_after_s": back_s}
                    )
                    self.log.append((at_s, f"kill {node}"))
                case "stop":
                    region, for_s = rng.choice(["east", "west"]), rng.uniform(1.0, 12.0)
                    self.outside.append((at_s, "stop", region, for_s))
                case what:
                    self.outside.append((at_s, what, "east – west", rng.uniform(1.0, 16.0)))
        self.recipe["faults"] = {"schedule": kills}
        self.recipe["run"]["seconds"] = self.seconds = at_s + QUIET_S
        # More than they can take; the learning rate follows them.
        self.recipe["run"]["steps"] = int(WORKERS * self.seconds / STEP_S)
        self.rng = rng

    def run(self, live: LiveNetwork) -> dict[str, Any]:
        """Launch it and do all that; its summary, when all that must hold has held."""
        name = f"{self.method}{self.seed}"
        run = live.launch(self.recipe, name, "--checkpoint-every", "5s")
        run.until(lambda said: "steps, " in said, 200)  # said at most a second after the start
        started_s = time.monotonic()
        deeds: list[tuple[float, Any]] = []
        for at_s, what, where, for_s in self.outside:
            deeds.append((at_s, (what, where, for_s)))
        while deeds:
            deeds.sort(key=lambda deed: deed[0])
            at_s, deed = deeds.pop(0)
            if (left_s := started_s + at_s - time.monotonic()) > 0:
                with suppress(Exception):  # it has ended early, which `summary` says
                    run.process.wait(left_s)
                    break
            later = self.do(live, at_s, *deed)
            if later is not None:
                deeds.append(later)
        live.network.set_up("east", "west", up=True)
        summary = run.summary(self.seconds + 120)
        self.check(summary, run)
        return summary

    def do(
        self, live: LiveNetwork, at_s: float, what: str, where: Any, for_s: float
    ) -> tuple[float, Any] | None:
        """Do something from outside; what undoes it, and when."""
        match what:
            case "stop":
                if not (there := live.hosts(where)):
                    return None
                pid = self.rng.choice(there)
                os.kill(pid, signal.SIGSTOP)
                self.log.append((at_s, f"stop a process in {where} for {for_s:.1f} s"))
                return at_s + for_s, ("wake", pid, 0.0)
            case "wake":
                with suppress(ProcessLookupError):
                    os.kill(where, signal.SIGCONT)
            case "link down":
                live.network.set_up("east", "west", up=False)
                self.log.append((at_s, f"link down for {for_s:.1f} s"))
                return at_s + for_s, ("link up", where, 0.0)
            case "link up":
                live.network.set_up("east", "west", up=True)
                self.log.append((at_s, "link up"))
        return None

    def check(self, summary: dict[str, Any], run: LiveRun) -> None:
        """What must hold of a run, as far as it has recorded what that takes."""
        self.log += [
            (outage["time_s"], f"    {outage['who']} is {outage['what']}")
            for outage in summary["outages"]
        ]
        self.log.sort(key=lambda entry: entry[0])
        # clock: nothing is put down before what was put down earlier.
        times_s = [outage["time_s"] for outage in summary["outages"]]
        assert times_s == sorted(times_s)
        # Whoever is lost has been there, and whoever is there again has been lost.
        for who in {outage["who"] for outage in summary["outages"]}:
            what = [outage["what"] for outage in summary["outages"] if outage["who"] == who]
            assert what[0] in ("lost", "cut"), who
            assert all(a != b for a, b in pairwise(what)), (who, what)
            assert what[-1] in ("joined", "mended"), f"{who} has not come back: {what}"
        [path] = run.out.glob("**/metrics.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        marks = [record for record in records if record["kind"] == "eval"]
        trainings = [record for record in records if record["kind"] == "train"]
        # tokens: no more is in the model than workers can have trained, each 0.1 s a step.
        assert summary["absorbed_steps"] <= WORKERS * summary["time_s"] / STEP_S
        # progress: no total falls.
        steps = [mark["inner_steps"] for mark in marks]
        assert steps == sorted(steps)
        # liveness: all have trained after the last thing that went wrong.
        quiet_s = summary["time_s"] - QUIET_S / 3
        lately = {record["node"] for record in trainings if record["time_s"] > quiet_s}
        assert len(lately) == WORKERS, f"of 8 workers these train at the end: {sorted(lately)}"
        losses = [record["loss"] for record in trainings]
        first, last = sum(losses[:40]) / 40, sum(losses[-200:]) / 200
        assert last < first - 0.5, f"the loss went from {first:.3f} to {last:.3f}"
        self.log.append((summary["time_s"], f"the end: training loss {first:.3f} → {last:.3f}"))

    def __str__(self) -> str:
        return "\n".join(f"{time_s:6.1f} s  {what}" for time_s, what in self.log)


def main() -> None:
    method, seed, events = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    chaos = Chaos(method, seed, events)
    with LiveNetwork() as live:
        try:
            summary = chaos.run(live)
        finally:
            print(f"{method}, seed {seed}:\n{chaos}")
    shown = ("time_s", "inner_steps", "outer_steps", "messages", "restarts", "final_loss")
    print({key: summary[key] for key in shown})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
