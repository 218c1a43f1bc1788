"""How near the simulator comes to live runs, for all methods over three networks: the table of
docs/live.md.

    python tests/wan/fidelity_table.py FILE.json [NETWORK …] [METHOD …]

Takes 40 minutes on a machine that does nothing else. A row is put into the file as soon as it is
measured, and one that is there already is not measured again, so that the command can be stopped
and started again. Then the whole table is printed.

What belongs here: the networks, the recipes, and the table. What does not: how two runs are
compared (`archipel fidelity`), and how a live run is started over namespaces (`live_network.py`).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import ray
import torch
import yaml
from live_network import LiveNetwork, recipe_of

from archipel.live.probe import OVERHEAD
from archipel.sim.topology import HALOS_GBIT_S

METHODS = ("halos", "noloco", "async_local_sgd", "diloco", "sync_sgd")
REGIONS = ("east", "west", "north", "south")
FASTEST_MBIT_S = 100.0
"""Of the links of HALoS' comparison, scaled; the slowest has 12.5 then."""
INNER_STEPS = 8
STEP_S = 0.25
ROUNDS = 12
"""Of inner steps, on each worker."""
SYNC_STEPS = 24
"""Of synchronous SGD, which sends as much for each of them as others for a round."""
MODEL = {"width": 256, "layers": 2}
"""1.6 M parameters: a message has 6.38 MB."""
LARGE_MODEL = {"width": 560}
"""7.6 M parameters: a message of 30.6 MB takes 64 s over 4 Mbit/s."""
REPORT_EVERY = 70
"""Updates of a region's two workers, 70 s."""
CALM_MBIT_S = 1000.0
"""To the region of the command."""


def pair(mbit_s: float, latency_ms: float) -> dict[str, Any]:
    """The topology of two regions with two workers each."""
    link = {"bandwidth_gbit_s": mbit_s / 1e3, "latency_ms": latency_ms}
    return {
        "regions": {"east": [1.0] * 2, "west": [1.0] * 2},
        "links": [{"between": ["east", "west"], **link}],
    }


def four() -> dict[str, Any]:
    """The topology of four regions with two workers each, whose links are to each other as those
    of HALoS' comparison.
    """
    scale = FASTEST_MBIT_S / 1e3 / max(HALOS_GBIT_S.values())
    return {
        "regions": {region: [1.0] * 2 for region in REGIONS},
        "links": [
            {"between": [REGIONS[a], REGIONS[b]], "bandwidth_gbit_s": gbit_s * scale}
            for (a, b), gbit_s in HALOS_GBIT_S.items()
        ],
    }


MINUTES = "4 Mbit/s, messages of a minute"
NETWORKS = {
    "100 Mbit/s, 10 ms": pair(100, 10),
    "20 Mbit/s, 50 ms": pair(20, 50),
    "four regions": four(),
    MINUTES: pair(4, 0),
}


def recipe(method: str, network: str) -> dict[str, Any]:
    """The run of one method on one network."""
    topology = NETWORKS[network]
    regions: dict[str, list[float]] = topology["regions"]
    workers = [len(speeds) for speeds in regions.values()]
    each = SYNC_STEPS if method == "sync_sgd" else ROUNDS * INNER_STEPS
    made = recipe_of(
        method,
        workers=workers[0],
        inner_steps=INNER_STEPS,
        step_time_s=STEP_S,
        run={"steps": each * sum(workers), "evaluations": 1},
        live={"pace": "profile"},
    )
    made["topology"] = topology
    made["task"] |= MODEL
    if network == MINUTES:
        made["task"] |= LARGE_MODEL
        made["method"]["accumulate"] = REPORT_EVERY
        made["run"]["steps"] *= 5
        made["live"]["deadline_s"] = 30.0  # half of what a message takes
    return made


def measure(method: str, network: str) -> dict[str, Any]:
    """One row of the table."""
    topology = NETWORKS[network]
    regions = list(topology["regions"])
    with LiveNetwork(CALM_MBIT_S, others=tuple(regions[2:]), links=topology["links"]) as live:
        path, as_live = live.folder / "recipe.yaml", live.folder / "topology.yaml"
        path.write_text(yaml.safe_dump(recipe(method, network)))
        links = [{**link, "overhead": OVERHEAD} for link in topology["links"]]
        rules = {"sharing": "fair", "collective": "chain", "links": links}
        as_live.write_text(yaml.safe_dump({**topology, **rules}))
        pairs = list(permutations(regions, 2))
        before = sum(live.network.crossed_bytes(*one) for one in pairs)
        options = ["--topology", str(as_live), "--json", "--out", str(live.folder / "run")]
        run = live.archipel("run", "fidelity", str(path), *options)
        run.process.wait(1800)
        assert run.process.returncode == 0, run.said()[-3000:]
        crossed = sum(live.network.crossed_bytes(*one) for one in pairs) - before
        found: dict[str, Any] = json.loads((live.folder / "run.out").read_text())
    rows = {row["name"]: (row["simulated"], row["live"]) for row in found["rows"]}
    return {"rows": rows, "order": found["order"], "crossed_bytes": crossed}


def shown(found: dict[str, dict[str, Any]]) -> str:
    """The table, for a page of the docs."""
    lines = [
        "| network | method | simulated | live | | computing, simulated and live | "
        "MB between regions, simulated and live | crossed ÷ live | order |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for network in NETWORKS:
        for method in METHODS:
            if (row := found.get(f"{network}; {method}")) is None:
                continue
            figures = row["rows"]
            simulated_s, live_s = figures["time, s"]
            busy = [f"{part:.0%}" for part in figures["computing, part of the time"]]
            sent = figures["bytes between regions"]
            lines.append(
                f"| {network} | {method} | {simulated_s:.1f} s | {live_s:.1f} s | "
                f"{live_s / simulated_s - 1:+.1%} | {busy[0]} and {busy[1]} | "
                f"{sent[0] / 1e6:.1f} and {sent[1] / 1e6:.1f} | "
                f"{row['crossed_bytes'] / sent[1]:.3f} | {row['order']:.0%} |"
            )
    return "\n".join(lines)


def main() -> None:
    path, chosen = Path(sys.argv[1]), set(sys.argv[2:])
    found: dict[str, Any] = {"machine": "", "rows": {}}
    with suppress(FileNotFoundError):
        found = json.loads(path.read_text())
    found["machine"] = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
    for network in NETWORKS:
        for method in METHODS:
            wanted = {network, method} & chosen
            if network == MINUTES and method != "halos":
                continue
            if (chosen and not wanted) or (name := f"{network}; {method}") in found["rows"]:
                continue
            row = measure(method, network)
            row["versions"] = {"ray": ray.__version__, "torch": torch.__version__}
            row["date"] = datetime.datetime.now().isoformat(timespec="seconds")
            found["rows"][name] = row
            path.write_text(json.dumps(found, indent=1))
            print(name, row["rows"]["time, s"], row["crossed_bytes"], flush=True)
    print(shown(found["rows"]))


if __name__ == "__main__":
    main()
